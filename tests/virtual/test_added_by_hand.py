"""Collectives written otherwise: what is the sum is unknown, and agrees; what is not is refuted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardfx as sx
from tests.captures import captured_once

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
REDUCE, GATHER, EXCHANGE = c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default
RANKS = 3
Call = Callable[..., fx.Node]


def planned() -> sx.ParallelModule:
    """Three ranks, of which each has a share of the sum."""
    torch.manual_seed(0)
    hints = sx.Hints(args=(torch.randn(4, 6, dtype=torch.float64),), specs={"weight": "-, tp"})
    with captured_once("added by hand"):
        return sx.parallelize(nn.Linear(6, 4, dtype=torch.float64), sx.Mesh(tp=RANKS), hints, virtual=True)


def waited(call: Call, op: Any, *args: Any) -> fx.Node:
    return call(c10d.wait_tensor.default, call(op, *args))


def shares(call: Call, x: fx.Node, group: str) -> fx.Node:
    return waited(call, GATHER, call(aten.unsqueeze.default, x, 0), RANKS, group)


def reduced(call: Call, x: fx.Node, group: str, kind: str = "sum") -> fx.Node:
    return waited(call, REDUCE, x, kind, group)


def rows(call: Call, of: fx.Node, *which: int) -> fx.Node:
    """The sum of some rows."""
    first, *others = (call(aten.select.int, of, 0, i) for i in which)
    for other in others:
        first = call(aten.add.Tensor, first, other)
    return first


def of_each(call: Call, x: fx.Node, group: str) -> fx.Node:
    copies = call(aten.cat.default, [call(aten.unsqueeze.default, x, 0)] * RANKS)
    return waited(call, EXCHANGE, copies, [1] * RANKS, [1] * RANKS, group)


def times(call: Call, x: fx.Node, by: float) -> fx.Node:
    return call(aten.mul.Tensor, x, by)


Written = Callable[[Call, fx.Node, str], fx.Node]
SOUND: dict[str, Written] = {
    "gathered and added": lambda c, x, g: c(aten.sum.dim_IntList, shares(c, x, g), [0]),
    "added one by one": lambda c, x, g: rows(c, shares(c, x, g), 2, 0, 1),
    "exchanged and added": lambda c, x, g: c(aten.sum.dim_IntList, of_each(c, x, g), [0]),
    "scaled and back": lambda c, x, g: times(c, reduced(c, times(c, x, 3.0), g), 1 / 3),
    "negated": lambda c, x, g: c(aten.neg.default, reduced(c, c(aten.neg.default, x), g)),
    "a mean times as many": lambda c, x, g: times(c, reduced(c, x, g, "avg"), 3.0),
    "the mean of copies": lambda c, x, g: reduced(c, reduced(c, x, g), g, "avg"),
    "the largest of copies": lambda c, x, g: reduced(c, reduced(c, x, g), g, "max"),
    "copies added and divided": lambda c, x, g: c(aten.div.Tensor, reduced(c, reduced(c, x, g), g), RANKS),
}
WRONG: dict[str, Written] = {
    "one is missing": lambda c, x, g: rows(c, shares(c, x, g), 0, 2),
    "one twice": lambda c, x, g: rows(c, shares(c, x, g), 0, 1, 2, 1),
    "one for another": lambda c, x, g: rows(c, shares(c, x, g), 0, 1, 1),
    "one alone": lambda c, x, g: rows(c, shares(c, x, g), 1),
    "its own more": lambda c, x, g: c(aten.add.Tensor, rows(c, shares(c, x, g), 0, 1, 2), x),
    "added and added": lambda c, x, g: reduced(c, c(aten.sum.dim_IntList, shares(c, x, g), [0]), g),
    "shares reduced": lambda c, x, g: rows(c, reduced(c, shares(c, x, g), g), 0),
    "along another dim": lambda c, x, g: c(aten.sum.dim_IntList, of_each(c, c(aten.t.default, x), g), [0]),
    "scaled and not back": lambda c, x, g: times(c, reduced(c, times(c, x, 3.0), g), 0.3333),
    "scaled by nothing": lambda c, x, g: times(c, reduced(c, times(c, x, 0.0), g), 1.0),
    "scaled out of range": lambda c, x, g: times(c, reduced(c, times(c, x, 1e-300), g), 1e300),
    "the largest of scaled": lambda c, x, g: times(c, reduced(c, times(c, x, -1.0), g, "max"), -1.0),
    "a mean": lambda c, x, g: reduced(c, x, g, "avg"),
    "a mean of means": lambda c, x, g: times(c, reduced(c, reduced(c, x, g, "avg"), g, "avg"), 9.0),
    "copies added": lambda c, x, g: reduced(c, reduced(c, x, g), g),
    "copies multiplied": lambda c, x, g: reduced(c, reduced(c, x, g), g, "product"),
}


def written(pm: sx.ParallelModule, write: Written, ranks: range = range(RANKS)) -> dict[int, fx.GraphModule]:
    """The modules of some ranks, with the sum written otherwise."""
    changed = {rank: pm.rank_module(rank) for rank in ranks}
    for module in changed.values():
        graph = module.graph
        wait = next(node for node in graph.nodes if node.target is c10d.wait_tensor.default)
        started: Any = wait.args[0]
        with graph.inserting_before(wait):
            made = write(
                lambda op, *args, graph=graph: graph.call_function(op, args), started.args[0], started.args[-1]
            )
        wait.replace_all_uses_with(made)
        graph.erase_node(wait)
        graph.erase_node(started)
        module.recompile()
    return changed


@pytest.mark.parametrize("name", SOUND)
def test_sum_written_otherwise_is_unknown_and_agrees(name: str) -> None:
    pm = planned()
    verdict = pm.verify(written(pm, SOUND[name]))
    assert verdict.status == "unknown" and "agrees on 3 random draws" in verdict.why, verdict


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_the_sum_is_refused(name: str) -> None:
    pm = planned()
    verdict = pm.verify(written(pm, WRONG[name]))
    assert verdict.status == ("unknown" if name == "scaled out of range" else "refuted")


def test_what_one_rank_multiplies_alone_is_no_sum() -> None:
    pm = planned()
    alone = written(pm, lambda c, x, g: reduced(c, times(c, x, 2.0), g), range(1, 2))
    assert not pm.verify(alone)
