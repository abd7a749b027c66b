"""Which blocks a model is made of, one behind the other, and into which stages they fall.

A block is a member of a list of modules (``layers.3``, ``encoder.block.0``, ``2`` of a ``Sequential``), or a module of
the model's own that computes, where there are none of these; in the order in which the forward comes to them. What is
in none (an add in the model's own ``forward``, the loss) goes where the data flow takes it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase
from shardfx.ir.names import block_of, pattern, prefixes, within

from .assignment import OF_WEIGHTS
from .best_split import best_split

Stages = tuple[int, ...] | tuple[str, ...] | tuple[tuple[str, ...], ...] | None
"""Counts of blocks, first modules, or patterns of modules for each stage; None: as they are balanced."""
WHERE = "Pipeline(stages=...)"


class AsPlanned(tuple[tuple[str, ...], ...]):
    """The blocks of each stage, as another graph of the model has them; others go where the data flow takes them.

    ``held`` says in which stages that graph holds each parameter, buffer and state, ``homes`` at which coordinate each
    stage lies.
    """

    held: Mapping[str, tuple[int, ...]]
    homes: tuple[int, ...]

    def __new__(
        cls, blocks: Iterable[tuple[str, ...]], held: Mapping[str, tuple[int, ...]], homes: tuple[int, ...]
    ) -> AsPlanned:
        made = super().__new__(cls, blocks)
        made.held, made.homes = held, homes
        return made


class Found(tuple[int, ...]):
    """Counts of blocks that nobody told: what the data flow wants elsewhere than they say is done there."""


class Blocks:
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
        """The place of the block that a node is in."""
        module = node.where.module
        if not module:
            return None
        return self._place.get(block_of(module) if self.numbered else prefixes(module)[0])

    def stage_of(self, stages: Stages, count: int) -> Callable[[Node], int | None]:
        """The stage of each node that is in a block.

        Raises:
            Error: there are more stages than blocks; ``stages`` says another number of them, counts that are not those
                of the blocks, modules that are not there or stand in another order, or patterns that overlap or leave
                blocks out.
        """
        kinds = {type(each) for each in stages or ()}
        if len(kinds) > 1 or kinds - {int, str, tuple, list}:
            raise Error(
                "stages are said in more than one way",
                where=WHERE,
                expected="counts of blocks, (1, 3); first modules, ('layers.0', 'layers.2'); or patterns of the "
                "modules of each, (('emb', 'layers.0'), ('layers.1',))",
                got=stages,
                remedy="say all of them as counts, or all by names",
            )
        if stages is not None and len(stages) != count and not (_are(str, stages) and len(stages) == count - 1):
            raise Error(
                f"{len(stages)} stages are described, where there are {count}",
                where=WHERE,
                expected=f"{count} entries: ranks along the axis times chunks",
                got=stages,
                remedy="describe each stage, or leave it to the costs: stages=None",
            )
        if isinstance(stages, AsPlanned):
            known = {name: stage for stage, names in enumerate(stages) for name in names}
            return lambda node: None if (block := self.of(node)) is None else known.get(self.names[block])
        if stages is not None and _are((tuple, list), stages):
            return self._by_patterns(stages)  # type: ignore[arg-type]
        if count > len(self.names):
            raise Error(
                f"there are more stages than blocks: {count} and {len(self.names)}",
                where=WHERE,
                expected=f"at most {len(self.names)} stages, for the blocks {_some(self.names)}",
                got=count,
                remedy="take fewer ranks along the axis or fewer chunks, or say patterns of modules for each stage",
            )
        if stages is None:
            firsts = best_split(self.costs(), count) or []
        elif _are(int, stages):
            firsts = self._by_counts(stages)  # type: ignore[arg-type]
        else:
            firsts = self._by_modules(stages, count)  # type: ignore[arg-type]
        by_block = [bisect_right(firsts, block) - 1 for block in range(len(self.names))]
        return lambda node: None if (block := self.of(node)) is None else by_block[block]

    def costs(self) -> list[float]:
        """The operations of each block, forward and backward; of what stands in front, at the first, behind, at the
        last."""
        costs, at = [0.0] * len(self.names), 0
        for node in self.graph.nodes:
            block = self.of(node)
            at = at if block is None else block
            costs[at] += flops_of(node)
        return [cost + 1.0 for cost in costs]

    def _by_counts(self, counts: Sequence[int]) -> list[int]:
        if min(counts) < 1 or sum(counts) != len(self.names):
            raise Error(
                "stages have another number of blocks than there are",
                where=WHERE,
                expected=f"counts from 1, {len(self.names)} together: {_some(self.names)}",
                got=tuple(counts),
                remedy="count the blocks of each stage anew, or leave it to the costs: stages=None",
            )
        return [sum(counts[:stage]) for stage in range(len(counts))]

    def _by_modules(self, names: Sequence[str], count: int) -> list[int]:
        firsts = [0] * (count - len(names))
        for name in names:
            found = next((place for place, block in enumerate(self.names) if within(block, name)), None)
            if found is None:
                raise Error(
                    f"no stage can begin at {name!r}",
                    where=WHERE,
                    expected=f"one of the blocks {_some(self.names)}",
                    got=name,
                    remedy="begin it at one of these, or say patterns of modules for each stage",
                )
            firsts.append(found)
        if firsts[0] != 0 or any(a >= b for a, b in pairwise(firsts)):
            raise Error(
                "stages do not begin one behind the other",
                where=WHERE,
                expected=f"first modules in the order of the forward, the first one {self.names[0]!r}",
                got=tuple(names),
                remedy="put them in that order; what may stand in another one is said by patterns for each stage",
            )
        return firsts

    def _by_patterns(self, stages: Sequence[Sequence[str]]) -> Callable[[Node], int | None]:
        known: dict[str, int | None] = {}

        def stage(module: str) -> int | None:
            if module not in known:
                paths = prefixes(module)
                hits = [
                    (number, text)
                    for number, texts in enumerate(stages)
                    for text in texts
                    if any(pattern(text).fullmatch(path) for path in paths)
                ]
                if len({number for number, _ in hits}) > 1:
                    said = " and ".join(f"{text!r} of stage {number}" for number, text in hits)
                    raise Error(
                        f"module {module!r} is in two stages",
                        where=WHERE,
                        expected="each module in one",
                        got=said,
                        remedy="name the modules of one of these stages one by one",
                    )
                known[module] = hits[0][0] if hits else None
            return known[module]

        for node in self.graph.nodes:
            module = node.where.module
            heavy = node.phase is Phase.FORWARD and flops_of(node) > 0 and module
            if heavy and stage(module) is None:
                raise Error(
                    f"module {module!r} is in no stage",
                    where=f"{WHERE}; {node.where}",
                    expected="a pattern for it in one of the stages",
                    got=stages,
                    remedy=f"add {module!r} to a stage",
                )
        return lambda node: stage(node.where.module) if node.where.module else None


def stages_as_planned(graph: Graph) -> AsPlanned:
    """The blocks of each stage of a graph in stages, and where it holds weights: what ``stages=`` takes to split
    another graph of the model so.

    Example::

        stages_as_planned(pm.after)    # (("layers.0", "layers.1"), ("layers.2", "layers.3"))
    """
    blocks, stages = Blocks(graph), dict[int, int]()
    for node in graph.nodes:
        block = blocks.of(node)
        if node.phase is Phase.FORWARD and len(node.at) == 1 and block is not None:
            stages[block] = min(node.at[0], stages.get(block, node.at[0]))  # some of it may wait for a later one
    homes = graph.pipeline.homes if graph.pipeline is not None else ()
    named = [tuple(blocks.names[i] for i in sorted(stages) if stages[i] == stage) for stage in range(len(homes))]
    return AsPlanned(named, {given.name: given.at for given in graph.inputs if given.kind in OF_WEIGHTS}, homes)


def _are(kind: type | tuple[type, ...], entries: Sequence[object]) -> bool:
    return all(isinstance(each, kind) for each in entries)


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
