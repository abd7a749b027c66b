"""CUDA graphs: a full step (forward, backward, update) is captured once, and launched as one graph.

    step 1, 2    warm-up       inputs are copied to static memory, and the program runs on a side stream
    step 3       capture       the program is recorded, then replayed
    step 4, ...  replay        inputs are copied to static memory, and the graph is replayed

Parameters, states and buffers are read and written in place, in the store; if their addresses change, the graph is
captured anew. All other inputs, learning rates and seeds too, are copied to static tensors; and results are cloned, as
the next replay overwrites them. All graphs of a device share one memory pool: nothing in it outlives a replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind
from shardfx.ir.program.rank_program import RankProgram

from .engine import Engine, Probe, RankPrograms, RankTensors

Tensor = torch.Tensor
Work = Callable[[], Sequence[Tensor]]
"""A function that launches kernels on a device; it returns the tensors that they write."""
WARM_UP = 2
"""The number of warm-up steps before capture: the first compiles and tunes kernels, the second only launches them."""
GIVEN = (InputKind.ARGUMENT, InputKind.TARGET, InputKind.OPTION, InputKind.SEED)
"""The kinds of inputs that change from step to step, and are copied to static memory."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph`` that is captured on ``stream``, and allocates from ``pool``."""

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream, self._pool = stream, pool
        self._graph, self._results = torch.cuda.CUDAGraph(), tuple[Tensor, ...]()

    def warm_up(self, work: Work) -> Sequence[Tensor]:
        """Run the work eagerly on the capture stream, so that libraries allocate their workspaces of that stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = work()
        current.wait_stream(self._stream)
        return results

    def capture(self, work: Work) -> None:
        """Capture it; nothing is executed. Other threads (NCCL's watchdog, data loaders) may call CUDA meanwhile."""
        with torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local"):
            self._results = tuple(work())

    def replay(self) -> Sequence[Tensor]:
        """Launch the graph on the current stream; returns its static output tensors."""
        self._graph.replay()
        return self._results


@cache
def cuda_graphs(device: torch.device) -> Callable[[], CudaGraph]:
    """A factory of graphs of one device, which share a stream and a memory pool."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(stream, pool)


class GraphedStep:
    """One program as a CUDA graph: its static inputs, and the addresses of its other inputs."""

    def __init__(self, program: RankProgram, tensors: Sequence[Tensor], device: torch.device, graph: CudaGraph) -> None:
        self._graph, self._runs = graph, 0
        self._static = [
            torch.empty_like(tensor, device=device) if each.kind in GIVEN else None
            for each, tensor in zip(program.inputs, tensors, strict=True)
        ]
        renewed = {output.name for output in program.outputs if output.kind.is_kept}
        self._renewed = [i for i, each in enumerate(program.inputs) if each.name in renewed]
        self._addresses = self._in_place(tensors)

    def fits(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the tensors that are read and written in place have the addresses that were captured."""
        return self._in_place(tensors) == self._addresses

    def _in_place(self, tensors: Sequence[Tensor]) -> list[int]:
        return [tensor.data_ptr() for tensor, static in zip(tensors, self._static, strict=True) if static is None]

    def run(self, tensors: Sequence[Tensor], work: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Run one step: warm-up, capture and replay, or replay.

        Raises:
            Error: it cannot be captured.
        """
        inputs = []
        for tensor, static in zip(tensors, self._static, strict=True):
            if static is not None and tensor.ndim == 0 and tensor.device.type == "cpu":
                static.fill_(tensor)  # an argument of a kernel: nothing waits for a copy
            elif static is not None:
                static.copy_(tensor, non_blocking=True)
            inputs.append(tensor if static is None else static)
        self._runs += 1
        if self._runs <= WARM_UP:
            results = self._graph.warm_up(lambda: work(inputs))
        else:
            if self._runs == WARM_UP + 1:
                try:
                    self._graph.capture(lambda: work(inputs))
                except Exception as error:
                    raise Error(
                        "a step cannot be captured as a CUDA graph",
                        where="pm.compile(cuda_graphs=True)",
                        expected="calls that only launch work on the device",
                        got=f"{type(error).__name__}: {error}",
                        remedy="pm.compile() without cuda_graphs; or take what waits for the device out of the model",
                    ) from error
            results = self._graph.replay()
            torch.autograd.graph.increment_version([tensors[i] for i in self._renewed])
        stored = {*self._addresses}
        return [result if result.data_ptr() in stored else result.clone() for result in results]


class GraphEngine:
    """An engine of one rank that runs full steps as graphs by ``make_graph``, and all else by the engine it wraps."""

    def __init__(self, engine: Engine, make_graph: Callable[[], CudaGraph]) -> None:
        self.device = engine.device
        self._engine, self._make_graph = engine, make_graph
        self._steps: WeakKeyDictionary[RankProgram, GraphedStep] = WeakKeyDictionary()
        self.ranks, self.prepare, self.seed = engine.ranks, engine.prepare, engine.seed

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphEngine:
        """The engine of a copied module: its tensors have other addresses, so it starts without graphs."""
        return GraphEngine(copy.deepcopy(self._engine, memo), self._make_graph)

    def run(self, programs: RankPrograms, inputs: RankTensors, watch: Probe | None = None) -> RankTensors:
        """Run the program of the rank.

        Raises:
            Error: a step cannot be captured; it fails.
        """
        ((rank, program),) = programs.items()
        if watch is not None or not any(output.kind.is_stepped for output in program.outputs):
            return self._engine.run(programs, inputs, watch)
        given, step = inputs[rank], self._steps.get(program)
        if step is None or not step.fits(given):
            step = self._steps[program] = GraphedStep(program, given, self.device, self._make_graph())

        def work(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
            return self._engine.run(programs, {rank: tensors})[rank]

        with torch.no_grad():
            return {rank: step.run(given, work)}
