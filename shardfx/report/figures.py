"""Cost figures of a plan, as data: memory of a rank, communication by axis and kind with its causes, time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardfx.ir.mesh import Mesh
from shardfx.memory.rank_memory import RankMemory
from shardfx.report.report_rows import StageRow, TileRow
from shardfx.runtime.recording import Recording
from shardfx.schedules.timeline import PlanTimeline

from .console import render

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Cause:
    """The cause of a collective: the node that made the value, its module, and in words what it is."""

    node: str
    module: str
    what: str
    nbytes: float


@dataclass(frozen=True)
class CommRow:
    """All collectives of one kind over the same mesh axes."""

    axes: tuple[str, ...]
    kind: str
    calls: int
    nbytes: float
    seconds: float
    causes: tuple[Cause, ...]


@dataclass(frozen=True)
class Communication:
    """The communication of one rank in one step."""

    rows: tuple[CommRow, ...] = ()

    @property
    def calls(self) -> int:
        """The number of collectives that a rank starts in a step."""
        return sum(row.calls for row in self.rows)

    @property
    def nbytes(self) -> float:
        """The bytes that a rank sends in a step."""
        return sum(row.nbytes for row in self.rows)

    @property
    def seconds(self) -> float:
        """Seconds of the links for all of it, one after the other."""
        return sum(row.seconds for row in self.rows)


@dataclass(frozen=True)
class Report:
    """The costs of a plan; ``str(report)`` is a few tables."""

    mesh: Mesh
    ops: tuple[int, int]
    memory: RankMemory
    communication: Communication
    time: PlanTimeline
    warnings: tuple[str, ...] = ()
    passes: Mapping[str, float] = field(default_factory=dict)
    stages: tuple[StageRow, ...] = ()
    measured: Recording | None = None
    """The steps that were measured last."""
    virtual: bool = False
    """Whether one process did the work of all ranks, one after the other."""
    tiles: tuple[TileRow, ...] = ()
    """The layers of which ranks have tiles, with what these cost."""
    notes: tuple[str, ...] = ()
    """The reasons of further specializations."""

    @property
    def as_measured(self) -> float:
        """The predicted seconds that a measurement compares with: of virtual ranks the work of all of them."""
        rows = self.time.places or self.time.schedule.ranks
        return sum(self.time.busy[row] for row in rows) if self.virtual else self.time.step

    def __str__(self) -> str:
        return render(self.__rich__())

    def __rich__(self) -> RenderableType:
        from shardfx.report.tables import report_tables

        return report_tables(self)
