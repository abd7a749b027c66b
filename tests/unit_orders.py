"""Ranks that do the iterations of a step in units, forward and backward, in an order that a test says."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import shardfx as sx
from shardfx.ir.graph import Node, Phase
from shardfx.ir.program.loops.loop_nest import PlannedLoop
from shardfx.ir.program.loops.schedule_actions import split_into_actions
from shardfx.ir.program.lower import Steps, lower
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module.programs import TRAIN
from shardfx.passes.rank import RankContext, built_in, run_rank_passes
from tests.plans import plan
from tests.zoo import make

ALL_FORWARD = "F0.0 F0.1 F0.2 F0.3 B0.0 B0.1 B0.2 B0.3"
ITERATION_BY_ITERATION = "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3"
ONE_AHEAD = "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3"
"""As the last rank but one of a pipeline does its iterations."""
BACKWARDS = "F0.3 F0.2 B0.2 F0.1 B0.3 F0.0 B0.0 B0.1"
ORDERS = {"gpipe": ALL_FORWARD, "plain": ITERATION_BY_ITERATION, "1f1b": ONE_AHEAD, "any": BACKWARDS}


def one_forward_one_backward(ahead: int, count: int) -> str:
    """The order in which so many iterations are under way at most."""
    words = [f"F0.{iteration}" for iteration in range(min(ahead, count))]
    for iteration in range(count):
        words.append(f"B0.{iteration}")
        if iteration + ahead < count:
            words.append(f"F0.{iteration + ahead}")
    return " ".join(words)


def phase(node: Node) -> str:
    return "F0" if node.phase is Phase.FORWARD else "B0"


def arranged(order: str, steps: Steps) -> Steps:
    """The last loop, which has the backward in it, in units: its forward and its backward."""
    loop = [step for step in steps if isinstance(step, PlannedLoop)][-1]
    return [split_into_actions(loop, phase, order.split()) if step is loop else step for step in steps]


def lowered(pm: sx.ParallelModule, rank: int, order: str) -> RankProgram:
    """The program of a rank in units, before rank passes."""
    rules, device = pm._compiled.context.rules, torch.device("cpu")
    return lower(pm.planned, rank, rules, TRAIN, device, partial(arranged, order))


def program(pm: sx.ParallelModule, rank: int, order: str, compiled: bool = False) -> RankProgram:
    """The program of a rank in units."""
    program = lowered(pm, rank, order)
    return run_rank_passes(program, built_in("cpu", compiled), RankContext(pm.planned), each_validated=False)


def in_order(name: str, mesh: sx.Mesh, order: str, **hints: Any) -> sx.ParallelModule:
    """The plan of a case, whose ranks do the four iterations of a step in an order of units."""
    pm = plan(make(name), mesh, grad_accumulation=4, **hints)
    for rank in range(pm.mesh.size):
        pm._programs.step.put(rank, TRAIN, program(pm, rank, order))
    return pm
