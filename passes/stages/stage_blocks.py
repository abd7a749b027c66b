"""The consecutive blocks of a model, and their assignment to stages.

A block is a member of a list of modules (``layers.3``, ``encoder.block.0``, ``2`` of a ``Sequential``), or a module of
the model's own that computes, where there are none of these; in the order in which the forward comes to them. What is
in none (an add in the model's own ``forward``, the loss) goes where the data flow takes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from itertools import pairwise

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase
from shardfx.ir.names import block_of, pattern, prefixes, within

from .assignment import OF_WEIGHTS
from .balance import balanced_split

Stages = Sequence[int] | Sequence[str] | Sequence[Sequence[str]] | None
"""Block counts, first modules, or module patterns for each stage; None: balanced."""
WHERE = "Pipeline(stages=...)"
StageOf = Callable[[Node], int | None]
"""The stage of a node within a block; None for other nodes."""


class AsPlanned(tuple[tuple[str, ...], ...]):
    """The blocks of each stage, as another graph of the model has them; others go where the data flow takes them.

    ``stages_of``: in which stages that graph stores each parameter, buffer and state; ``homes``: the coordinate of each
    stage.
    """

    stages_of: Mapping[str, tuple[int, ...]]
    homes: tuple[int, ...]

    def __new__(
        cls, blocks: Iterable[tuple[str, ...]], stages: Mapping[str, tuple[int, ...]], homes: tuple[int, ...]
    ) -> AsPlanned:
        made = super().__new__(cls, blocks)
        made.stages_of, made.homes = stages, homes
        return made


class SearchedCounts(tuple[int, ...]):
    """Counts of blocks from a search: where the data flow disagrees, it wins."""


class ModelBlocks:
    """The blocks of a graph, in order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        forward = [node for node in graph.nodes if node.phase is Phase.FORWARD and node.where.module]
        numbered = dict.fromkeys(block_of(node.where.module) for node in forward)
        numbered.pop("", None)
        self.numbered = bool(numbered)
        heavy = (node for node in forward if flops_of(node) > 0)
        found = list(numbered) if numbered else list(dict.fromkeys(prefixes(n.where.module)[0] for n in heavy))
        self.names: tuple[str, ...] = tuple(found)
        self._place = {name: place for place, name in enumerate(self.names)}

    def of(self, node: Node) -> int | None:
        """The index of a node's block."""
        module = node.where.module
        if not module:
            return None
        return self._place.get(block_of(module) if self.numbered else prefixes(module)[0])

    def stage_of(self, stages: Stages, count: int) -> StageOf:
        """The stage of each node that is in a block.

        Raises:
            Error: there are more stages than blocks; ``stages`` says another number of them, counts that are not those
                of the blocks, modules that are not there or stand in another order, or patterns that overlap or leave
                blocks out.
        """
        kinds, known = {type(each) for each in stages or ()}, f"the blocks {_some(self.names)}"
        if stages is not None and len(stages) != count and not (kinds <= {str} and len(stages) == count - 1):
            what, expected = f"{len(stages)} stages are described, where there are {count}", f"{count} entries"
            raise _wrong(what, f"{expected}: ranks along the axis times chunks", stages, "describe each stage, or none")
        if isinstance(stages, AsPlanned):
            placed = {name: stage for stage, names in enumerate(stages) for name in names}
            return lambda node: None if (block := self.of(node)) is None else placed.get(self.names[block])
        if stages is not None and kinds <= {tuple, list}:
            return self._by_patterns(stages)  # type: ignore[arg-type]
        if count > len(self.names):
            remedy = "take fewer ranks along the axis or fewer chunks, or say patterns of modules for each stage"
            what, expected = f"there are more stages than blocks: {count} and {len(self.names)}", f"at most {known}"
            raise _wrong(what, expected, count, remedy)
        if stages is None:
            firsts = balanced_split(self.costs(), count) or []
        elif kinds <= {int}:
            firsts = self._by_counts(stages)  # type: ignore[arg-type]
        else:
            firsts = self._by_modules(stages, count)  # type: ignore[arg-type]
        by_block = [bisect_right(firsts, block) - 1 for block in range(len(self.names))]
        return lambda node: None if (block := self.of(node)) is None else by_block[block]

    def costs(self) -> list[float]:
        """The FLOPs of each block, forward and backward; those in front count to the first, others to the last."""
        costs, at = [0.0] * len(self.names), 0
        for node in self.graph.nodes:
            block = self.of(node)
            at = at if block is None else block
            costs[at] += flops_of(node)
        return [cost + 1.0 for cost in costs]

    def _by_counts(self, counts: Sequence[int]) -> list[int]:
        if min(counts) < 1 or sum(counts) != len(self.names):
            expected = f"counts from 1, {len(self.names)} together: {_some(self.names)}"
            remedy = "count the blocks of each stage anew, or leave it to the costs: stages=None"
            raise _wrong("stages have another number of blocks than there are", expected, tuple(counts), remedy)
        return [sum(counts[:stage]) for stage in range(len(counts))]

    def _by_modules(self, names: Sequence[str], count: int) -> list[int]:
        firsts = [0] * (count - len(names))
        for name in names:
            found = next((place for place, block in enumerate(self.names) if within(block, name)), None)
            if found is None:
                expected, remedy = f"one of the blocks {_some(self.names)}", "begin it at one of these, or say patterns"
                raise _wrong(f"no stage can begin at {name!r}", expected, name, remedy)
            firsts.append(found)
        if firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
            expected = f"first modules in the order of the forward, the first one {self.names[0]!r}"
            remedy = "put them in that order; what may stand in another one is said by patterns for each stage"
            raise _wrong("stages do not begin one behind the other", expected, tuple(names), remedy)
        return firsts

    def _by_patterns(self, stages: Sequence[Sequence[str]]) -> StageOf:
        stage = cache(lambda module: _stage_by_patterns(module, stages))
        for node in self.graph.nodes:
            module = node.where.module
            if node.phase is Phase.FORWARD and module and flops_of(node) > 0 and stage(module) is None:
                what, remedy = f"module {module!r} is in no stage", f"add {module!r} to a stage"
                raise _wrong(what, "a pattern for it in one of the stages", stages, remedy)
        return lambda node: stage(node.where.module) if node.where.module else None


