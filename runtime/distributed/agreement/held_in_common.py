"""What ranks hold in common of the parameters and buffers of a plan, as its graph says."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from shardfx.ir.graph import Graph, Input, OutputKind
from shardfx.ir.shards import Shards


class InCommon:
    """Of the inputs of a graph that are stored.

    Args:
        holders: of each input, the ranks that hold a piece of it.
        rank: this one.
    """

    def __init__(self, graph: Graph, inputs: Sequence[Input], holders: Sequence[Sequence[int]], rank: int) -> None:
        self._graph, self._inputs, self._holders, self._rank = graph, inputs, holders, rank

    @cached_property
    def in_pieces(self) -> list[str]:
        """What every rank holds a piece of, or the whole."""
        pairs = zip(self._inputs, self._holders, strict=True)
        return [given.name for given, holders in pairs if len(holders) == self._graph.mesh.size]

    @cached_property
    def whole(self) -> list[str]:
        """What every rank holds whole."""
        uncut = {given.name for given in self._inputs if given.value.spec is None or not given.value.spec.axes}
        return [name for name in self.in_pieces if name in uncut]

    @property
    def is_cut(self) -> bool:
        """Whether there are pieces that not every rank holds."""
        return len(self.whole) < len(self._inputs)

    @cached_property
    def each_trains(self) -> bool:
        """Whether each rank holds parameters that have a gradient."""
        trained = {output.name for output in self._graph.outputs if output.kind is OutputKind.GRADIENT}
        pairs = zip(self._inputs, self._holders, strict=True)
        training = set[int]().union(*(holders for given, holders in pairs if given.name in trained))
        return len(training) == self._graph.mesh.size

    @cached_property
    def replicated(self) -> list[tuple[Input, int | None]]:
        """What several ranks hold the same piece of, and which piece this one has."""
        found: list[tuple[Input, int | None]] = []
        for given, holders in zip(self._inputs, self._holders, strict=True):
            assert given.value.spec is not None
            by_rank = Shards.of(given.value.spec, given.value.shape, self._graph.mesh).by_rank
            if len({by_rank[rank] for rank in holders}) < len(holders):
                found.append((given, by_rank[self._rank] if self._rank in holders else None))
        return found
