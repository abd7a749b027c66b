"""Ops that put elements elsewhere: turns, repetition, diagonals, windows."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.rulebook.arithmetic.pool import side_by_side
from shardfx.ir.rulebook.dims import argument, moves, words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit

aten = torch.ops.aten


def flip(node: Node) -> str:
    """The dims that are turned round are whole: none, if none is named."""
    return "d.. k@dims! -> d.. k@dims" if argument(node, "dims") else "d.. -> d.."


def unfold(node: Node) -> str:
    """The dim that is cut into windows is whole, if they do not stand side by side, and so is the new last one."""
    back = node.op.overloadpacket is aten.unfold_backward
    plain, wide = (node.outs[0], node.operands[0]) if back else (node.operands[0], node.outs[0])
    if not plain.shape:
        return "~e! -> ~e!"
    dim = argument(node, "dim", "dimension") % plain.type.ndim
    apart = side_by_side(plain.shape[dim], wide.shape[dim], wide.shape[-1], argument(node, "step"), 0)
    x = f"d.. (w s!)@{dim}" if apart else f"d.. x@{dim}!"
    y = f"d.. w@{dim} e!" if apart else f"d.. w@{dim}! e!"
    return f"{y} -> {x}" if back else f"{x} -> {y}"


def repeat_local(emit: Emit) -> Any:
    """Each rank repeats what it has as often as makes its part of the result."""
    out, x = emit.result_shape(0), emit.operand_shape(0)
    lead = len(out) - len(x)
    counts = [*out[:lead], *(a // b if b else 1 for a, b in zip(out[lead:], x, strict=True))]
    return emit.call(aten.repeat.default, emit.args[0], counts)


def repeat(node: Node) -> str:
    """``d -> (r d)``: what is repeated may be cut, and so may the repetitions."""
    x, out = node.operands[0].type.ndim, node.outs[0].type.ndim
    result = (f"(r{i} d{i})" if i >= out - x else f"d{i}" for i in range(out))
    return f"~{words(f'd{i}' for i in range(out - x, out))} -> {words(result)}"


def rot90(node: Node) -> str:
    """Of the two dims of the plane one is turned round, and whole; in a quarter turn the other takes its place."""
    ndim, turns = node.operands[0].type.ndim, argument(node, "k") % 4
    i, j = (d % ndim for d in argument(node, "dims"))
    x = f"d.. a@{i}{'!' if turns > 1 else ''} b@{j}{'!' if turns in (1, 2) else ''}"
    return f"{x} -> d.. {f'b@{i} a@{j}' if turns % 2 else f'a@{i} b@{j}'}"


DIAGONAL, PLANE = "d.. q!", "d.. i@dim1! j@dim2!"

RULES: tuple[RuleEntry, ...] = (
    rule(aten.flip, flip, linear="0"),
    rule((aten.tril, aten.triu), "n.. i! j! -> n.. i! j!", linear="0"),
    moves(aten.rot90, rot90),
    moves(aten.repeat, repeat, local=repeat_local),
    moves((aten.diagonal, aten.diagonal_copy), f"{PLANE} -> {DIAGONAL}"),
    rule(aten.diagonal_backward, f"{DIAGONAL} -> {PLANE}", linear="0", shape_arg=1),
    rule(aten.diag_embed, f"{DIAGONAL} -> {PLANE}", linear="0"),
    rule((aten.unfold, aten.unfold_copy), unfold, linear="0"),
    rule(aten.unfold_backward, unfold, linear="0", shape_arg=1),
    # Slices along one dim are scaled, each by its own norm.
    rule(aten.renorm, "d..! k@dim -> d.. k@dim"),
)
