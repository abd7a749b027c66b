"""What ``pm.compile(...)`` takes, and what it refuses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import torch

from shardfx.compiled import Compiled
from shardfx.ir.errors import Error
from shardfx.ir.ops.pools.pool_ops import moves_pool

KNOWN = tuple(name for name in inspect.signature(torch.compile).parameters if name != "model")
"""The options of ``torch.compile``."""
OWN_GRAPHS = ("reduce-overhead", "max-autotune")
"""Modes in which torch records CUDA graphs itself."""


@dataclass(frozen=True)
class CompileOptions:
    """Options of ``torch.compile``, and whether whole steps are recorded as CUDA graphs."""

    of_torch: Mapping[str, Any]
    cuda_graphs: bool = False

    def check(self, compiled: Compiled, device: torch.device, virtual: bool) -> None:
        """Look whether a plan can be compiled so, on a device.

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
                    "this plan has no whole step that can be recorded as a CUDA graph",
                    where="pm.compile(cuda_graphs=True)",
                    expected=expected,
                    got=got,
                    remedy=remedy,
                )

    def _unfit(self, compiled: Compiled, device: torch.device, virtual: bool) -> Iterator[tuple[str, str, str]]:
        """Why steps cannot be recorded: what is expected, what there is, what to do."""
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
