"""Engines that execute the GraphModules themselves, through ``torch.compile`` where it is wanted.

A real rank runs its program as one module, collectives and all. Virtual ranks run theirs in stretches between the
collectives, each a module (:mod:`.module_stretches`), and meet as always. So do real ranks that do the stages of a
pipeline or put something away, by their own engine
(:func:`shardfx.runtime.distributed.process_engine.in_stretches`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import Forms

from .engine import Engine, Watch
from .module_stretches import Stretches
from .peak_memory import MeasuredPeaks
from .rendezvous import Perform, Request, run

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def _here(x: Tensor) -> Tensor:
    return x


MEETING = Forms({c10d.wait_tensor.default: _here}, Request.of)
"""How virtual ranks do what they do together: the coroutine asks for it."""


def compiler(options: Mapping[str, Any] | None) -> Callable[[fx.GraphModule], Any]:
    """What runs a module: ``torch.compile`` with some options; None: it runs as it is."""
    return (lambda module: module) if options is None else lambda module: torch.compile(module, **options)


class ModuleEngine:
    """Runs modules in the place of another engine, which still runs what is watched.

    Args:
        engine: whose ranks these are.
        options: of ``torch.compile``; None: modules run as they are.
        perform: how virtual ranks do a collective; None for a real rank.
        ending: the context in which a real rank runs, which tells the others how it ends.
        peaks: takes down the peaks of programs that run alone on their device.
    """

    meets_late = False

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        options: Mapping[str, Any] | None,
        perform: Perform | None = None,
        ending: Callable[[], AbstractContextManager[None]] = nullcontext,
        peaks: MeasuredPeaks | None = None,
    ) -> None:
        self.mesh, self.device = mesh, engine.device
        self._engine, self._compiled, self._perform, self._ending = engine, compiler(options), perform, ending
        self._peaks = MeasuredPeaks() if peaks is None else peaks
        self._modules: WeakKeyDictionary[RankProgram, Any] = WeakKeyDictionary()

    @property
    def ranks(self) -> Sequence[int]:
        """Those of the engine."""
        return self._engine.ranks

    def prepare(self) -> None:
        """As the engine does."""
        self._engine.prepare()

    def seed(self) -> Tensor:
        """A step's seed."""
        return self._engine.seed()

    def run(
        self,
        programs: Mapping[int, RankProgram],
        inputs: Mapping[int, Sequence[Tensor]],
        watch: Watch | None = None,
    ) -> Mapping[int, Sequence[Tensor]]:
        """Run the modules; what is watched is run node by node."""
        if watch is not None:
            return self._engine.run(programs, inputs, watch)
        first = next(iter(programs.values()))
        with torch.no_grad(), self._peaks.during(first, self.device) if len(programs) == 1 else nullcontext():
            if self._perform is None:
                (rank,) = programs
                with self._ending():
                    return {rank: self._module(programs[rank], self._whole)(*inputs[rank])}
            made = {rank: self._module(program, self._stretches) for rank, program in programs.items()}
            return run(made, inputs, self.mesh, self._perform)

    def _module(self, program: RankProgram, make: Callable[[RankProgram], Any]) -> Any:
        if program not in self._modules:
            self._modules[program] = make(program)
        return self._modules[program]

    def _whole(self, program: RankProgram) -> Any:
        return self._compiled(program.module())

    def _stretches(self, program: RankProgram) -> Stretches:
        return Stretches(program, self._compiled, MEETING)
