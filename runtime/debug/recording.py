"""Measuring steps: when each rank did what of its program, by a watch that looks at every call.

    with pm.record("step.json") as recording:
        pm(x, y).backward()
    recording.step, recording.bubble             # seconds, and the share in which ranks do nothing

On virtual ranks all work stands in one process: while one rank works, the others wait.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Input
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.schedule.actions import KINDS, Action
from shardfx.ir.schedule.simulation import Span
from shardfx.ir.timing.purposes import BEFORE, Purpose, main_turns, purposes

Tensor = torch.Tensor
Row = tuple[tuple[Action, Span], ...]
WALL = time.time() - time.perf_counter()
"""What makes one clock of all processes' clocks."""


@dataclass(frozen=True)
class MeasuredStep:
    """One step: for each rank its actions in the order in which it did them, in seconds of one clock."""

    rows: Mapping[int, Row]
    span: Span

    @property
    def bubble(self) -> float:
        """The share of the step in which ranks do none of their actions: 0 .. 1, over all ranks."""
        busy = sum(span.length for row in self.rows.values() for _, span in row)
        return 1 - busy / (self.span.length * len(self.rows))


@dataclass
class Recording:
    """Measured steps."""

    steps: list[MeasuredStep] = field(default_factory=list)
    _open: list[dict[int, _Recorder]] = field(default_factory=list)

    @property
    def step(self) -> float:
        """The seconds of a step, from the first rank's start to the last one's end: the median."""
        return median(step.span.length for step in self.steps)

    @property
    def bubble(self) -> float:
        """The share of a step in which ranks do nothing: the median."""
        return median(step.bubble for step in self.steps)

    def watch(self, rank: int) -> _Recorder:
        """One for each rank and step."""
        if not self._open or rank in self._open[-1]:
            self._open.append({})
        made = self._open[-1][rank] = _Recorder()
        return made

    def rows(self) -> list[tuple[dict[int, Row], Span]]:
        """What the ranks of this process did, step by step."""
        found = []
        for step in self._open:
            done = {rank: each for rank, each in step.items() if each.stamps}
            if done:
                span = Span(
                    min(each.start for each in done.values()), max(each.stamps[-1][1] for each in done.values())
                )
                found.append(({rank: each.row() for rank, each in done.items()}, span))
        return found

    def close(self, everybody: Sequence[Sequence[tuple[Mapping[int, Row], Span]]]) -> None:
        """Put together what the processes of a job measured, step by step; all times count from the first start."""
        first = min((span.start for mine in everybody for _, span in mine), default=0.0)
        for parts in zip(*everybody, strict=True):
            rows = {rank: _since(first, row) for mine, _ in parts for rank, row in mine.items()}
            span = Span(min(span.start for _, span in parts) - first, max(span.end for _, span in parts) - first)
            self.steps.append(MeasuredStep(dict(sorted(rows.items())), span))


def _since(first: float, row: Row) -> Row:
    return tuple((action, Span(span.start - first, span.end - first)) for action, span in row)


class _Recorder:
    """One rank's clock in one step."""

    def __init__(self) -> None:
        self.start = 0.0
        self.stamps: list[tuple[fx.Node, float]] = []
        """Each call, and when it was done."""
        self._cuda = False

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """The step begins."""
        self._cuda = any(tensor.is_cuda for tensor in tensors)
        self.start = self._now()

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """A call is done."""
        self.stamps.append((node, self._now()))

    def _now(self) -> float:
        if self._cuda:
            torch.cuda.synchronize()
        return time.perf_counter() + WALL

    def row(self) -> Row:
        """What was done for which action, from when to when."""
        calls = [node for node in self.stamps[0][0].graph.nodes if node.op == "call_function"]
        of, begins, turns = purposes(calls), _begins(calls), _turns(calls)
        found: list[tuple[Action, Span]] = []
        counts: dict[Purpose, int] = {}
        before, last = self.start, None
        for node, end in self.stamps:
            purpose = of[node]
            if purpose.kind == BEFORE and last is not None:
                purpose = last  # memory that is made when it is needed first
            if purpose.kind in KINDS:
                if node is begins[purpose] or purpose not in counts or purpose != last:
                    if node is begins[purpose] or purpose not in counts:
                        counts[purpose] = counts.get(purpose, -1) + 1
                    turn = turns.get(purpose, range(counts[purpose] + 1))[counts[purpose]]
                    found.append((Action(*purpose, 0 if purpose.kind == "U" else turn), Span(before, end)))
                else:
                    found[-1] = found[-1][0], Span(found[-1][1].start, end)
            before, last = end, purpose
        return tuple(found)


def _begins(calls: Sequence[fx.Node]) -> dict[Purpose, fx.Node]:
    """The first call of each purpose that is done once a turn: in no turns within."""
    inside, of = regions(calls), purposes(calls)
    shown = [node for node in calls if part_in_turns(node) in ("", "collects")]
    found: dict[Purpose, fx.Node] = {}
    for node in shown:
        known = found.get(of[node])
        if known is None or len(inside[node]) < len(inside[known]):
            found[of[node]] = node
    return found


def _turns(calls: Sequence[fx.Node]) -> dict[Purpose, list[int]]:
    """For units the turns in the order in which they are done."""
    turns = main_turns(calls)
    order = str(turns.args[3]) if turns is not None and len(turns.args) > 3 else ""
    found: dict[Purpose, list[int]] = {}
    for word in order.split():
        unit, _, turn = word.rpartition(".")
        if unit[0] in KINDS:
            found.setdefault(Purpose(unit[0], int(unit[1:])), []).append(int(turn))
    return found
