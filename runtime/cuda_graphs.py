"""CUDA graphs: a whole step (forward, backward, update) is recorded once and launched as one.

    step 1, 2    warm-up       inputs are copied to static memory, and the program runs on a side stream
    step 3       capture       the program is recorded, then replayed
    step 4, ...  replay        inputs are copied to static memory, and the graph is replayed

Each step is done once, in whichever way: a capture executes nothing. Parameters, states and buffers are read and
written where they lie in the store; once they lie elsewhere, the graph is recorded anew. What else a program takes, a
learning rate and a seed too, is copied to tensors that stay; and what it gives is cloned, for the next replay writes
over it. A program has a graph of its own, and all graphs of a device share one memory pool: nothing in it outlives a
replay.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind
from shardfx.ir.program.rank_program import RankProgram

from .engine import Engine, Probe

Tensor = torch.Tensor
Work = Callable[[], Sequence[Tensor]]
"""Calls that launch work on a device; gives tensors that this writes."""
WARM_UP = 2
"""Steps that run before one is captured: the first compiles and tunes kernels, the second only launches them."""
GIVEN = (InputKind.ARGUMENT, InputKind.TARGET, InputKind.OPTION, InputKind.SEED)
"""The inputs that are others in each step."""


class WorkGraph(Protocol):
    """Work that is recorded once and launched as a whole."""

    def warm_up(self, work: Work) -> Sequence[Tensor]:
        """Do it where it is going to be recorded."""

    def capture(self, work: Work) -> None:
        """Record it; nothing is executed."""

    def replay(self) -> Sequence[Tensor]:
        """Launch what was recorded; gives the tensors that it writes, the same each time."""


class CudaGraph:
    """A ``torch.cuda.CUDAGraph``.

    Args:
        stream: on which it is recorded.
        pool: the memory pool of what it allocates.
    """

    def __init__(self, stream: torch.cuda.Stream, pool: Any) -> None:
        self._stream, self._pool = stream, pool
        self._graph, self._results = torch.cuda.CUDAGraph(), tuple[Tensor, ...]()

    def warm_up(self, work: Work) -> Sequence[Tensor]:
        """Run it on the stream of the capture, so that libraries have their workspaces of that stream."""
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            results = work()
        current.wait_stream(self._stream)
        return results

    def capture(self, work: Work) -> None:
        """Record it. Other threads (NCCL's watchdog, loaders of data) may call CUDA meanwhile."""
        with torch.cuda.graph(self._graph, self._pool, self._stream, capture_error_mode="thread_local"):
            self._results = tuple(work())

    def replay(self) -> Sequence[Tensor]:
        """Launch it on the current stream."""
        self._graph.replay()
        return self._results


@cache
def cuda_graphs(device: torch.device) -> Callable[[], CudaGraph]:
    """Makes graphs of one device, which share a stream and a memory pool."""
    stream, pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(stream, pool)


class GraphedStep:
    """One program as a graph: its static inputs, and where in memory the rest of its inputs lay."""

    def __init__(self, program: RankProgram, given: Sequence[Tensor], device: torch.device, graph: WorkGraph) -> None:
        self._graph, self._runs = graph, 0
        self._static = [
            torch.empty_like(tensor, device=device) if each.kind in GIVEN else None
            for each, tensor in zip(program.inputs, given, strict=True)
        ]
        renewed = {output.name for output in program.outputs if output.kind.is_kept}
        self._renewed = [i for i, each in enumerate(program.inputs) if each.name in renewed]
        self._lay = self._lies(given)

    def fits(self, given: Sequence[Tensor]) -> bool:
        """Whether what is read and written in place lies where it lay."""
        return self._lies(given) == self._lay

    def _lies(self, given: Sequence[Tensor]) -> list[int]:
        return [tensor.data_ptr() for tensor, static in zip(given, self._static, strict=True) if static is None]

    def run(self, given: Sequence[Tensor], work: Callable[[Sequence[Tensor]], Sequence[Tensor]]) -> Sequence[Tensor]:
        """Do the step.

        Raises:
            Error: it cannot be captured.
        """
        inputs = []
        for tensor, static in zip(given, self._static, strict=True):
            if static is not None:
                _fill(static, tensor)
            inputs.append(tensor if static is None else static)
        self._runs += 1
        if self._runs <= WARM_UP:
            results = self._graph.warm_up(lambda: work(inputs))
        else:
            if self._runs == WARM_UP + 1:
                self._capture(lambda: work(inputs))
            results = self._graph.replay()
            torch.autograd.graph.increment_version([given[i] for i in self._renewed])
        stored = {*self._lay}
        return [result if result.data_ptr() in stored else result.clone() for result in results]

    def _capture(self, work: Work) -> None:
        try:
            self._graph.capture(work)
        except Exception as error:
            raise Error(
                "a step cannot be captured as a CUDA graph",
                where="pm.compile(cuda_graphs=True)",
                expected="calls that only launch work on the device",
                got=f"{type(error).__name__}: {error}",
                remedy="pm.compile() without cuda_graphs; or take what waits for the device out of the model",
            ) from error


def _fill(static: Tensor, given: Tensor) -> None:
    """Copy an input to where a graph reads it, and do not wait for that."""
    if given.ndim == 0 and given.device.type == "cpu":
        static.fill_(given)  # an argument of a kernel
    else:
        static.copy_(given, non_blocking=True)


class GraphEngine:
    """Runs whole steps as graphs, and everything else as the engine below does.

    Args:
        engine: of one rank.
        make_graph: makes what records a program.
    """

    def __init__(self, engine: Engine, make_graph: Callable[[], WorkGraph]) -> None:
        self.device = engine.device
        self._engine, self._make_graph = engine, make_graph
        self._steps: WeakKeyDictionary[RankProgram, GraphedStep] = WeakKeyDictionary()

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphEngine:
        """That of a copy of the module, which lies elsewhere."""
        return GraphEngine(copy.deepcopy(self._engine, memo), self._make_graph)

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
        watch: Probe | None = None,
    ) -> Mapping[int, Sequence[Tensor]]:
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
