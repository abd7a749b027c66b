"""Measured timelines of steps: the start and end of each rank's actions, by a probe of every call.

    with pm.record("step.json") as recording:
        pm(x, y).backward()
    recording.step, recording.bubble             # seconds, and the share in which ranks are idle

On virtual ranks, which run one after another in this process, a rank is idle while another one works.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Input
from shardfx.ir.program.loops.loop_regions import Iterations, execution_order
from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Span
from shardfx.ir.timing.rank_tasks import BEFORE, main_loop, purposes

from .expert_load import ExpertLoad, LoadRecorder, Loads, loads_by_module

Tensor = torch.Tensor
Row = tuple[tuple[Action, Span], ...]
Measured = tuple[list[dict[int, tuple[Row, Span]]], dict[int, dict[str, ExpertLoad]]]
"""The timelines of some ranks, by step, and the load of their experts."""


@dataclass(frozen=True)
class MeasuredStep:
    """The timeline of one step: the actions of each rank in execution order, in seconds since the epoch."""

    rows: Mapping[int, Row]
    span: Span

    @property
    def bubble(self) -> float:
        """The bubble fraction of the step: the share in which ranks run no action, 0 .. 1, over all ranks."""
        busy = sum(span.length for row in self.rows.values() for _, span in row)
        return 1 - busy / (self.span.length * len(self.rows))


@dataclass
class Recording:
    """A recording of measured steps."""

    steps: list[MeasuredStep] = field(default_factory=list)
    loads: Loads = field(default_factory=dict)
    """The rows of experts in the last step, by module and rank."""
    _open: list[dict[int, _Recorder]] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The median duration of a step in seconds, from the first rank's start to the last one's end."""
        return median(step.span.length for step in self.steps)

    @property
    def bubble(self) -> float:
        """The median bubble fraction of a step."""
        return median(step.bubble for step in self.steps)

    def watch(self, rank: int) -> _Recorder:
        """One for each rank and step."""
        if not self._open or rank in self._open[-1]:
            self._open.append({})
        made = self._open[-1][rank] = _Recorder()
        return made

    def measured(self) -> Measured:
        """What this process's ranks did: their timelines, by step, and the load of experts in the last one."""
        every = ({rank: each.row() for rank, each in step.items() if each.stamps} for step in self._open)
        last = self._open[-1] if self._open else {}
        return [rows for rows in every if rows], {rank: each.experts.loads() for rank, each in last.items()}

    def close(self, everybody: Sequence[Measured]) -> None:
        """Merge what the processes of a job measured."""
        self.loads = loads_by_module(loads for _, loads in everybody)
        for parts in zip(*(rows for rows, _ in everybody), strict=True):
            ranks = sorted((rank, row, span) for part in parts for rank, (row, span) in part.items())
            spans = [span for _, _, span in ranks]
            span = Span(min(each.start for each in spans), max(each.end for each in spans))
            self.steps.append(MeasuredStep({rank: row for rank, row, _ in ranks}, span))


class _Recorder:
    """The recorder of one rank in one step."""

    def __init__(self) -> None:
        self.start = 0.0
        self.stamps: list[tuple[fx.Node, float]] = []
        """Each call, and its end time."""
        self.experts = LoadRecorder()
        self._cuda = False

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Start the clock of the step."""
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        self.start = self._now()

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """Record the end of a call."""
        self.experts(node, result)
        self.stamps.append((node, self._now()))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.time()  # one clock of all processes

    def row(self) -> tuple[Row, Span]:
        """The time span of each action, and of the step."""
        calls = [node for node in self.stamps[0][0].graph.nodes if node.op == "call_function"]
        of, main = purposes(calls), main_loop(calls)
        axis = main.args[0] if main is not None else None
        loop_of: dict[fx.Node, deque[Iterations]] = {}
        for node, iterations in execution_order(calls):
            loop_of.setdefault(node, deque()).append(iterations)
        found: list[tuple[Action, Span]] = []
        before, last = self.start, None
        for node, end in self.stamps:
            kind, stage = of[node]
            iterations = loop_of[node].popleft()
            iteration = 0 if kind == "U" else next((iteration for name, iteration in iterations if name == axis), 0)
            action = Action(kind, stage, iteration) if kind in KINDS else None
            if kind == BEFORE:
                action = last  # memory that is made when it is needed first
            if action is not None:
                begin = found.pop()[1].start if action == last else before
                found.append((action, Span(begin, end)))
            before, last = end, action
        return tuple(found), Span(self.start, before)
