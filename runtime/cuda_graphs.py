"""CUDA graphs: a full step (forward, backward, update) is captured once, and launched as one graph.

    step 1, 2    warm-up       inputs are copied to static memory, and the program runs on a side stream
    step 3       capture       the program is recorded, then replayed
    step 4, ...  replay        inputs are copied to static memory, and the graph is replayed

Parameters, states and buffers are read and written in place, in the store; if their addresses change, the graph is
captured anew. All other inputs, learning rates and seeds too, are copied to static tensors; and results are cloned, as
the next replay overwrites them. All graphs of a device share one memory pool: nothing in it outlives a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource

from .compiled_programs import Write
from .rendezvous import RankCoroutine, run

Tensor = torch.Tensor
Step = Callable[..., Sequence[Tensor]]
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
    """A function that runs a full step (``start``, of a program) as a CUDA graph of ``make_graph``."""

    def __init__(
        self, program: RankProgram, start: Step, device: torch.device, make_graph: Callable[[], CudaGraph]
    ) -> None:
        self._program, self._start, self._device, self._make_graph = program, start, device, make_graph
        renewed = {output.name for output in program.outputs if output.kind.is_kept}
        self._renewed = [i for i, each in enumerate(program.inputs) if each.name in renewed]
        self._static: list[Tensor | None] = []
        self._addresses: list[int] | None = None
        """The addresses of inputs that are read and written in place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphedStep:
        """The step of a copied module: its tensors have other addresses, so it starts without a graph."""
        return GraphedStep(self._program, self._start, self._device, self._make_graph)

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run one step: warm-up, capture and replay, or replay.

        Raises:
            Error: it cannot be captured.
        """
        kinds = [each.kind for each in self._program.inputs]
        stored = [x.data_ptr() for kind, x in zip(kinds, tensors, strict=True) if kind not in GIVEN]
        if stored != self._addresses:
            self._graph, self._runs, self._addresses = self._make_graph(), 0, stored
            given = zip(kinds, tensors, strict=True)
            self._static = [torch.empty_like(x, device=self._device) if kind in GIVEN else None for kind, x in given]
        inputs = []
        for tensor, static in zip(tensors, self._static, strict=True):
            if static is not None and tensor.ndim == 0 and tensor.device.type == "cpu":
                static.fill_(tensor)  # an argument of a kernel: nothing waits for a copy
            elif static is not None:
                static.copy_(tensor, non_blocking=True)
            inputs.append(tensor if static is None else static)
        self._runs += 1
        if self._runs <= WARM_UP:
            results = self._graph.warm_up(lambda: self._start(*inputs))
        else:
            if self._runs == WARM_UP + 1:
                try:
                    self._graph.capture(lambda: self._start(*inputs))
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
        return [result if result.data_ptr() in stored else result.clone() for result in results]


def graphed(write: Write, device: torch.device, make_graph: Callable[[], CudaGraph]) -> Write:
    """A writer that makes full steps graphs. A virtual rank, alone, is a coroutine that asks for nothing."""

    def written(program: RankProgram, forms: CallOverrides) -> ProgramSource:
        source = write(program, forms)
        if not any(output.kind.is_stepped for output in program.outputs):
            return source
        if forms.ask is None:
            return replace(source, start=GraphedStep(program, source.start, device, make_graph))
        rank, mesh = program.rank, program.mesh
        step = GraphedStep(program, lambda *inputs: run({rank: source}, {rank: inputs}, mesh)[rank], device, make_graph)

        def start(*inputs: Tensor) -> RankCoroutine:
            yield from ()
            return step(*inputs)

        return replace(source, start=start)

    return written
