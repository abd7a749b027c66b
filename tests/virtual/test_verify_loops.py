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
def test_many_uneven_iterations_are_proven_from_few_programs() -> None:
    few, many = (in_iterations(count, of).verify() for count, of in ((16, 3 * 16 + 10), (MANY, 3 * MANY + 200)))
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


def iteration_100_skipped(graph: fx.Graph) -> None:
    renumbered(graph, lambda a, n: [(0, a, n), (100, a + 101 * n, n)])


def rounder(graph: fx.Graph) -> None:
    node = calls(graph, "memory.filled")[-1]
    node.args = (*node.args[:2], torch.float16, *node.args[3:])


def the_last_iteration_alone(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    node.replace_all_uses_with(node.args[1], delete_user_cb=lambda user: user.target is not loop_ops.end)


def read_before_the_end(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    with graph.inserting_after(node):
        read = graph.call_function(torch.ops.aten.neg.default, (node,))
    read.meta = dict(node.meta)


DAMAGES = [iteration_100_skipped, an_iteration_less, added_twice, stale]
DAMAGES += [rounder, the_last_iteration_alone, read_before_the_end]


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_one_of_many_iterations_is_refused(damage: Callable[[fx.Graph], None]) -> None:
    pm = in_iterations(MANY, 3 * MANY + 200)
    program = pm.rank_program(1)
    damage(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.why
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
