"""Whole programs, interpreted: of all stages those of one line of ranks, with shadows for all others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from shardfx.ir.graph import Graph
from shardfx.ir.ops.table import OwnOp
from shardfx.runtime.verify.fault import Failed
from shardfx.runtime.verify.proof.interpreter import HasGraph, Rank
from shardfx.runtime.verify.proof.known import Proof
from shardfx.runtime.verify.proof.meeting import LockStep
from shardfx.runtime.verify.proof.within import Within

from .alike_ranks import AlikeRanks
from .own_programs import Own
from .single_ops import pair

Key = tuple[int, int]
"""A place along the axis of stages, and the number of a box of ranks that hold as much."""
Earlier = Mapping[Key, Within]
"""Whole programs."""


def place_of(graph: Graph, rank: int) -> int:
    """The place of a rank along the axis of stages; 0 where there are none."""
    return graph.mesh.coords(rank)[graph.pipeline.axis] if graph.pipeline is not None else 0


class Whole:
    """Whole programs, for outputs of some kinds; ``owns`` are the plan's by place along the axis of stages."""

    def __init__(self, proof: Proof, owns: Mapping[int, Own], alike: AlikeRanks) -> None:
        self.proof, self.owns, self.alike = proof, owns, alike
        self.mesh = proof.after.mesh
        self.count = self.within = 0
        self._patterns: dict[Key, Rank] = {}
        """A program of which those of all ranks there that were read are copies."""

    def counts(self) -> dict[str, int]:
        """How much was interpreted."""
        return {"whole programs": self.count, "programs within a whole one": self.within}

    def interpret(self, changed: Mapping[int, HasGraph], earlier: list[Earlier]) -> None:
        """Interpret what must be: see :mod:`.many_ranks`. ``earlier`` are whole programs for other outputs; these join
        them.

        Raises:
            Failed: a program is wrong.
        """
        lines = [rank for box in self.alike.boxes for rank in self._whole_line(frozenset(box))]
        if lines:
            programs = {rank: self._own(rank).settled(rank) for rank in lines}
            if not any(self._stand_within(each, programs) for each in earlier):
                self._lock_step(programs, ())
                earlier.append({key: Within(rank) for key, rank in self._patterns.items()})
            self._promises()
        for ranks in self._pairs():
            self._lock_step({rank: self._own(rank).at(rank) for rank in ranks}, ())
        apart = {*changed, *(rank for own in self.owns.values() for rank in own.other)}
        if apart:
            axes = {
                tuple(n.kwargs["axes"])
                for n in self.proof.after.nodes
                if isinstance(n.op, OwnOp) and n.kwargs.get("axes")
            }
            near = apart | {m for r in apart for each in axes for m in self.mesh.group(r, each)}
            near = {m for rank in near for m in self._line(rank)}
            self._lock_step({r: changed.get(r) or self._own(r).at(r) for r in sorted(near)}, apart)

    def _pairs(self) -> Iterator[Sequence[int]]:
        """Two ranks of each family whose code is another one, and the lines of these; of all families together, where
        ranks of one speak to others that hold more or less."""
        families = [family for own in self.owns.values() for family in dict.fromkeys(own.alike.values())]
        pairs = [{m for rank in pair(family.ranks, self.mesh) for m in self._line(rank)} for family in families]
        if len(self.alike.boxes) > 1 and pairs:
            pairs = [set[int]().union(*pairs)]
        yield from map(sorted, pairs)

    def _own(self, rank: int) -> Own:
        return self.owns[place_of(self.proof.after, rank)]

    def _line(self, rank: int) -> Sequence[int]:
        """The ranks that differ from one in their stages alone."""
        pipeline = self.proof.after.pipeline
        return (rank,) if pipeline is None else self.mesh.group(rank, (pipeline.axis,))

    def _whole_line(self, box: Collection[int]) -> Sequence[int]:
        """Ranks of a box that speak to one another, one of all stages, each of a family that was read, or has no number
        but its ops' own; empty where there are none."""
        for own in self.owns.values():
            inside = [rank for rank in own.read if rank in box]
            first = pair(own.read[inside[0]].ranks, self.mesh)[:1] if inside else ()
            for rank in (*first, *inside):
                line = self._line(rank)
                if all(r in own.read or r in own.alike for r in line for own in (self._own(r),)):
                    return line
        return ()

    def _stand_within(self, whole: Earlier, programs: Mapping[int, HasGraph]) -> bool:
        """Whether programs do nothing that whole ones do not do, and give what they should."""
        made = {self._key(rank): self._made(rank, each) for rank, each in programs.items()}
        if not all(key in whole and whole[key].read(rank) for key, rank in made.items()):
            return False
        try:
            self._give(made.values())
        except Failed:  # they are interpreted then, which says where they are wrong
            return False
        self._patterns, self.within = made, self.within + len(made)
        return True

    def _lock_step(self, programs: Mapping[int, HasGraph], apart: Iterable[int]) -> None:
        alone = set(apart)
        made = {r: self._made(r, each, r in alone) for r, each in programs.items()}
        self.count += len(made)
        known = dict(self._patterns)
        for r in made.keys() - alone:
            known.setdefault(self._key(r), made[r])

        def model(rank: Rank, member: int) -> Rank | None:
            mine, theirs = self._key(rank.rank), self._key(member)
            return rank if mine == theirs and not (alone and mine in self._patterns) else known.get(theirs)

        LockStep(self.proof, made, model).run()
        self._give(made.values())
        self._patterns = known

    def _key(self, rank: int) -> Key:
        return place_of(self.proof.after, rank), self.alike.box_of[rank]

    def _made(self, rank: int, program: HasGraph, changed: bool = False) -> Rank:
        return Rank(self.proof, rank, program, self._own(rank).asked.inputs, changed)

    def _give(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            rank.outputs(self._own(rank.rank).asked.outputs)

    def _promises(self) -> None:
        """Outputs that are placed otherwise than promised, but are the same box where that was seen, are it on all
        ranks: what is linear in each coordinate and the same at two places is the same."""
        places = self.alike.starts()
        for rank in self._patterns.values():
            rank.promised(self._own(rank.rank).asked.outputs, places)
