"""Execution target of a plan (virtual ranks, or one rank of a job), and options of ``pm.compile()``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardfx.compile import Compiled
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.program.source import write_source
from shardfx.runtime.compiled_programs import Write, compiled
from shardfx.runtime.cuda_graphs import graphed
from shardfx.runtime.distributed.groups import by_stream, share_memory
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
                raise Error(
                    f"{name!r} is no option of torch.compile",
                    where="pm.compile(...)",
                    expected=", ".join((*KNOWN, "cuda_graphs")),
                    got=name,
                    remedy=did_you_mean(name, (*KNOWN, "cuda_graphs"), "leave it out"),
                )
        if compiled.hints.arena:
            raise Error(
                "torch.compile plans memory itself, and Hints(arena=True) does so, too",
                where="pm.compile()",
                expected="one of them",
                got="a plan with an arena",
                remedy="leave out one of them",
            )
        unfit = [*self._unfit(compiled, device, virtual)] if self.cuda_graphs else []
        if unfit:
            raise Error(
                "this plan has no full step that can be recorded as a CUDA graph",
                where="pm.compile(cuda_graphs=True)",
                expected="the program of one rank on a CUDA device that ends with the optimizer's step "
                "(Hints(optimizer=...) and pm.step(...)), and has no need of the host",
                got=unfit[0],
                remedy="pm.compile() without cuda_graphs; or a plan without that",
            )

    def _unfit(self, compiled: Compiled, device: torch.device, virtual: bool) -> Iterator[str]:
        """The reasons why steps cannot be recorded as CUDA graphs."""
        if not torch.cuda.is_available():
            yield "torch.cuda.is_available() is False"
        if device.type != "cuda":
            yield f"a plan on {device.type}"
        if compiled.captured.update is None:
            yield "a plan without optimizer, whose step is forward and backward alone"
        if virtual and compiled.after.mesh.size > 1:
            yield f"{compiled.after.mesh.size} virtual ranks, which meet on the host"
        if compiled.after.pipeline is not None:
            yield "a pipeline, whose sends and receives are done by the host"
        if any(map(moves_pool, compiled.after.nodes)):
            yield "a plan with offload"
        if compiled.hints.guard:
            yield "guards, which are looked at before a step is stored"
        if self.of_torch.get("mode") in OWN_GRAPHS:
            yield f"mode={self.of_torch['mode']!r}, in which torch records graphs itself"


@dataclass(frozen=True)
class ExecutionTarget:
    """Factory of stores and engines of one kind. Virtual ranks touch nothing of ``torch.distributed``."""

    virtual: bool
    device: torch.device

    def moved(
        self,
        convert: Callable[[torch.Tensor], torch.Tensor],
        dtypes: Iterable[torch.dtype],
        check: Callable[[torch.device], None],
    ) -> ExecutionTarget:
        """The target on the device to which a conversion of tensors (that of ``pm.to(...)``) moves tensors of some
        dtypes; itself, if it is of the same kind. ``check`` is called with a device of another kind.

        Raises:
            Error: it makes another dtype of them, which is another plan; the device holds no numbers; a real rank's
                process group is for one kind of device.
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
        if device.type == self.device.type:
            return self
        check(device)
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
