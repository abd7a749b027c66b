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

from shardfx.ir.graph import InputKind
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import CallOverrides, ProgramSource

from .compiled_programs import Write
from .rendezvous import RankCoroutine, run

Tensor = torch.Tensor
Step = Callable[..., Sequence[Tensor]]
WARM_UP = 2
"""The number of warm-up steps before capture: the first compiles and tunes kernels, the second only launches them."""
GIVEN = (InputKind.ARGUMENT, InputKind.TARGET, InputKind.OPTION, InputKind.SEED)
"""The kinds of inputs that change from step to step, and are copied to static memory."""


@cache
def _shared(device: torch.device) -> tuple[torch.cuda.Stream, Any]:
    """The capture stream and the memory pool of all graphs of a device."""
    return torch.cuda.Stream(device), torch.cuda.graph_pool_handle()


class GraphedStep:
    """A function that runs a full step (``start``, of a program) as a CUDA graph."""

    def __init__(self, program: RankProgram, start: Step, device: torch.device) -> None:
        self._program, self._start, self._device = program, start, device
        renewed = {output.name for output in program.outputs if output.kind.is_kept}
        self._renewed = [i for i, each in enumerate(program.inputs) if each.name in renewed]
        self._static: list[Tensor | None] = []
        self._addresses: list[int] | None = None
        """The addresses of inputs that are read and written in place."""

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run one step: warm-up, capture and replay, or replay."""
        kinds = [each.kind for each in self._program.inputs]
        stored = [x.data_ptr() for kind, x in zip(kinds, tensors, strict=True) if kind not in GIVEN]
        if stored != self._addresses:
            self._runs, self._addresses = 0, stored
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
            results = self.warm_up(inputs)
        else:
            if self._runs == WARM_UP + 1:
                self.capture(inputs)
            results = self.replay()
            torch.autograd.graph.increment_version([tensors[i] for i in self._renewed])
        return [result if result.data_ptr() in stored else result.clone() for result in results]

    def warm_up(self, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
        """Run the step eagerly on the capture stream, so that libraries allocate their workspaces of that stream."""
        stream, current = _shared(self._device)[0], torch.cuda.current_stream(self._device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            results = self._start(*inputs)
        current.wait_stream(stream)
        return results

    def capture(self, inputs: Sequence[Tensor]) -> None:
        """Capture it; nothing is executed. Other threads (NCCL's watchdog, data loaders) may call CUDA meanwhile."""
        self._graph, (stream, pool) = torch.cuda.CUDAGraph(), _shared(self._device)
        with torch.cuda.graph(self._graph, pool, stream, capture_error_mode="thread_local"):
            self._results = tuple(self._start(*inputs))

    def replay(self) -> Sequence[Tensor]:
        """Launch the graph on the current stream; returns its static output tensors."""
        self._graph.replay()
        return self._results


def graphed(write: Write, device: torch.device, kind: type[GraphedStep] = GraphedStep) -> Write:
    """A writer that makes full steps graphs. A virtual rank, alone, is a coroutine that asks for nothing."""

    def written(program: RankProgram, forms: CallOverrides) -> ProgramSource:
        source = write(program, forms)
        if not any(output.kind.is_stepped for output in program.outputs):
            return source
        if forms.ask is None:
            return replace(source, start=kind(program, source.start, device))
        rank, mesh = program.rank, program.mesh
        step = kind(program, lambda *inputs: run({rank: source}, {rank: inputs}, mesh)[rank], device)

        def start(*inputs: Tensor) -> RankCoroutine:
            yield from ()
            return step(*inputs)

        return replace(source, start=start)

    return written
