"""Whole programs, interpreted: of all stages those of one line of ranks, with shadows for all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shardfx.ir.graph import Graph
from shardfx.ir.ops.table import OwnOp
from shardfx.runtime.verify.fault import Failed
from shardfx.runtime.verify.proof.interpreter import HasGraph, Rank
from shardfx.runtime.verify.proof.known import Proof
from shardfx.runtime.verify.proof.meeting import LockStep
from shardfx.runtime.verify.proof.within import Within

from .own_programs import Own
from .single_ops import pair

Earlier = Mapping[int, Within]
"""By place along the axis of stages: whole programs."""


def place_of(graph: Graph, rank: int) -> int:
    """The place of a rank along the axis of stages; 0 where there are none."""
    return graph.mesh.coords(rank)[graph.pipeline.axis] if graph.pipeline is not None else 0


class Whole:
    """Whole programs, for outputs of some kinds; ``owns`` are the plan's by place along the axis of stages."""

    def __init__(self, proof: Proof, owns: Mapping[int, Own]) -> None:
        self.proof, self.owns = proof, owns
        self.mesh = proof.after.mesh
        self.count = self.within = 0
        self._patterns: dict[int, Rank] = {}
        """By place: a program of which those of all ranks there that were read are copies."""

    def counts(self) -> dict[str, int]:
        """How much was interpreted."""
        return {"whole programs": self.count, "programs within a whole one": self.within}

    def interpret(self, changed: Mapping[int, HasGraph], earlier: list[Earlier]) -> None:
        """Interpret what must be: see :mod:`.many_ranks`. ``earlier`` are whole programs for other outputs; these join
        them.

        Raises:
            Failed: a program is wrong.
        """
        line = self._whole_line()
        if line:
            programs = {rank: self._own(rank).settled(rank) for rank in line}
            if not any(self._stand_within(each, programs) for each in earlier):
                self._lock_step(programs, ())
                earlier.append({place: Within(rank) for place, rank in self._patterns.items()})
            self._promises()
        for own in self.owns.values():
            for family in dict.fromkeys(own.alike.values()):
                ranks = sorted({m for rank in pair(family.ranks, self.mesh) for m in self._line(rank)})
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

    def _own(self, rank: int) -> Own:
        return self.owns[place_of(self.proof.after, rank)]

    def _line(self, rank: int) -> Sequence[int]:
        """The ranks that differ from one in their stages alone."""
        pipeline = self.proof.after.pipeline
        return (rank,) if pipeline is None else self.mesh.group(rank, (pipeline.axis,))

    def _whole_line(self) -> Sequence[int]:
        """Ranks that speak to one another, one of all stages, each of a family that was read, or has no number but its
        ops' own; empty where there are none."""
        for own in self.owns.values():
            first = pair(next(iter(own.read.values())).ranks, self.mesh)[:1] if own.read else ()
            for rank in (*first, *own.read):
                line = self._line(rank)
                if all(r in own.read or r in own.alike for r in line for own in (self._own(r),)):
                    return line
        return ()

    def _stand_within(self, whole: Earlier, programs: Mapping[int, HasGraph]) -> bool:
        """Whether programs do nothing that whole ones do not do, and give what they should."""
        made = {place_of(self.proof.after, rank): self._made(rank, each) for rank, each in programs.items()}
        if not all(whole[place].read(rank) for place, rank in made.items()):
            return False
        try:
            self._give(made.values())
        except Failed:  # they are interpreted then, which says where they are wrong
            return False
        self._patterns, self.within = made, self.within + len(made)
        return True

    def _lock_step(self, programs: Mapping[int, HasGraph], apart: Iterable[int]) -> None:
        graph, alone = self.proof.after, set(apart)
        made = {r: self._made(r, each, r in alone) for r, each in programs.items()}
        self.count += len(made)
        known = {r: self._patterns[place] for r in made if (place := place_of(graph, r)) in self._patterns}
        LockStep(self.proof, made, known if alone else {}).run()
        self._give(made.values())
        for r, rank in made.items():
            self._patterns.setdefault(place_of(graph, r), rank)

    def _made(self, rank: int, program: HasGraph, changed: bool = False) -> Rank:
        return Rank(self.proof, rank, program, self._own(rank).asked.inputs, changed)

    def _give(self, ranks: Iterable[Rank]) -> None:
        for rank in ranks:
            rank.outputs(self._own(rank.rank).asked.outputs)

    def _promises(self) -> None:
        """Outputs that are placed otherwise than promised, but are the same box where that was seen, are it on all
        ranks: what is linear in each coordinate and the same at 0 and 1 is the same."""
        zero = dict.fromkeys((axis.name for axis in self.mesh.space), 0)
        places = [self.mesh.rank(zero)]
        places += [self.mesh.rank({**zero, axis.name: 1}) for axis in self.mesh.space if axis.size > 1]
        for rank in self._patterns.values():
            rank.promised(self._own(rank.rank).asked.outputs, places)