def _stage_by_patterns(module: str, stages: Sequence[Sequence[str]]) -> int | None:
    texts = [(number, text) for number, texts in enumerate(stages) for text in texts]
    hits = [(n, text) for n, text in texts if any(pattern(text).fullmatch(path) for path in prefixes(module))]
    if len({number for number, _ in hits}) > 1:
        said = " and ".join(f"{text!r} of stage {number}" for number, text in hits)
        remedy = "name the modules of one of these stages one by one"
        raise _wrong(f"module {module!r} is in two stages", "each module in one", said, remedy)
    return hits[0][0] if hits else None


def stages_as_planned(graph: Graph) -> AsPlanned:
    """The blocks of each stage of a graph in stages, and where it stores weights: what ``stages=`` takes to split
    another graph of the model so.

    Example::

        stages_as_planned(pm.planned)    # (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    """
    blocks, stages = ModelBlocks(graph), dict[int, int]()
    for node in graph.nodes:
        block = blocks.of(node)
        if node.phase is Phase.FORWARD and len(node.at) == 1 and block is not None:
            stages[block] = min(node.at[0], stages.get(block, node.at[0]))  # some of it may wait for a later one
    homes = graph.pipeline.homes if graph.pipeline is not None else ()
    named = [tuple(blocks.names[i] for i in sorted(stages) if stages[i] == stage) for stage in range(len(homes))]
    return AsPlanned(named, {inp.name: inp.at for inp in graph.inputs if inp.kind in OF_WEIGHTS}, homes)


def _wrong(what: str, expected: str, got: object, remedy: str) -> Error:
    return Error(what, where=WHERE, expected=expected, got=got, remedy=remedy)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
