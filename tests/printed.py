"""Engines that are looked at: which programs they were given."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

import shardfx as sx
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.distributed.process_engine import ProcessEngine
from shardfx.runtime.virtual.virtual_engine import VirtualEngine

Ran = dict[int, list[RankProgram]]


@contextmanager
def noting_programs() -> Iterator[Ran]:
    """The distinct programs that the engines of this process run within, by rank."""
    ran: Ran = {}

    def noting(run: Any) -> Any:
        def noted(
            self: Any, programs: Mapping[int, RankProgram], inputs: Mapping[int, Sequence[Tensor]], watch: Any = None
        ) -> Any:
            for rank, program in programs.items():
                if program not in ran.setdefault(rank, []):
                    ran[rank].append(program)
            return run(self, programs, inputs, watch)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        for engine in (VirtualEngine, ProcessEngine):
            patch.setattr(engine, "run", noting(engine.run))
        yield ran


def check_printed(pm: sx.ParallelModule, ran: Ran) -> None:
    """Each rank of the plan ran one program, whose text is that which the plan prints."""
    printed = {rank: [str(pm.rank_program(rank))] for rank in pm._programs.step.ranks}
    assert {rank: [str(program) for program in programs] for rank, programs in ran.items()} == printed
