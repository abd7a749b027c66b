"""Families: ranks whose programs are one program, up to the numbers that differ by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from shardfx.runtime.verify.proof.interpreter import HasGraph

from .varying import Diverged, Together, Varying, leaves


@dataclass(frozen=True)
class Written:
    """A program's graph."""

    graph: fx.Graph


@dataclass(frozen=True)
class Family:
    """Ranks, and the one program that was written for all of them."""

    together: Together
    program: HasGraph

    @property
    def ranks(self) -> tuple[int, ...]:
        """Whose program it is, in the order of the mesh."""
        return self.together.ranks

    @cached_property
    def varying(self) -> list[fx.Node]:
        """The calls with constants that differ by rank."""
        return [node for node in self.program.graph.nodes if any(map(varies, leaves(node)))]

    def at(self, rank: int) -> HasGraph:
        """The program of one of the ranks."""
        if not self.varying:
            return self.program

        def own(arg: Any) -> Any:
            return self.together.at(arg, rank)

        graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in self.program.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        for node in self.varying:
            copy = env[node]
            copy.args, copy.kwargs = fx.node.map_aggregate(copy.args, own), fx.node.map_aggregate(copy.kwargs, own)
        return Written(graph)


def varies(arg: Any) -> bool:
    """Whether a constant differs by rank."""
    return isinstance(arg, Varying) or (isinstance(arg, str) and "⟨" in arg)


def families(write: Callable[[Any], HasGraph], parts: Iterable[Sequence[int]]) -> Iterator[Family]:
    """The families of some ranks, each written once; ``parts`` are ranks that may be in one, as far as is known.

    Raises:
        Exception: whatever ``write`` raises for one rank alone.
    """
    waiting = [tuple(part) for part in parts][::-1]
    while waiting:
        ranks = waiting.pop()
        together = Together(ranks)
        try:
            program = write(together.rank())
        except Diverged as split:
            waiting += [tuple(part) for part in split.parts]
            continue
        except Exception:
            if len(ranks) == 1:
                raise
            waiting += [ranks[1:], ranks[:1]]  # the error is to be that of a rank
            continue
        yield Family(together, program)
