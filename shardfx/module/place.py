"""Where a plan runs: on virtual ranks in this process, or as one rank of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch

from shardfx.compile import default_rank_passes
from shardfx.hints import Hints
from shardfx.ir.cost.footprint import PLAIN, Transport
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.passes.rank import RankPass
from shardfx.plugins import as_rank_passes
from shardfx.runtime.cuda_graphs import GraphEngine, cuda_graphs
from shardfx.runtime.distributed.groups import all_share_memory, by_stream, check_size, is_dry_run
from shardfx.runtime.distributed.peer_failure import ending_compiled
from shardfx.runtime.distributed.process_engine import LARGE
from shardfx.runtime.distributed.stage_transport import AHEAD, check_messages
from shardfx.runtime.engine import Engine
from shardfx.runtime.module_engine import MeasuredPeaks, ModuleEngine, ending_alone
from shardfx.runtime.peers import Peers
from shardfx.runtime.store import Store
from shardfx.runtime.virtual.virtual_engine import VirtualEngine, perform
from shardfx.runtime.virtual.virtual_store import VirtualStore

from .compile_options import CompileOptions


@dataclass(frozen=True)
class Place:
    """Makes stores and engines of one kind. Nothing of ``torch.distributed`` is touched for virtual ranks."""

    virtual: bool
    device: torch.device

    def device_by(self, convert: Callable[[torch.Tensor], torch.Tensor], dtypes: Iterable[torch.dtype]) -> torch.device:
        """The device to which a conversion of tensors (what ``pm.to(...)`` does to each) brings these ranks, which
        hold tensors of some dtypes.

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

    def moved(self, device: torch.device) -> Place:
        """The same ranks on another device.

        Raises:
            Error: the device holds no numbers; a real rank's process group is for one kind of device.
        """
        if device.type == "meta":
            raise Error(
                "the pieces of a parallel module cannot lose their content",
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

    def check(self, mesh: Mesh) -> None:
        """Real ranks are those of ``mesh``.

        Raises:
            Error: there is another number of them.
        """
        if not self.virtual:
            check_size(mesh)

    def make_store(self, graph: Graph) -> Store:
        """A store for the parameters and buffers of a planned graph."""
        if self.virtual:
            return VirtualStore(graph, self.device)
        from shardfx.runtime.distributed.process_store import ProcessStore

        check_messages(graph, self.device)
        return ProcessStore(graph, self.device)

    def make_engine(self, graph: Graph) -> Engine:
        """An engine that runs the programs of a planned graph."""
        if self.virtual:
            return VirtualEngine(graph.mesh, self.device)
        from shardfx.runtime.distributed.process_engine import ProcessEngine

        return ProcessEngine(graph, self.device)

    def make_peers(self) -> Peers:
        """The other ranks, to a parallel module that is to be planned. All of them call it alike."""
        if self.virtual or is_dry_run():
            return Peers()
        from shardfx.runtime.distributed.process_peers import ProcessPeers

        return ProcessPeers()

    def make_compiled(self, graph: Graph, options: CompileOptions, peaks: MeasuredPeaks) -> Engine:
        """An engine that runs programs as modules, through ``torch.compile``, and measures their peaks."""
        apart = not self.virtual and (graph.pipeline is not None or any(map(moves_pool, graph.nodes)))
        if apart:  # a compiled send would wait until it is received, and a copy be planned anew
            from shardfx.runtime.distributed.process_engine import ProcessEngine, in_segments

            return ProcessEngine(graph, self.device, in_segments(options.of_torch))
        engine = ModuleEngine(
            self.make_engine(graph),
            graph.mesh,
            options.of_torch,
            perform if self.virtual else None,
            ending_alone if self.virtual else ending_compiled,
            peaks,
        )
        return GraphEngine(engine, cuda_graphs(self.device)) if options.cuda_graphs else engine

    @property
    def transport(self) -> Transport:
        """How what is under way is carried, where ranks are on several machines."""
        if self.virtual:
            return PLAIN
        return Transport(ahead=AHEAD) if by_stream(self.device) else Transport(LARGE, AHEAD)

    @property
    def transport_here(self) -> Transport:
        """How it is among these ranks, as far as that is known yet."""
        return self.transport if by_stream(self.device) or not all_share_memory() else PLAIN

    def rank_passes(self, hints: Hints) -> tuple[RankPass, ...]:
        """The rank passes of a plan: the built-in ones for this device, and the user's behind them."""
        return default_rank_passes(hints, self.device.type)

    def own_rank_passes(self, hints: Hints) -> tuple[RankPass, ...]:
        """The user's."""
        return as_rank_passes(hints.rank_passes)
