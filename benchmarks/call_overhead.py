"""What a call adds beside the programs that it runs, beside what a call of ``torch.compile`` adds to its graph.

    python -m benchmarks.call_overhead [--layers 32] [--calls 200]

An unedited Llama of Hugging Face on one rank: guards, the checks of a call, the delivery of gradients. Calls of both
alternate; prints medians, in microseconds, and their ratio, for calls without and with gradients.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch

import shardfx as sx
from benchmarks.first_call import loss, model_of
from shardfx.runtime.step import ProgramRunner


class Inner:
    """Seconds spent within a function since the last reading."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def timed(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its seconds added up."""

        def call(*args: Any, **kwargs: Any) -> Any:
            begun = time.perf_counter()
            try:
                return run(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begun

        return call

    def overhead(self, call: Callable[[], object]) -> float:
        """The microseconds of a call that are not spent within the function."""
        self.seconds, begun = 0.0, time.perf_counter()
        call()
        return (time.perf_counter() - begun - self.seconds) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--calls", type=int, default=200)
    given = parser.parse_args()
    model, ids = model_of(given.layers), torch.randint(0, 256, (2, 32))
    pm = sx.parallelize(model, sx.Mesh(dp=1), sx.Hints(args=(ids,), loss=loss, targets=(ids,)), virtual=True)
    ours, theirs = Inner(), Inner()
    timed = lambda graph, _: theirs.timed(graph)  # noqa: E731
    compiled = torch.compile(lambda ids, labels: loss(model(ids), labels), backend=timed, fullgraph=True)
    with mock.patch.object(ProgramRunner, "run", ours.timed(ProgramRunner.run)):
        for gradients in (False, True):
            found: list[tuple[float, float]] = []
            with torch.set_grad_enabled(gradients):
                for _ in range(given.calls + 10):
                    found.append((ours.overhead(lambda: pm(ids, ids)), theirs.overhead(lambda: compiled(ids, ids))))
            mine, other = map(statistics.median, zip(*found[10:], strict=True))
            what = "with gradients" if gradients else "without"
            print(f"{what:15} parallel module {mine:5.0f} us, torch.compile {other:5.0f} us, ratio {mine / other:.2f}")


if __name__ == "__main__":
    main()
