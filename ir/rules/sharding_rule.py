"""The sharding rule of one node, as data: the factors of every dim of every tensor."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from shardfx.ir.dim_sharding import Window

SAME = "same"
Dim = tuple[str, ...]
"""The factors of a tensor dim, whose product it is, major first; () is a dim of size one."""


class Linear(NamedTuple):
    """A set of operands that may be partial sums together, and the results that are then partial sums too.

    All results by default; none if the op does not read the values of the operands. With ``along``: over the axes that
    shard one of these factors. So the bias of ``addmm`` is a partial sum over the axes
    that shard the summed dim: each rank adds its own term to its own product.
    """

    operands: frozenset[int]
    results: frozenset[int] | None = None
    along: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """The text form in a rule: ``0&1``, ``2>0``, ``0>``, ``0*k``."""
        along = f"*{' '.join(sorted(self.along))}" if self.along else ""
        made = "" if self.results is None else ">" + "&".join(map(str, sorted(self.results)))
        return "&".join(map(str, sorted(self.operands))) + along + made


class SeenFactor(NamedTuple):
    """A factor seen through a window of another one, the ``leader``."""

    leader: str
    window: Window


@dataclass(frozen=True)
class ShardingRule:
    """The sharding rule of one node: per operand and per result the factors of each dim."""

    operands: tuple[tuple[Dim, ...], ...]
    results: tuple[tuple[Dim, ...] | None, ...]
    sizes: Mapping[str, int]
    replicated: frozenset[str] = frozenset()
    linear: tuple[Linear, ...] = ()
    reduce: str = "sum"
    """The reduction of a result that lacks a sharded factor; ``same``: every rank has the full result. One word for all
    results, or ``"min, max"``."""
    moves_only: bool = False
    """Whether the op only moves elements: partial values of any reduction (a max too) may pass."""
    transparent: bool = False
    """Whether every sharding passes unchanged: the op moves elements, or is elementwise."""
    unread: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The results that do not depend on a factor: if it is sharded every rank has the full result, and nothing is
    reduced."""
    windows: Mapping[str, SeenFactor] = field(default_factory=dict)
    """Factors of operands seen through windows: they are sharded by their leader, of whose chunk a rank needs the rows
    that it reads."""
    alone: frozenset[str] = frozenset()
    """The windowed factors that may also be sharded by themselves."""

    @cached_property
    def factors(self) -> dict[str, list[tuple[bool, int, int, int]]]:
        """The positions of each factor: (is an operand, tensor, dim, place in the dim)."""
        found: dict[str, list[tuple[bool, int, int, int]]] = {}
        for is_operand, tensors in ((True, self.operands), (False, self.results)):
            for t, dims in enumerate(tensors):
                for d, dim in enumerate(dims or ()):
                    for place, factor in enumerate(dim):
                        found.setdefault(factor, []).append((is_operand, t, d, place))
        return found

    @cached_property
    def leaders(self) -> frozenset[str]:
        """The leaders of windows, which are sharded plainly."""
        return frozenset(seen.leader for seen in self.windows.values())

    def kin(self, factor: str) -> frozenset[str]:
        """The factors that are sharded together with one: a leader and those seen through its windows."""
        leader = self.windows[factor].leader if factor in self.windows else factor
        return frozenset({leader, *(f for f, seen in self.windows.items() if seen.leader == leader)})

    @cached_property
    def reductions(self) -> tuple[str, ...]:
        """The reduction of each result, from ``reduce``."""
        kinds = self.reduce.split(", ")
        return tuple(kinds * len(self.results) if len(kinds) == 1 else kinds)

    @cached_property
    def result_factors(self) -> tuple[frozenset[str], ...]:
        """The factors of each result's dims; none for a result that is no tensor."""
        return tuple(frozenset(f for dim in dims or () for f in dim) for dims in self.results)

    @cached_property
    def ignored(self) -> frozenset[int]:
        """The operands whose values the op does not read."""
        return frozenset[int]().union(*(each.operands for each in self.linear if each.results == frozenset()))

    def passes(self, kind: str, group: frozenset[int], along: str = "") -> frozenset[int] | None:
        """The results that are partial if these operands are, by a reduction of this kind; None if the operands may not
        be.

        Args:
            along: the factor that is sharded over the axis of the partial sums, if one is.
        """
        made = frozenset(i for i, dims in enumerate(self.results) if dims is not None)
        found = self.together(along, group)
        if found is not None and kind == "sum":
            return made if found.results is None else found.results & made
        if group <= self.ignored:
            return frozenset()
        if along or not (kind in ("sum", "avg") or self.moves_only):
            return None
        for operands, results, factors in self.linear:
            if not factors and operands - self.ignored == group - self.ignored:
                return made if results is None else results & made
        return None

    def together(self, factor: str, group: frozenset[int]) -> Linear | None:
        """The group of operands that may be partial sums over the axes that shard a factor, by ``linear``."""
        return next(
            (e for e in self.linear if factor in e.along and e.operands - self.ignored == group - self.ignored), None
        )

    def dim_sizes(self, dim: Dim) -> list[int]:
        """The global sizes of a dim's factors, major first."""
        return [self.sizes[f] for f in dim]


def rule_text(rule: ShardingRule) -> str:
    """The template of a rule: ``a b!, a -> a b!``; ``h~p``: h is seen through windows of p."""

    def word(factor: str) -> str:
        if factor in rule.windows:
            return f"{factor}~{rule.windows[factor].leader}"
        return factor + ("!" if factor in rule.replicated else "")

    def tensor(dims: Iterable[Dim]) -> str:
        texts = []
        for dim in dims:
            inside = " ".join(map(word, dim)) or "1"
            texts.append(f"({inside})" if len(dim) > 1 else inside)
        return " ".join(texts)

    made = ", ".join(tensor(dims) for dims in rule.results if dims is not None)
    return f"{', '.join(map(tensor, rule.operands))} -> {made}"
