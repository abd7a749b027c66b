"""Execution target of a plan (virtual ranks, or one rank of a job), and options of ``pm.compile()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

import torch

from shardfx.compiled import Compiled
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.program.source import write_source
from shardfx.runtime.compiled_programs import Write, compiled
from shardfx.runtime.cuda_graphs import graphed
from shardfx.runtime.distributed.groups import by_stream, is_dry_run, share_memory
from shardfx.runtime.distributed.peers import Peers
from shardfx.runtime.distributed.stage_transport import AHEAD, check_messages
from shardfx.runtime.engine import Engine
from shardfx.runtime.store import Store
from shardfx.runtime.virtual.virtual_engine import VirtualEngine

KNOWN = tuple(name for name in inspect.signature(torch.compile).parameters if name != "model")
"""The options of ``torch.compile``."""
OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records CUDA graphs itself."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of ``torch.compile``, and whether full steps are recorded as CUDA graphs."""

    of_torch: Mapping[str, Any]
    cuda_graphs: bool = False

    def check(self, compiled: Compiled, device: torch.device, virtual: bool) -> None:
        """Check that a plan can be compiled so, on a device.

        Raises:
            Error: it cannot, with the reason.
        """
        for name in self.of_torch:
            if name not in KNOWN:
                close = get_close_matches(name, (*KNOWN, "cuda_graphs"), 1)
                raise Error(
                    f"{name!r} is no option of torch.compile",
                    where="pm.compile(...)",
                    expected=", ".join((*KNOWN, "cuda_graphs")),
                    got=name,
                    remedy=f"did you mean {close[0]!r}?" if close else "leave it out",
                )
        if compiled.hints.arena:
            raise Error(
                "torch.compile plans memory itself, and Hints(arena=True) does so, too",
                where="pm.compile()",
                expected="one of them",
                got="a plan with an arena",
                remedy="leave out one of them",
            )
        if self.cuda_graphs:
            for expected, got, remedy in self._unfit(compiled, device, virtual):
                raise Error(
                    "this plan has no full step that can be recorded as a CUDA graph",
                    where="pm.compile(cuda_graphs=True)",
                    expected=expected,
                    got=got,
                    remedy=remedy,
                )

    def _unfit(self, compiled: Compiled, device: torch.device, virtual: bool) -> Iterator[tuple[str, str, str]]:
        """The reason why steps cannot be recorded as CUDA graphs: expected, got, remedy."""
        without, after = "pm.compile() without cuda_graphs", compiled.after
        if not torch.cuda.is_available():
            yield "a CUDA device", "torch.cuda.is_available() is False", without
        if device.type != "cuda":
            yield "a plan on a CUDA device", f"one on {device.type}", 'Hints(device="cuda"), or pm.to("cuda") before'
        if compiled.captured.update is None:
            got = "a plan without optimizer, whose step is forward and backward alone"
            yield "a plan with the optimizer's step in it", got, "Hints(optimizer=...) and pm.step(...)"
        if virtual and after.mesh.size > 1:
            got = f"{after.mesh.size} virtual ranks, which meet on the host"
            yield "one rank in this process", got, f"torchrun, with a process for each rank; or {without}"
        if after.pipeline is not None:
            yield "a plan without pipeline", "a pipeline, whose sends and receives are done by the host", without
        if any(map(moves_pool, after.nodes)):
            yield "a plan whose values lie on the device", "a plan with offload", without
        if compiled.hints.guard:
            got = "guards, which are looked at before a step is stored"
            yield "a plan without guards", got, f"Hints(guard=False); or {without}"
        if self.of_torch.get("mode") in OWN_GRAPHS:
            got = f"mode={self.of_torch['mode']!r}"
            yield "a mode in which torch records no graphs itself", got, 'mode="max-autotune-no-cudagraphs", or none'


@dataclass(frozen=True)
class ExecutionTarget:
    """Factory of stores and engines of one kind. Virtual ranks touch nothing of ``torch.distributed``."""

    virtual: bool
    device: torch.device

    def device_by(self, convert: Callable[[torch.Tensor], torch.Tensor], dtypes: Iterable[torch.dtype]) -> torch.device:
        """The device to which a conversion of tensors (that of ``pm.to(...)``) moves these ranks, whose tensors have
        some dtypes.

        Raises:
            Error: it makes another dtype of them, which is another plan.
        """
        device = self.device
        for dtype in sorted(dtypes, key=str):
            after = convert(torch.empty(0, dtype=dtype, device=self.device))
            device = after.device
            if after.dtype is not dtype:
                raise Error(
                    "a plan is for the dtypes that it was captured in",
                    where="pm.to(dtype)",
                    expected=f"{dtype}, and another device or none",
                    got=after.dtype,
                    remedy="convert the model, then parallelize it",
                )
        return device

    def moved(self, device: torch.device) -> ExecutionTarget:
        """The same target on another device.

        Raises:
            Error: the device holds no numbers; a real rank's process group is for one kind of device.
        """
        if device.type == "meta":
            raise Error(
                "the shards of a parallel module cannot lose their content",
                where="pm.to(device)",
                expected="a device that holds numbers",
                got="meta",
                remedy="build the model on meta, parallelize it, and load the weights by pm.load_full_state_dict(...)",
            )
        if not self.virtual:
            raise Error(
                "real ranks stay on the device that their process group is for",
                where="pm.to(device)",
                expected=self.device.type,
                got=device.type,
                remedy="Hints(device=...), when the model is parallelized",
            )
        return replace(self, device=device)

    def make_store(self, graph: Graph) -> Store:
        """A store for the parameters and buffers of a planned graph."""
        if self.virtual:
            return Store(graph, self.device)
        from shardfx.runtime.distributed.process_store import ProcessStore

        check_messages(graph, self.device)
        return ProcessStore(graph, self.device)

    def make_engine(self, graph: Graph, write: Write = write_source) -> Engine:
        """An engine for the programs of a planned graph, which ``write`` makes."""
        if self.virtual:
            return VirtualEngine(graph.mesh, self.device, write)
        from shardfx.runtime.distributed.process_engine import ProcessEngine

        return ProcessEngine(graph, self.device, write)

    def make_peers(self) -> Peers:
        """The peers of this rank, for a module that is to be planned. A collective call."""
        return Peers(alone=self.virtual or is_dry_run())

    def make_compiled(self, graph: Graph, options: CompileOptions) -> Engine:
        """An engine that runs programs through ``torch.compile``."""
        apart = self.virtual or graph.pipeline is not None or any(map(moves_pool, graph.nodes))
        write = compiled(options.of_torch, apart)  # a compiled send would wait for its receiver
        if options.cuda_graphs:
            write = graphed(write, self.device)
        return self.make_engine(graph, write)

    @property
    def ahead(self) -> int:
        """How many messages are received ahead, where ranks are on several machines."""
        return 0 if self.virtual else AHEAD

    @property
    def ahead_here(self) -> int:
        """How many messages are received ahead among these ranks, as far as it is known yet."""
        found = share_memory()
        return 0 if found and all(found) and not by_stream(self.device) else self.ahead
