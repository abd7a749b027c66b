"""unfold-repeats: the equal blocks that capture left out are put back, planned as those that are there.

    repeat layers 2..77                               the blocks 0, 1, 78 and 79 are there, each placed
    parameter %layers.1.w : f32[8{tp}, 6]       ->    parameter %layers.1.w : f32[8{tp}, 6]
    parameter %layers.78.w : f32[8{tp}, 6]            parameter %layers.2.w : f32[8{tp}, 6]   and so on, as block 1

What was decided of block 1, and why, is said of the others too. Before this pass a graph costs by distinct block,
behind it by depth: it stands as far behind as possible, before the first pass that looks beyond a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from shardfx.ir.graph import Graph, Node
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.reasons import ByValue, ShardingDecision
from shardfx.ir.repeat import Repeat
from shardfx.ir.unfolding.twin import BlockTwin, Unfolded
from shardfx.ir.unfolding.unfold import unfold

from .base import Pass, PassContext

PLANNED_WHOLE = "repeated blocks were planned one by one, which takes longer"


@dataclass(frozen=True)
class UnfoldRepeats(Pass):
    """Put back the equal blocks that capture left out, planned as those that are there.

    Raises:
        Irregular: the blocks that are there were not planned alike.
    """

    name: ClassVar[str] = "unfold-repeats"
    copies: ClassVar[bool] = True

    def run(self, graph: Graph, context: PassContext) -> bool:
        if not graph.repeats:
            return False
        unfolded = unfold(graph, _gone(graph))
        graph.reasons.later(lambda made: _copy_decisions(unfolded, made))
        return True


def _gone(graph: Graph) -> list[Node]:
    """The nodes that are no longer in the graph, on which decisions depend."""
    nodes = [value.node for value in graph.reasons.values if value.node is not None]
    present, found = set(graph.nodes), dict[Node, None]()
    while nodes:
        node = nodes.pop()
        if node not in present and node not in found:
            found[node] = None
            nodes += [v.node for v in node.operands if v.node is not None]
    return list(found)


def _moved(made: ShardingDecision, twin: BlockTwin) -> ShardingDecision:
    """The same decision of another block; its causes are still the old ones."""
    moved = made.moved(twin.value)
    moved.hint, moved.where = twin.name(made.hint), replace(made.where, module=twin.name(made.where.module))
    return moved


def _copy_decisions(unfolded: Iterable[Unfolded], decisions: ByValue) -> None:
    """Say of each block that was put back what was said of the one that it is like, in its own neighbourhood.

    The blocks beside those that were put back have new neighbours as well.
    """
    places = {each: (value, i) for value, made in decisions.items() for i, each in enumerate(made)}
    for each in unfolded:
        a, b = ([value for value in decisions if each.a.block_of(value) == delta] for delta in (0, 1))
        moved: list[tuple[ShardingDecision, BlockTwin]] = []
        for copy in each.copies:
            for value in a:
                made = decisions[copy.value(value)] = [_moved(one, copy) for one in decisions[value]]
                moved += [(one, copy) for one in made]
        for values, twin in ((a, each.a), (b, each.copies[-1])):
            for one in (one for value in values for one in decisions[value]):
                now = _moved(one, twin)
                one.refused, one.where, one.carriers = now.refused, now.where, now.carriers
                moved.append((one, twin))
        for one, twin in moved:  # when all are there: what caused a decision may stand in the next block
            causes = [(decisions.get(twin.value(v), ()), number) for v, number in map(places.__getitem__, one.causes)]
            one.causes = tuple(made[number] for made, number in causes if number < len(made))


def why_whole(graph: Graph, hints: Mapping[str, Any]) -> str:
    """Why blocks that are left out cannot be planned by those that are there: a hint that tells them apart."""
    known = [*graph.aliases, *module_outputs(graph), *(node.where.module for node in graph.nodes)]
    for repeat in graph.repeats:
        alike = range(repeat.first - 1, repeat.last + 2)
        names = [name for name in dict.fromkeys(known) if repeat.within(name) == alike[0]]
        for text in hints:
            if not _is_for_all(text, hints, repeat, alike, names):
                return f"the hint {text!r} is not for all of the blocks {repeat.block(alike[0])} to {alike[-1]}"
    return ""


def of_those_there(graph: Graph, hints: Mapping[str, Any]) -> dict[str, Any]:
    """The hints without those that name a block that is left out."""
    repeats = graph.repeats
    return {t: hint for t, hint in hints.items() if "*" in t or not any(r.within(t) in r.left_out for r in repeats)}


def _is_for_all(text: str, hints: Mapping[str, Any], repeat: Repeat, alike: range, names: Iterable[str]) -> bool:
    """Whether a hint says the same of all blocks that are alike, or other hints say it of the others."""
    if "*" not in text:
        moved = (hints.get(repeat.moved(text, i)) for i in alike)
        return repeat.within(text) not in alike or all(hint == hints[text] for hint in moved)
    matches = pattern(text.partition(":")[0]).fullmatch  # a hint on ops names them behind a colon
    return all(bool(matches(name)) == bool(matches(repeat.moved(name, i))) for name in names for i in alike)
