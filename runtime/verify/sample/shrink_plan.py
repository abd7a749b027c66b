"""A plan on small shapes: the same ops, cuts and relations of dims."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.rules.book import RuleBook

from .sizes import TRIES, Sizes, Unfit
from .small_graph import small_graph

SMALL = 1 << 18
"""A value of so many elements is small enough."""


@dataclass(frozen=True)
class Shrunk:
    """A small plan, and how many sizes were made smaller."""

    before: Graph
    after: Graph
    sizes: int

    def known(self, stored: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Of tensors that are known by content, those that the small plan can use: indices may be too large for it."""
        shapes = {g.name: g.value.shape for g in self.after.of_kind(InputKind.BUFFER)}
        return {name: t for name, t in stored.items() if shapes.get(name) == tuple(t.shape)}


def needed(graph: Graph) -> bool:
    """Whether some value is too large to be run in passing."""
    return any(value.type.numel > SMALL for value in graph.values())


def shrink(before: Graph, after: Graph, book: RuleBook) -> Shrunk | None:
    """The plan in small, or None where no size can be made smaller."""
    sizes = Sizes(book)
    for graph in (before, after):
        sizes.relate(graph)
        sizes.kept.update(key for g in graph.of_kind(InputKind.CONSTANT) for key in sizes.dims(g.value))
    for old, new in ((before.inputs, after.inputs), (before.outputs, after.outputs)):
        twins = {(each.kind, each.name): each.value for each in new}
        for each in old:
            if (each.kind, each.name) in twins:
                for a, b in zip(sizes.dims(each.value), sizes.dims(twins[each.kind, each.name]), strict=True):
                    sizes.unite(a, b)
    for _ in range(TRIES):
        try:
            sizes.solve(after)
            small = Shrunk(small_graph(sizes, before), small_graph(sizes, after), 0)
        except Unfit as unfit:
            if not sizes.restrict(unfit.keys):
                return None
            continue
        smaller = {leaf for leaf, size in sizes.new.items() if size < sizes.size[leaf]}
        return Shrunk(small.before, small.after, len(smaller)) if smaller else None
    return None
