"""``Hints(recompute="auto", memory=...)``: the cheapest values to make again, or to put away, so that a plan fits.

The plan that keeps all says what is held at each moment (:mod:`.stretches`); what to make again is then chosen
(:mod:`.cheapest`), and is a few passes ``recompute{...}`` whose text says it; with ``offload=("activations",)`` also
what to put away, as passes ``offload{...}``. The plan with them is measured as any other; where it holds more than was
thought, that is taken off the budget.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from shardfx.compile import default_passes, offloads, plan_graph
from shardfx.compiled import Compiled
from shardfx.hints import bytes_of
from shardfx.ir.cost.machine import Machine
from shardfx.ir.errors import Error
from shardfx.ir.graph import OutputKind, Phase
from shardfx.ir.names import prefixes
from shardfx.ir.text.printer import size_text
from shardfx.passes import Offload, Recompute

from .budget import Foresight, repeated_modules, what_fits
from .cheapest import Choice, cheapest, least_peak
from .stretches import Course, Group, Kind, runs
from .successive import partings

ACTIVATIONS = "activations"
TOGETHER = (2, 4, 8)
"""So many modules that follow one another are made again as one, at last."""
TRIES = 4
"""So often the budget is corrected by what a plan really holds."""


def fitted(compiled: Compiled, foresight: Foresight) -> Compiled:
    """The plan in which so much is made again that it fits; itself, where nothing is asked for, or all fits.

    Raises:
        Error: there is no budget; or no choice fits.
    """
    hints = compiled.hints
    if hints.recompute != "auto":
        return compiled
    if hints.memory is None:
        raise Error(
            "Hints(recompute='auto') is asked to make a plan fit, and not into what",
            where="Hints(recompute='auto')",
            expected="Hints(memory=...), the bytes that a rank may hold, such as '16GiB'",
            got="memory=None",
            remedy="say it; or name modules: Hints(recompute='layers.*')",
        )
    budget, memory = bytes_of(hints.memory), foresight.of(compiled)
    trains = any(output.kind is OutputKind.GRADIENT for output in compiled.after.outputs)
    if memory.peak <= budget or not trains:
        return compiled
    search = _Search(compiled, foresight, budget)
    made = search.within(budget) or search.from_leanest() or search.joined() or search.wholesale()
    if made is None:
        raise Error(
            f"no choice of what is made again fits into Hints(memory={hints.memory!r})",
            where="Hints(recompute='auto')",
            expected=f"a budget of at least about {size_text(search.least)}",
            got=f"{size_text(budget)}, where a rank that keeps all holds {size_text(memory.peak)}",
            remedy=what_fits(compiled, foresight, budget),
        )
    longer = search.seconds(made) / search.seconds(compiled) - 1
    away = any(isinstance(each, Offload) and ACTIVATIONS in each.whats for each in made.passes)
    how = "made again or put away" if away else "made again"
    made.after.notes.append(
        f"{how} to fit into {size_text(budget)}: {longer:.1%} more time in a step; "
        f"{search.said}; the rank holds {size_text(foresight.of(made).peak)}"
    )
    return made


@dataclass
class _Search:
    """For a plan that fits into a budget, of one that keeps all.

    ``parts``: the modules of each stretch, where they are several. ``said``: how good the last plan that was found is;
    ``least``: what those that were tried hold at the least.
    """

    compiled: Compiled
    foresight: Foresight
    budget: int
    parts: tuple[tuple[str, ...], ...] = ()
    said: str = ""
    least: int = 0

    @cached_property
    def course(self) -> Course:
        """What may be made again, or put away."""
        hints = self.compiled.hints
        options = next((each for each in offloads(hints) if ACTIVATIONS in each.whats), None)
        memory, machine = self.foresight.of(self.compiled), Machine.of(hints.machine)
        return Course(memory, self.compiled.after, machine, options, self.parts)

    @cached_property
    def _moments(self) -> dict[tuple[int, ...], int]:
        return self.course.moments()

    def seconds(self, made: Compiled) -> float:
        """Of a step of a plan, by the cost model."""
        return self.foresight.of(made).footprint.cost.seconds(self.course.machine, made.after.mesh)

    def within(self, wanted: int) -> Compiled | None:
        """The cheapest choice; what its plan holds more than was thought is taken off what is ``wanted``."""
        for _ in range(TRIES):
            choice = cheapest(self.course.kinds, self._moments, wanted)
            if choice is None:
                return None
            made = self._chosen(choice)
            peak = self._held(made)
            if peak <= self.budget:
                self.said = f"the cheapest choice is at most {choice.gap:.1%} cheaper"
                return made
            wanted -= peak - self.budget
        return None

    def from_leanest(self) -> Compiled | None:
        """Where plans hold less than was thought: what the leanest one leaves is given to the choice."""
        floor = least_peak(self.course.kinds, self._moments)
        choice = cheapest(self.course.kinds, self._moments, floor)
        if choice is None:
            return None
        leanest = self._chosen(choice)
        peak = self._held(leanest)
        if peak > self.budget:
            return None
        self.said = "no cheaper choice was found"
        return self.within(self.budget + floor - peak) or leanest

    def joined(self) -> Compiled | None:
        """The same with longer stretches, of modules that follow one another: those first whose choice is cheapest."""
        longer = [_Search(self.compiled, self.foresight, self.budget, parts) for parts in partings(self.course)]
        choices = [(cheapest(each.course.kinds, each._moments, self.budget), each) for each in longer]
        fit = sorted(((choice.seconds, at) for at, (choice, _) in enumerate(choices) if choice is not None))
        leanest = sorted(range(len(longer)), key=lambda at: least_peak(longer[at].course.kinds, longer[at]._moments))
        for at in [at for _, at in fit] or leanest[:1]:
            made = longer[at].within(self.budget) or longer[at].from_leanest()
            self.said, self.least = longer[at].said, min(self.least, longer[at].least)
            if made is not None:
                return made
        return None

    def wholesale(self) -> Compiled | None:
        """The quickest that fits, of those that make all stretches again, or all modules that stand in a list, or those
        of the root, by themselves or some together; put all away; or both."""
        all_again = tuple(
            replace(_pass(self.course, kind, 0, len(kind.stretches), frozenset()), regather=True)
            for kind in self.course.kinds
        )
        options = self.course.offload
        all_away = () if options is None else (replace(options, what=ACTIVATIONS),)
        patterns = (*repeated_modules(self.compiled), "*")
        named = [(Recompute(pattern, segment=several),) for pattern in patterns for several in (1, *TOGETHER)]
        ways = [(again, away) for again in ((), all_again, *named) for away in dict.fromkeys(((), all_away))][1:]
        fit = [made for made in (self._planned(*way) for way in ways) if self._held(made) <= self.budget]
        self.said = "nothing between was found"
        return min(fit, key=self.seconds, default=None)

    def _held(self, made: Compiled) -> int:
        peak = self.foresight.of(made).peak
        self.least = min(self.least or peak, peak)
        return peak

    def _chosen(self, choice: Choice) -> Compiled:
        return self._planned(tuple(_passes(self.course, choice)), tuple(_put_away(self.course, choice)))

    def _planned(self, again: tuple[Recompute, ...], away: tuple[Offload, ...]) -> Compiled:
        """The same with some recomputation, and some activations put away."""
        compiled = self.compiled
        others = tuple(left for each in offloads(compiled.hints) for left in each.without(ACTIVATIONS))
        hints = replace(compiled.hints, recompute=again, offload=(*others, *away))  # what is planned anew keeps to it
        passes = default_passes(hints)
        graph, context = plan_graph(compiled.captured, hints, compiled.context.rules, passes)
        return Compiled(hints, compiled.captured, graph, context, passes)


def _passes(course: Course, choice: Choice) -> Iterator[Recompute]:
    """The choice as passes: of each kind one for each run of stretches that keep the same."""
    for kind in course.kinds:
        count = len(kind.stretches)
        kept = [frozenset(g for g in kind.groups if _keeps(g, choice, i, count)) for i in range(count)]
        needed = {group for group in kind.groups if group.nbytes}
        for start, length in runs(kept):
            if not needed <= kept[start]:
                yield _pass(course, kind, start, length, kept[start])


def _put_away(course: Course, choice: Choice) -> Iterator[Offload]:
    """What is put away as passes, likewise."""
    assert course.offload is not None or not any(choice.away.values())
    for kind in course.kinds:
        gone = [
            frozenset(g for g in kind.groups if 0 <= i - choice.again[g] < choice.away.get(g, 0))
            for i in range(len(kind.stretches))
        ]
        for start, length in runs(gone):
            if gone[start] and course.offload is not None:
                modules, skip, count, only = _named(course, kind, start, length, gone[start])
                chosen = replace(course.offload, what=ACTIVATIONS, modules=modules, only=only, skip=skip, count=count)
                yield chosen


def _keeps(group: Group, choice: Choice, index: int, count: int) -> bool:
    """Whether a stretch keeps a group."""
    again = choice.again[group]
    return again <= index and (group.nbytes > 0 or index < again + choice.kept[group])


def _pass(course: Course, kind: Kind, start: int, length: int, kept: frozenset[Group]) -> Recompute:
    modules, skip, count, keep = _named(course, kind, start, length, kept)
    together = len(kind.stretches[start].paths)
    return Recompute(modules, keep, regather=False, skip=skip, count=count, segment=together)


def _named(
    course: Course, kind: Kind, start: int, length: int, groups: frozenset[Group]
) -> tuple[str | tuple[str, ...], int, int, tuple[str, ...]]:
    """How a pass names stretches, and groups of them: patterns of modules, how many to skip and to take, ops."""
    chosen = kind.stretches[start : start + length]
    paths = [path for each in chosen for path in each.paths]
    outer = paths[0].rpartition(".")[0]
    pattern = f"{outer}.*" if outer else "*"
    there = _matched(course, pattern)
    first = there.index(paths[0]) if paths[0] in there else 0
    if there[first : first + length] == paths and len(there) > 1:
        return pattern, first, length, tuple(sorted(group.pattern([pattern]) for group in groups))
    return tuple(paths), 0, 0, tuple(sorted({group.pattern(each.paths) for group in groups for each in chosen}))


def _matched(course: Course, pattern: str) -> list[str]:
    """The modules that a pattern of a pass stands for, in its order."""
    depth = pattern.count(".") + 1
    outer = pattern[:-1]
    nodes = [node for node in course.graph.nodes if node.phase is Phase.FORWARD]
    paths = (prefixes(node.where.module)[depth - 1 : depth] for node in nodes)
    return list(dict.fromkeys(path for each in paths for path in each if path.startswith(outer)))
