"""The load of experts in a step that is recorded: the rows that each expert of a rank got.

    with pm.record("step.json") as recording:
        pm(x, y).backward()
    recording.loads["layers.0.mlp.experts"][1].rows          (131, 97): of the two experts of rank 1
    print(pm.report())                                       a table: rows of the busiest rank, over the mean

A program has these numbers on the device, where rows are sorted by expert (:mod:`shardfx.ir.ops.experts.dispatch`).
They are kept there while steps run, and read when the recording is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from shardfx.ir.graph import Phase
from shardfx.ir.ops.experts.dispatch import expert_rows
from shardfx.ir.program.rank_program import planned_node


@dataclass(frozen=True)
class ExpertLoad:
    """The rows that a rank's experts of one layer got in a step, by expert, and how many there was ``room`` for."""

    rows: tuple[int, ...]
    room: int

    @property
    def total(self) -> int:
        """The rows of all experts of the rank."""
        return sum(self.rows)


Loads = Mapping[str, Mapping[int, ExpertLoad]]
"""By module and rank."""


@dataclass
class LoadRecorder:
    """The recorder of one rank in one step."""

    seen: list[tuple[str, Tensor, int]] = field(default_factory=list)
    """Of each call that sorts rows by expert its module, where the rows of each expert end, and its room."""

    def __call__(self, node: fx.Node, result: Any) -> None:
        """Keep the numbers of a call, on the device; of recomputed ones once."""
        planned = planned_node(node) if node.target is expert_rows else None
        if planned is not None and planned.phase is Phase.FORWARD:
            sources, _, ends = result
            self.seen.append((planned.where.module, ends.clone(), sources.numel()))

    def loads(self) -> dict[str, ExpertLoad]:
        """The loads by module, summed over the iterations of a loop. The host waits for them."""
        found: dict[str, tuple[Tensor, int]] = {}
        for module, ends, room in self.seen:
            rows = torch.diff(ends, dim=1, prepend=ends.new_zeros((len(ends), 1))).flatten()
            before, had = found.get(module, (torch.zeros_like(rows), 0))
            found[module] = before + rows, had + room
        return {module: ExpertLoad(tuple(rows.tolist()), room) for module, (rows, room) in found.items()}


def loads_by_module(every: Iterable[Mapping[int, Mapping[str, ExpertLoad]]]) -> Loads:
    """The loads of ranks in several processes, by module."""
    made: dict[str, dict[int, ExpertLoad]] = {}
    for rank, loads in sorted((rank, loads) for part in every for rank, loads in part.items()):
        for module, load in loads.items():
            made.setdefault(module, {})[rank] = load
    return made


def busiest(loads: Sequence[ExpertLoad]) -> tuple[int, float, float]:
    """The rows of the busiest rank, these over the mean of all ranks, and the share of its room that they take."""
    most = max(loads, key=lambda load: load.total)
    mean = sum(load.total for load in loads) / len(loads)
    return most.total, most.total / mean if mean else 1.0, most.total / most.room if most.room else 0.0
