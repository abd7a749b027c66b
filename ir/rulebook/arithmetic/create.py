"""Ops that make values: constants, ranges, random masks. Any dim of the result may be sharded."""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.dropout import draw, dropout
from shardfx.ir.rulebook.dims import words
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, box_of
from shardfx.ir.rules.sharding_rule import SAME

aten = torch.ops.aten


def created(node: Node) -> str:
    """The result's dims, however the operands lie (``new_zeros`` needs only the dtype of its operand)."""
    shape = node.outs[0].shape
    operands = []
    for t, value in enumerate(node.operands):
        same = (i < len(shape) and shape[i] == size for i, size in enumerate(value.shape))
        operands.append("~" + words(f"d{i}" if each else f"o{t}_{i}" for i, each in enumerate(same)))
    return f"{', '.join(operands)} -> {words(f'd{i}' for i in range(len(shape)))}"


def arange_local(emit: Emit) -> Any:
    """This rank's part of a range: a box of the whole, for how many steps one of floats has depends on rounding."""
    return box_of(emit, emit.call(emit.node.op, *emit.args, **emit.kwargs), [emit.result_shard(0, 0)])


def new_empty_local(emit: Emit) -> Any:
    """The strides are those of the whole, and what is written there does not ask for them."""
    return emit.call(aten.new_empty.default, emit.args[0], list(emit.result_shape(0)), **emit.kwargs)


def dropout_local(emit: Emit) -> Any:
    """The mask is drawn by the box of the whole that the rank has: replicas agree, shards differ."""
    x, p, seed, number, _ = emit.args
    box = [emit.result_shard(0, d).first for d in range(len(emit.result_shape(0)))]
    return emit.call(dropout, x, p, seed, number, box)


MADE = rule((), "-> d..!", reduce=SAME)
"""What depends on where in the result one is, and is cheap, every rank makes as a whole, and takes its part of it: all
ops without tensors that have no other rule (``tril_indices``, ``hann_window``)."""

RULES: tuple[RuleEntry, ...] = (
    rule(
        (aten.full.default, aten.zeros.default, aten.ones.default, aten.empty.memory_format),
        "-> d..",
        reduce=SAME,
        shape_arg=0,
    ),
    rule(
        (aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty), created, linear="0>", reduce=SAME, shape_arg=1
    ),
    rule(aten.new_empty_strided, created, linear="0>", reduce=SAME, local=new_empty_local),
    rule(aten.scalar_tensor, "->", reduce=SAME),
    rule((aten.eye, aten.linspace, aten.logspace), "~, ... -> d..!", reduce=SAME),
    rule(aten.arange, "-> d", reduce=SAME, local=arange_local),
    rule(draw, "d.. -> d.."),
    rule(dropout, "d.., -> d..", transparent=True, local=dropout_local),
)
