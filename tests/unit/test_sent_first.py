"""What other stages wait for is done first, as far as memory allows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.ops.loop import loop_ops, stage_transfer
from shardfx.ir.program.loops import schedule_actions as of_stages
from shardfx.ir.program.rank_program import RankProgram


def programs(width: int, schedule: str = "1f1b") -> list[RankProgram]:
    """Those of three stages."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)]
    x = torch.randn(32, width)
    hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(x,), pipeline=sx.Pipeline(schedule=schedule))
    pm = sx.parallelize(nn.Sequential(*layers), sx.Mesh(pp=3, mb=sx.Loop(4)), hints, virtual=True)
    assert pm.verify()
    return [pm.rank_program(rank) for rank in range(3)]


def behind(program: RankProgram, unit: str) -> int:
    """How many products for weights stand behind what a unit sends."""
    nodes = list(program.graph.nodes)
    begin = next(i for i, node in enumerate(nodes) if node.target is loop_ops.action and node.args[1] == unit)
    end = next(
        (i for i in range(begin + 1, len(nodes)) if nodes[i].target in (loop_ops.action, loop_ops.end)), len(nodes)
    )
    sends = [i for i in range(begin, end) if nodes[i].target is stage_transfer.send]
    return sum(node.target is loop_ops.addmm for node in nodes[max(sends, default=end) : end])


@pytest.mark.long
def test_products_for_weights_stand_behind_the_send_and_nothing_more_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(16)
    monkeypatch.setattr(of_stages, "send_early", lambda steps, *_: list(steps))
    plain = programs(16)
    before, found = ([behind(each, f"B{rank}") for rank, each in enumerate(some)] for some in (plain, made))
    assert before == [0, 1, 1] and found == [0, 2, 2]
    for mine, other in zip(made, plain, strict=True):
        assert replay(mine).peak.nbytes <= 1.01 * replay(other).peak.nbytes


@pytest.mark.long
def test_halves_are_actions_of_their_own() -> None:
    for rank, each in enumerate(programs(8, "zb-h1")):
        assert behind(each, f"I{rank}") == 0
