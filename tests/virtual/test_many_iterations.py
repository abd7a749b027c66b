"""Hundreds of iterations: planned, written and proven at the cost of a few, and each of them looked at."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from tests.damage_loops import added_twice, an_iteration_less, calls, stale
from tests.models import Language, next_tokens
from tests.zoo import make

MANY = 256


@cache
def in_iterations(count: int, rows: int = 2 * MANY) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randint(40, (rows, 3)), torch.randint(40, (rows, 3))
    y[: rows // 3, 1:] = -100
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=count)
    return sx.parallelize(Language().double(), sx.Mesh(dp=2), hints, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("rows", [(2 * MANY, 2 * MANY), (3 * 16 + 10, 3 * MANY + 200)], ids=["even", "uneven"])
@pytest.mark.one_in(2)
def test_many_iterations_are_proven_from_few_programs(rows: tuple[int, int]) -> None:
    few, many = (in_iterations(count, of).verify() for count, of in zip((16, MANY), rows, strict=True))
    assert few and many, (few, many)
    for what in ("whole programs", "families", "distinct ops at every rank"):
        assert many.checked[what] == few.checked[what]
    assert many.checked["programs read"] == len(many.programs) * 2 * MANY


def renumbered(graph: fx.Graph, change: Callable[[int, int], list[tuple[int, int, int]]]) -> None:
    """Which rows iteration 100 takes, or from it on."""
    found = None
    for node in graph.nodes:
        if node.target in (loop_ops.index, loop_ops.piecewise_index):
            (_, first, step), *behind = [(0, *node.args[1:])] if node.target is loop_ops.index else node.args[1]
            if step:  # and not the number of rows, which iterations at the end have less of
                found = node, [*change(first, step), *behind]
    assert found is not None
    at, runs = found
    at.target, at.args = loop_ops.piecewise_index, (at.args[0], runs)


def a_wrong_slice_in_iteration_100(graph: fx.Graph) -> None:
    renumbered(graph, lambda a, n: [(0, a, n), (100, a + 99 * n, 0), (101, a + 101 * n, n)])


def iteration_100_skipped(graph: fx.Graph) -> None:
    renumbered(graph, lambda a, n: [(0, a, n), (100, a + 101 * n, n)])


def something_else_is_added(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    with graph.inserting_before(node):
        other = graph.call_function(torch.ops.aten.neg.default, (node.args[1],))
    other.meta = dict(node.meta)
    node.args = (node.args[0], other)


NUMBERS = [a_wrong_slice_in_iteration_100, iteration_100_skipped, an_iteration_less, added_twice, stale]


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("more", [0, MANY + 200], ids=["even", "uneven"])
@pytest.mark.parametrize(
    ("damage", "count"),
    [*((each, MANY) for each in NUMBERS), pytest.param(something_else_is_added, 16, marks=pytest.mark.slow)],
)
def test_what_is_wrong_in_one_of_many_iterations_is_refused(
    damage: Callable[[fx.Graph], None], count: int, more: int
) -> None:
    pm = in_iterations(count, 2 * MANY + more)
    program = pm.rank_program(1)
    damage(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.fault is not None and verdict.fault.rank == 1
    if "100" in damage.__name__:
        assert "iteration 100" in verdict.why


@pytest.mark.long
def test_masks_of_many_iterations_are_proven_together() -> None:
    """Each iteration draws its own part of a mask: a number that iterations and ranks have their own of."""
    case = make("dropout_mlp")
    x, y = case.args[0].repeat(4, 1), case.targets[0].repeat(4)
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=16)
    verdict = sx.parallelize(case.model, sx.Mesh(dp=2), hints, virtual=True).verify()
    assert verdict, verdict
    assert verdict.checked["families"] == len(verdict.programs)
