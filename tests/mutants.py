"""Damaged programs of a plan: what a verifier must notice."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import shardfx as sx
from shardfx.ir.graph import OutputKind
from shardfx.ir.program.lower import identifier
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from tests.damage import Mutation, Site
from tests.damage_memory import IN_PLACE, POOLS

AS_THEY_RUN = (*IN_PLACE, *POOLS)
"""What the programs as they run could get wrong."""


@dataclass(frozen=True)
class Programs:
    """The programs of a plan, to be damaged: in the plain form that most kinds of damage speak of, or as they run."""

    programs: Mapping[int, RankProgram]
    shapes: Mapping[int, Mapping[str, tuple[int, ...]]]
    buffers: Sequence[tuple[int, str]]
    gradients: Sequence[tuple[int, str]]

    @staticmethod
    def of(pm: sx.ParallelModule, as_they_run: bool = False) -> Programs:
        given = {identifier(g.name): g.value for g in pm.planned.inputs}
        shapes = {
            rank: {n: v.spec.local_shape(v.shape, pm.mesh, pm.mesh.coords(rank)) for n, v in given.items() if v.spec}
            for rank in range(pm.mesh.size)
        }
        programs = {rank: pm.rank_program(rank) for rank in range(pm.mesh.size)}
        if not as_they_run:
            programs = {rank: plain(program) for rank, program in programs.items()}
        outputs = list(enumerate(programs[0].outputs))
        buffers = [(i, o.name) for i, o in outputs if o.kind.is_kept]
        gradients = [(i, identifier(o.name)) for i, o in outputs if o.kind is OutputKind.GRADIENT]
        return Programs(programs, shapes, buffers, gradients)

    def site(self, rank: int, program: RankProgram) -> Site:
        return Site(program.graph, rank, program.mesh, self.shapes[rank], self.buffers, self.gradients)

    def damaged(
        self, mutation: Mutation, count: int, seed: int = 0, on: int | None = None
    ) -> Iterator[tuple[str, dict[int, RankProgram]]]:
        """Up to ``count`` damaged sets of programs, each with the node at which it was damaged; ``on`` a rank alone."""
        last = max(self.programs) if on is None else on
        ranks = [last] if mutation.alone or on is not None else [*self.programs]
        places = max(len(mutation.places(self.site(rank, self.programs[rank]))) for rank in ranks)
        chosen = random.Random(f"{seed} {mutation.name}").sample(range(places), min(count, places))
        for k in sorted(chosen):
            made: dict[int, RankProgram] = {}
            name = ""
            for rank in ranks:
                program = self.programs[rank].copy()
                site = self.site(rank, program)
                found = mutation.places(site)
                if k >= len(found):
                    continue
                name, before = found[k].name, str(site.graph)
                mutation.damage(site, found[k])
                if str(site.graph) != before:
                    site.graph.lint()
                    made[rank] = program
            if made:
                yield name, made
