"""Search over candidate plans of a model: each is planned and replayed, and the first or fastest that fits is taken.

All choices that a memory budget decides are made so: recomputation, stages, schedule, reduction of gradients, and the
remedies of errors. A search is an iterator of candidates that plans each one when it is asked for it, the most
promising first, and may correct what it proposes next by the memory of those before::

    search = PlanSearch(compiled, predictor)
    fitting = search.first(search.plan(recompute=pattern) for pattern in ("layers.*", "*"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from shardfx.compile import Compiled, default_rank_passes, no_collection, offloads, replanned
from shardfx.hints import Hints, bytes_of
from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.replay import replay
from shardfx.ir.names import block_of
from shardfx.ir.text.printer import size_text
from shardfx.memory.rank_memory import RankMemory
from shardfx.module.execution_target import ExecutionTarget
from shardfx.module.programs import program_of, usual_kinds
from shardfx.passes.rank import RankContext
from shardfx.passes.sharding.seeds import data_axes
from shardfx.schedules.timeline import first_ranks


@dataclass(frozen=True)
class Candidate:
    """A candidate plan, the memory of its rank with the highest peak, and the peak of each place on the stage axis."""

    plan: Compiled
    memory: RankMemory
    peaks: tuple[int, ...]
    changed: Mapping[str, Any] = field(default_factory=dict)
    """The hints that are changed for it."""

    @property
    def peak(self) -> int:
        """The highest peak of a rank, in bytes."""
        return self.memory.peak

    @property
    def seconds(self) -> float:
        """The predicted seconds of a step."""
        machine = Machine.of(self.plan.hints.machine)
        return self.memory.footprint.cost.seconds(machine, self.plan.after.mesh)

    @property
    def hints_text(self) -> str:
        """The changed hints, as a user writes them."""
        return "Hints(" + ", ".join(f"{name}={value!r}" for name, value in self.changed.items()) + ")"


class MemoryPredictor:
    """Replays plans of one model on a target: each plan once, and equal calls of several plans once."""

    def __init__(self, place: ExecutionTarget) -> None:
        self.place = place
        self._fakes = FakeCalls()
        self._known: dict[int, Candidate] = {}

    def of(self, compiled: Compiled, changed: Mapping[str, Any] | None = None) -> Candidate:
        """A plan with its memory: of the first rank of each place along the axis of stages."""
        if id(compiled) not in self._known:
            every = [*self._of_stages(compiled)]
            most = max(every, key=lambda memory: memory.peak)
            self._known[id(compiled)] = Candidate(compiled, most, tuple(each.peak for each in every), changed or {})
        return self._known[id(compiled)]

    def _of_stages(self, compiled: Compiled) -> Iterator[RankMemory]:
        device = self.place.device.type
        passes, context = default_rank_passes(compiled.hints, device), RankContext(compiled.after, device)
        for rank in first_ranks(compiled.after):
            with no_collection():
                program = program_of(context, rank, usual_kinds(compiled), compiled.context.rules, passes)
                yield RankMemory(program, replay(program, self.place.ahead, self._fakes))


class PlanSearch:
    """Candidates for a plan under other hints, and the budget of a rank, where it is known (else 0)."""

    def __init__(self, compiled: Compiled, predictor: MemoryPredictor) -> None:
        self.compiled, self.hints = compiled, compiled.hints
        self.predictor = predictor
        self.budget = budget_of(compiled.hints) or 0
        self.tried: list[Candidate] = []
        """All candidates so far, but the initial one."""

    @cached_property
    def initial(self) -> Candidate:
        """The plan under the hints as they are."""
        return self.predictor.of(self.compiled)

    def plan(self, **changed: Any) -> Candidate:
        """The same model, planned with some hints changed, and replayed."""
        made = self.predictor.of(replanned(self.compiled, replace(self.hints, **changed)), changed)
        self.tried.append(made)
        return made

    def fits(self, candidate: Candidate) -> bool:
        """Whether a candidate fits into the budget."""
        return candidate.peak <= self.budget

    def first(self, candidates: Iterable[Candidate]) -> Candidate | None:
        """The first candidate that fits."""
        return next(filter(self.fits, candidates), None)

    def fastest(
        self, candidates: Iterable[Candidate], seconds: Callable[[Candidate], float] = lambda made: made.seconds
    ) -> Candidate | None:
        """The fastest of all candidates that fit."""
        return min(filter(self.fits, candidates), key=seconds, default=None)

    def smallest(self) -> Candidate:
        """The candidate with the lowest peak of those tried."""
        return min(self.tried, key=lambda made: made.peak)


def budget_of(hints: Hints) -> int | None:
    """The memory budget of a rank in bytes, as far as it is known."""
    if hints.memory is not None:
        return bytes_of(hints.memory)
    return int(Machine.of(hints.machine).memory) if hints.machine is not None else None


def what_fits(search: PlanSearch) -> str:
    """The first of the features that make a plan fit; or what the best of them comes to."""
    others = PlanSearch(search.compiled, search.predictor)
    fitting = others.first(others.plan(**changed) for changed in _features(search.compiled))
    if fitting is not None:
        return f"{fitting.hints_text} holds {size_text(fitting.peak)}"
    remedy = "shard parameters or the batch over more ranks"
    if not others.tried:
        return remedy
    best = others.smallest()
    return f"{remedy}; {best.hints_text} needs {size_text(best.peak)}, which is too much"


def _features(compiled: Compiled) -> Iterator[dict[str, Any]]:
    """The memory features that may be added to the hints, the cheapest first."""
    hints = compiled.hints
    if not compiled.has_gradients:
        return
    data = data_axes(compiled.after)
    axes = tuple(axis.name for axis in compiled.after.mesh.axes if axis.name in data and not axis.loop)
    stored: list[dict[str, Any]] = [{}]
    if axes and not hints.zero:
        axis: dict[str, Any] = {} if axes == ("dp",) else {"zero_axis": axes if len(axes) > 1 else axes[0]}
        stored += [{"zero": level, **axis} for level in (1, 3)]
    again: list[dict[str, Any]] = [{}]
    if hints.recompute in (None, "auto"):
        again += [{"recompute": pattern} for pattern in repeated_modules(compiled)]
    yield from ({**less, **more} for less in stored for more in again if less or more)
    there = {what for each in offloads(hints) for what in each.whats}
    updates = compiled.captured.update is not None
    idle = [what for what in ("optimizer", "activations") if what not in there and (updates or what != "optimizer")]
    parameters = [what for what in ("parameters",) if what not in there]  # which are moved most often
    for away in dict.fromkeys((tuple(idle), (*idle, *parameters))):
        if away:
            offload = {"offload": (*hints.offload, *away)}
            yield offload
            yield {**stored[-1], **again[-1], **offload}


def repeated_modules(compiled: Compiled) -> list[str]:
    """The pattern of the modules that stand in the longest list, such as ``layers.*``, if there is one."""
    found: dict[str, set[str]] = {}
    for node in compiled.before.nodes:
        path, _, number = block_of(node.where.module).rpartition(".")
        if path:
            found.setdefault(f"{path}.*", set()).add(number)
    longest = max(found, key=lambda pattern: len(found[pattern]), default="")
    return [longest] if longest and len(found[longest]) > 1 else []
