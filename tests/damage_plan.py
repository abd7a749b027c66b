"""Damage that a pass may do to a planned graph, and changes that do none: each a pass, run where it hurts most."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

import shardfx as sx
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind
from shardfx.ir.rewriter import Rewriter
from shardfx.passes import PassContext

aten = torch.ops.aten
Change = Callable[[Graph], bool]


@dataclass(frozen=True)
class Changes(sx.Pass):
    """Does something to the graph, before placements are chosen or behind all built-in passes but ``order``."""

    name: ClassVar[str] = "changes"
    change: Change = lambda graph: False

    def run(self, graph: Graph, context: PassContext) -> bool:
        return self.change(graph)


@dataclass(frozen=True)
class ChangesFirst(Changes):
    name: ClassVar[str] = "changes-first"
    before: ClassVar[str] = "propagate"


def dropped(kind: OutputKind) -> Change:
    """The last output of a kind is gone."""

    def change(graph: Graph) -> bool:
        at = max(i for i, output in enumerate(graph.outputs) if output.kind is kind)
        del graph.outputs[at]
        return True

    return change


def returned_instead(graph: Graph) -> bool:
    """A result is the value that it is made of."""
    result = next(o for o in graph.outputs if o.kind is OutputKind.RESULT)
    same = [v for n in graph.nodes for v in n.outs if v.type == result.value.type and v is not result.value]
    other = next((v for v in reversed(same) if v.spec == result.value.spec), None)
    result.value = other if other is not None else next(v for n in graph.nodes for v in n.outs)
    return True


def exchanged(graph: Graph) -> bool:
    """Two outputs stand in the place of each other."""
    a, b = graph.outputs[-2:]
    graph.outputs[-2:] = [b, a]
    return True


def twice(graph: Graph) -> bool:
    """An output is there twice."""
    last = graph.outputs[-1]
    graph.outputs.append(Output(last.kind, last.name, last.value, last.spec))
    return True


def constant_edited(graph: Graph) -> bool:
    """A number of a constant is another one, in place."""
    given = next(g for g in graph.of_kind(InputKind.CONSTANT) if g.constant is not None)
    assert given.constant is not None
    given.constant.view(-1)[0] += 1
    return True


def constant_replaced(graph: Graph) -> bool:
    """The same by another tensor."""
    given = next(g for g in graph.of_kind(InputKind.CONSTANT) if g.constant is not None)
    assert given.constant is not None
    given.constant = given.constant + 1
    return True


DROPS = {
    "a gradient is dropped": dropped(OutputKind.GRADIENT),
    "a result is dropped": dropped(OutputKind.RESULT),
    "another value is the result": returned_instead,
    "outputs change places": exchanged,
    "an output is there twice": twice,
}
"""What may be done to every graph."""
MORE = {
    "the loss is dropped": dropped(OutputKind.LOSS),
    "a buffer's new content is dropped": dropped(OutputKind.BUFFER),
    "a constant is edited": constant_edited,
    "a constant is replaced": constant_replaced,
}
"""What may be done where there is such a thing."""


def through(op: Any, *more: Any) -> Change:
    """Every relu goes through another op."""

    def change(graph: Graph) -> bool:
        rewriter, users = Rewriter(graph), graph.users()
        for node in graph.nodes:
            if node.op is aten.relu.default:
                value = node.outs[0]
                made = rewriter.after(node, rewriter.call(op, value, *more))
                rewriter.replace(value, made.outs[0], users=users[value])
        return rewriter.apply()

    return change


WRONG = {
    "a factor behind a relu": through(aten.mul.Tensor, 2),
    "another function behind a relu": through(aten.sin.default),
}
SOUND = {
    "a copy": through(aten.clone.default),
    "an alias": through(aten.alias.default),
    "a factor 1": through(aten.mul.Tensor, 1),
    "a summand 0": through(aten.add.Tensor, 0),
}
"""What does no harm."""
