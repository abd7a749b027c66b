"""Sound rewrites: passes that write values of a captured graph otherwise, and change none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import shardfx as sx
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.rewriter import Rewriter
from shardfx.passes import Context

aten = torch.ops.aten
Call = Callable[..., Value]
Write = Callable[[Call, Value], Value | None]
"""The same value, by calls of ops; None where it cannot be written so."""


def chain(*calls: tuple[Any, ...]) -> Write:
    """Ops one after the other."""

    def write(call: Call, x: Value) -> Value:
        for op, *args in calls:
            x = call(op, x, *args)
        return x

    return write


def transposed(call: Call, x: Value) -> Value | None:
    return call(aten.permute.default, call(aten.permute.default, x, _moved(x, 1)), _moved(x, -1)) if _dims(x) else None


def _moved(x: Value, by: int) -> list[int]:
    n = len(x.shape)
    return [(i + by) % n for i in range(n)]


def _dims(x: Value, size: int = 1) -> bool:
    return len(x.shape) > 0 and x.shape[0] >= size


def flipped(call: Call, x: Value) -> Value | None:
    return call(aten.flip.default, call(aten.flip.default, x, [0]), [0]) if _dims(x) else None


def flat(call: Call, x: Value) -> Value | None:
    return call(aten.reshape.default, call(aten.reshape.default, x, [-1]), list(x.shape)) if x.type.numel else None


def chosen(call: Call, x: Value) -> Value:
    """Of both the same."""
    return call(aten.where.self, call(aten.ge.Scalar, call(aten.abs.default, x), 0), x, x)


REWRITES: Mapping[str, Write] = {
    "a copy": chain((aten.clone.default,)),
    "an alias": chain((aten.alias.default,)),
    "times 1": chain((aten.mul.Tensor, 1)),
    "plus 0": chain((aten.add.Tensor, 0)),
    "by 1": chain((aten.div.Tensor, 1)),
    "minus minus": chain((aten.neg.default,), (aten.neg.default,)),
    "twice, and half": chain((aten.mul.Tensor, 2.0), (aten.mul.Tensor, 0.5)),
    "transposed": transposed,
    "flipped": flipped,
    "flat": flat,
    "chosen": chosen,
}
"""By name; each is what one value may be written as."""


@dataclass(frozen=True)
class Rewritten(sx.Pass):
    """Every ``step``-th value of floating numbers is written otherwise: by those of ``names``, one after the other."""

    name: ClassVar[str] = "written-otherwise"
    before: ClassVar[str] = "propagate"
    names: tuple[str, ...] = tuple(REWRITES)
    step: int = 3

    def run(self, graph: Graph, context: Context) -> bool:
        rewriter, users = Rewriter(graph, context.rules), graph.users()
        values = [(node, v) for node in graph.nodes for v in node.outs if _is_plain(node, v)]
        for number, (node, value) in enumerate(values[:: self.step]):
            last = [node]

            def call(op: Any, *args: Any, last: list[Node] = last, node: Node = node) -> Value:
                last.append(rewriter.after(node, rewriter.call(op, *args, like=node)))
                return last[-1].outs[0]

            write = REWRITES[self.names[number % len(self.names)]]
            made = write(call, value)
            if made is not None and made.type == value.type:
                rewriter.replace(value, made, users=users[value])
        return rewriter.apply()


def _is_plain(node: Node, value: Value) -> bool:
    return value.type.dtype in (torch.float64, torch.complex128) and str(node.op).startswith("aten.")
