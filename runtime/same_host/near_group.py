"""Process groups of CPU ranks on one machine, for programs that call torch's own collectives.

A program that torch compiled, or a module that runs as it stands, says ``_c10d_functional.all_reduce(x, 'sum',
'dp2/dp@0')``, and torch looks the group up by its name. Where its ranks are neighbours, that name is one of these: what
they can do through the memory that they share is done so, all else by the gloo group behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .neighbourhood import Neighbours, Started

Tensor = torch.Tensor
OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.PRODUCT: "product",
}


def _gloos(name: str) -> Any:
    """A method that is that of the group on gloo."""

    def method(self: NearGroup, *args: Any) -> Any:
        return getattr(self.gloo, name)(*args)

    return method


class NearGroup(dist.ProcessGroup):
    """A group of neighbours.

    Args:
        near: what they do among them.
        gloo: the group that does the rest.
    """

    def __init__(self, near: Neighbours, gloo: dist.ProcessGroup) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        cpu = torch.device("cpu")
        self._register_backend(cpu, dist.ProcessGroup.BackendType.GLOO, gloo._get_backend(cpu))
        self._near, self.gloo = near, gloo

    # What torch calls here from below ``_c10d_functional``.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """Reduce over one dense tensor, in place."""
        op = self._op(tensors, opts)
        if op is None or len(tensors) > 1 or not tensors[0].is_contiguous():
            return self.gloo.allreduce(tensors, opts)
        return _UnderWay(self._near.all_reduce_(tensors[0], op))

    def all_gather_single_coalesced(self, outs: list[Tensor], given: list[Tensor], opts: Any = None) -> Any:
        """Join what each rank has, tensor by tensor."""
        return _UnderWay([self._near.all_gather(x, out) for x, out in zip(given, outs, strict=True)][-1])

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], given: list[Tensor], opts: Any = None) -> Any:
        """Reduce over each of some tensors, and keep a piece."""
        op = self._op(given, opts)
        if op is None:
            return self.gloo.reduce_scatter_tensor_coalesced(outs, given, opts)
        return _UnderWay([self._near.reduce_scatter(x, op, out) for x, out in zip(given, outs, strict=True)][-1])

    def all_to_all_single(
        self, out: Tensor, x: Tensor, received: Sequence[int], sent: Sequence[int], opts: Any = None
    ) -> Any:
        """Exchange rows; no numbers: equal parts."""
        even = [x.shape[0] // self.size()] * self.size()
        return _UnderWay(self._near.all_to_all(x, sent or even, received or even, out))

    # Their names until torch 2.12.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    alltoall_base = all_to_all_single  # type: ignore[assignment]

    # All else. Torch's own way there would hold Python's lock, which gloo's threads need to let go of what is done.
    broadcast, reduce, gather, scatter = _gloos("broadcast"), _gloos("reduce"), _gloos("gather"), _gloos("scatter")
    allgather, allgather_coalesced, alltoall = _gloos("allgather"), _gloos("allgather_coalesced"), _gloos("alltoall")
    reduce_scatter, allreduce_coalesced = _gloos("reduce_scatter"), _gloos("allreduce_coalesced")
    barrier, send, recv = _gloos("barrier"), _gloos("send"), _gloos("recv")
    recv_anysource, monitored_barrier = _gloos("recv_anysource"), _gloos("monitored_barrier")

    def _op(self, tensors: Sequence[Tensor], opts: Any) -> str | None:
        """The name of a reduction that neighbours can do; None of another."""
        op = OPS.get(opts.reduceOp.op)
        return op if op is not None and all(self._near.reduces(x, op) for x in tensors) else None


class _UnderWay(dist.Work):
    """A collective of neighbours, done when it is waited for."""

    def __init__(self, started: Started) -> None:
        super().__init__()
        self._started = started

    def wait(self, timeout: Any = None) -> bool:
        """Do this rank's part."""
        self._started.wait()
        return True
