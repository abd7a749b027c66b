"""Engines that execute the GraphModules themselves, through ``torch.compile`` where it is wanted.

A real rank runs its program as one module, collectives and all, and so does the one virtual rank of a mesh of one.
Several virtual ranks run theirs as segments between the collectives (:mod:`.program_segments`), and so do real ranks
with stages of a pipeline or offloaded values (:func:`shardfx.runtime.distributed.process_engine.in_segments`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource

from .engine import Engine, Probe
from .program_segments import segmented, stands_alone
from .rank_errors import failed
from .rendezvous import Request, run

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


def _here(x: Tensor) -> Tensor:
    return x


MEETING = CallOverrides({c10d.wait_tensor.default: _here}, Request.of)
"""How virtual ranks do what they do together: the coroutine asks for it."""


def compiler(options: Mapping[str, Any] | None) -> Callable[[fx.GraphModule], Any]:
    """What runs a module: ``torch.compile`` with some options; None: it runs as it is."""
    if options is None:
        return lambda module: module
    given = in_order(options)
    return lambda module: torch.compile(module, **given)


def in_order(options: Mapping[str, Any]) -> Mapping[str, Any]:
    """Options of ``torch.compile`` with those for whole steps (:data:`.inductor_passes.OPTIONS`), where they are
    Inductor's; a mode is written out as its own options."""
    mode, own = options.get("mode"), options.get("options")
    if options.get("backend", "inductor") != "inductor" or (mode is not None and own is not None):
        return options
    from .inductor_passes import OPTIONS  # Inductor, whose import takes long, is needed here alone

    of_mode = {} if mode is None else torch._inductor.list_mode_options(mode, options.get("dynamic"))
    rest = {name: option for name, option in options.items() if name != "mode"}
    return {**rest, "options": {**OPTIONS, **of_mode, **(own or {})}}


@contextmanager
def ending_alone() -> Iterator[None]:
    """Within, the one rank of a mesh runs: what it raises becomes an error that says so."""
    try:
        yield
    except Exception as error:
        raise failed(0, None, error) from error


class ModuleEngine(Engine):
    """Runs modules in the place of another engine, which still runs what is watched.

    Args:
        engine: whose ranks these are.
        options: of ``torch.compile``; None: modules run as they are.
        virtual: whether the ranks are virtual.
        ending: the context in which a rank runs that meets no other here: a real one tells the others how it ends.
    """

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        options: Mapping[str, Any] | None,
        virtual: bool = True,
        ending: Callable[[], AbstractContextManager[None]] = ending_alone,
    ) -> None:
        self.mesh, self.device = mesh, engine.device
        self.wrapped, self._compiled, self._virtual, self._ending = engine, compiler(options), virtual, ending
        self._modules: WeakKeyDictionary[RankProgram, Any] = WeakKeyDictionary()

    def run(
        self,
        programs: Mapping[int, RankProgram],
        inputs: Mapping[int, Sequence[Tensor]],
        watch: Probe | None = None,
    ) -> Mapping[int, Sequence[Tensor]]:
        """Run the modules; what is watched is run node by node."""
        if watch is not None:
            return super().run(programs, inputs, watch)
        with torch.no_grad():
            made = {rank: self._module(program) for rank, program in programs.items()}
            rank, module = next(iter(made.items()))
            if isinstance(module, ProgramSource):
                return run(made, inputs, self.mesh)
            with self._ending():
                return {rank: module(*inputs[rank])}

    def _module(self, program: RankProgram) -> Any:
        if program not in self._modules:
            apart = self._virtual and (self.mesh.size > 1 or any(map(stands_alone, program.graph.nodes)))
            self._modules[program] = (
                segmented(program, self._compiled, MEETING) if apart else self._compiled(program.module())
            )
        return self._modules[program]
