"""Programs of many ranks, written and read as one: a rank whose program is another is found."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import pack
from shardfx.ir.program.lower import Lowering
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module import programs
from shardfx.passes.rank import RankContext, Waits, run_rank_passes
from shardfx.runtime.verify.families.varying import Diverged, Together
from shardfx.runtime.verify.verdict import Verdict
from tests.captures import captured_once
from tests.zoo import make

aten = torch.ops.aten
UNREAD = 41
"""A rank that is neither inside the mesh as the one whose whole program is interpreted, nor its mirror image."""


@cache
def many(rank_passes: tuple[sx.RankPass, ...] = ()) -> sx.ParallelModule:
    """64 ranks."""
    case = make("mlp3")
    specs = {"args.0": "dp, -", "targets.0": "dp", **case.megatron_specs, "fc1.bias": "-"}
    x, y = case.args[0].repeat(2, 1), case.targets[0].repeat(2)
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs=specs, rank_passes=list(rank_passes))
    with captured_once(case.name):
        return sx.parallelize(case.model, sx.Mesh(dp=16, tp=4), hints)


def refused(verdict: Verdict, rank: int) -> None:
    assert verdict.status == "refuted"
    assert verdict.fault is not None and verdict.fault.rank == rank, verdict.why
    assert "of the model" in verdict.fault.numbers or "do not run" in verdict.fault.numbers


def lowered_wrongly(target: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]], whole: bool) -> Any:
    """Lowering that is wrong on one rank: in whole programs only, or an op that stands alone too."""
    call = Lowering.call

    def other(self: Lowering, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if self.rank == UNREAD and op is target and (len(self.graph.nodes) > 1) >= whole:
            args = change(args)
        return call(self, op, *args, **kwargs)

    return other


@pytest.mark.long
@pytest.mark.parametrize(
    ("target", "change", "whole"),
    [
        (aten.threshold_backward.default, lambda args: (args[0], args[1], 0.5), True),
        (pack.take, lambda args: (*args[:3], 0, *args[4:]), False),
    ],
)
def test_lowering_that_is_wrong_on_one_rank_is_refuted(
    monkeypatch: pytest.MonkeyPatch, target: Any, change: Callable[..., Any], whole: bool
) -> None:
    monkeypatch.setattr(Lowering, "call", lowered_wrongly(target, change, whole))
    refused(many().verify(), UNREAD)


@pytest.mark.long
def test_rank_pass_that_is_wrong_on_one_rank_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Waits.run

    def other(self: Waits, program: RankProgram, context: RankContext) -> bool:
        if program.rank == UNREAD:
            relu = next(node for node in program.graph.nodes if node.target is aten.relu.default)
            relu.replace_all_uses_with(relu.args[0])
        return run(self, program, context)

    monkeypatch.setattr(Waits, "run", other)
    refused(many().verify(), UNREAD)


@pytest.mark.long
def test_slice_that_is_the_same_on_all_ranks_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank takes the first rows of the bias: right on some, and no number tells them apart."""
    call = Lowering.call

    def other(self: Lowering, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if op is pack.take and len(self.graph.nodes) > 1:
            args = (*args[:3], 0, *args[4:])
        return call(self, op, *args, **kwargs)

    monkeypatch.setattr(Lowering, "call", other)
    verdict = many().verify()
    assert not verdict
    assert verdict.checked["programs read"] == 0 and verdict.checked["whole programs"] == 64


@pytest.mark.long
def test_wrong_program_for_the_loss_alone_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was proven of training does not hold of a program for the loss alone."""

    def other(program: RankProgram, *args: Any) -> RankProgram:
        made = run_rank_passes(program, *args)
        if made.rank == UNREAD and all(output.kind is not OutputKind.GRADIENT for output in made.outputs):
            relu = next(node for node in made.graph.nodes if node.target is aten.relu.default)
            relu.replace_all_uses_with(relu.args[0])
        return made

    monkeypatch.setattr(programs, "run_rank_passes", other)
    verdict = many().verify()
    assert not verdict and verdict.fault is not None and verdict.fault.rank == UNREAD


# ---- numbers that ranks have their own of ---------------------------------------------------------------------------


def test_arithmetic_is_that_of_each_rank() -> None:
    ranks = [3, 4, 9, 14]

    def formula(r: Any) -> list[Any]:
        q, m = divmod(r, 5)
        return [r + 1, 7 - r, 2 * r, r // 4, r % 3, q * 5 + m - r, -r, min(r, 100), max(r, 0), f"@{r % 7}", r == r]

    together = Together(ranks)
    made = formula(together.rank())
    assert made[5] == 0 and type(made[5]) is int
    assert [[together.at(each, rank) for each in made] for rank in ranks] == [formula(rank) for rank in ranks]


@pytest.mark.parametrize("ask", [lambda r: r > 4, bool, lambda r: [0, 1, 2][r // 7], hash, lambda r: r & 1])
def test_ranks_go_different_ways(ask: Callable[[Any], Any]) -> None:
    ranks = list(range(8))
    with pytest.raises(Diverged) as split:
        ask(Together(ranks).rank() - 0)
    assert sorted(rank for part in split.value.parts for rank in part) == ranks
