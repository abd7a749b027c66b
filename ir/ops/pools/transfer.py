"""Copies between device memory and the pools beside it: host memory, and files.

    away = memory.to_host(x)                    the copy starts
    kept = memory.stored(away)                  the device waits for it: from here on x may be freed, kept fetched
    back = memory.to_device(kept, "cuda")       starts as well
    here = memory.arrived(back)                 from here on it may be read

On CUDA the host's memory is pinned, and each direction has a stream of its own. All order between the streams goes
through the computing one: a copy starts behind what was computed before it, and ``stored`` and ``arrived`` make the
computing stream wait for the copy's event. So memory is freed where the program says, in stream order, and the
allocator need not know of the copies (no ``record_stream``); nothing synchronizes the host but ``arrived`` of what lies
in its memory. On a CPU both pools are the same memory: a copy is made all the same, so that a
program has there what it would hold elsewhere. A file is mapped into memory and has no name any more: it goes with
the last tensor that lies in it, also where the process dies. Under ``torch.compile``, which plans memory itself, a
tensor only moves. Needs torch alone.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from functools import cache

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

Tensor = torch.Tensor
HOST, DISK = "host", "disk"
THERE = "_shardfx_there"
"""The tensor attribute with the event of its copy."""
SOURCE = "_shardfx_source"
"""The attribute of a host copy that keeps its source alive until the copy is waited for."""


def to_host(x: Tensor) -> Tensor:
    """Copy to host memory, with the same strides; asynchronous on CUDA."""
    if is_compiling():
        return x.cpu()
    return _copied(x, torch.device("cpu"), pinned=True)


def to_disk(x: Tensor, folder: str = "") -> Tensor:
    """Copy to a memory-mapped file in ``folder`` (by default the system's for temporary files)."""
    if isinstance(x, FakeTensor):
        return _copied(x, x.device)
    place = mapped(x.shape, x.stride(), x.dtype, folder)
    _distinct(place).copy_(_distinct(x))
    return place


def put(place: Tensor, x: Tensor) -> Tensor:
    """Copy ``x`` into ``place``, in whichever pool; asynchronous on CUDA."""
    if is_compiling():
        return x.to(place.device)
    if x.is_cuda and place.is_pinned():
        return _started(place, x, x.device)
    return place.copy_(x)


def to_device(away: Tensor, device: str = "cpu") -> Tensor:
    """Copy from another pool to the device; asynchronous on CUDA."""
    if is_compiling():
        return away.to(device)
    return _copied(away, torch.device(device))


def stored(away: Tensor) -> Tensor:
    """``away``, once the device has waited for its copy: then the source may be freed, and ``away`` fetched. The host
    may read it behind :func:`arrived`, or :func:`finish`."""
    source = None if is_compiling() else getattr(away, SOURCE, None)
    if source is not None:
        torch.cuda.current_stream(source.device).wait_event(getattr(away, THERE))
        delattr(away, SOURCE)
    return away


def arrived(x: Tensor) -> Tensor:
    """``x``, once its copy is there: the device waits for it, or, where it lies beside the device, this process."""
    event = None if is_compiling() else getattr(x, THERE, None)
    if event is not None and x.is_cuda:
        torch.cuda.current_stream(x.device).wait_event(event)
    elif event is not None:
        event.synchronize()
    return x


def settled(tensor: Tensor, pool: str, device: torch.device) -> Tensor:
    """A copy of a tensor in the memory of a pool (``""``: the device's; ``"disk:FOLDER"``: in a file there)."""
    kind, _, folder = pool.partition(":")
    if not kind:
        return tensor.to(device, copy=True)
    if kind == DISK:
        return to_disk(tensor, folder)
    return torch.empty_like(tensor, device="cpu", pin_memory=device.type == "cuda").copy_(tensor)


def finish(device: torch.device) -> None:
    """Wait until no copy is under way: then other memory may be read, and written over. A step does not call it."""
    if device.type == "cuda":
        for to_host in (True, False):
            _stream(_indexed(device), to_host).synchronize()


def mapped(shape: Sequence[int], strides: Sequence[int], dtype: torch.dtype, folder: str = "") -> Tensor:
    """Memory that is mapped to a file.

    Raises:
        OSError: there is no such folder, or no room in it.
    """
    if 0 in shape:
        return torch.empty_strided(tuple(shape), tuple(strides), dtype=dtype)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    with tempfile.NamedTemporaryFile(prefix="shardfx-", dir=folder or None) as file:
        os.posix_fallocate(file.fileno(), 0, extent * dtype.itemsize)  # else a full disk ends the process, later
        flat = torch.from_file(file.name, shared=True, size=extent, dtype=dtype)
    return flat.as_strided(tuple(shape), tuple(strides))


@cache
def _stream(device: torch.device, to_host: bool) -> torch.cuda.Stream:
    """The stream for copies of a device in one direction."""
    return torch.cuda.Stream(device)


def _indexed(device: torch.device) -> torch.device:
    """A CUDA device with its index."""
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def _copied(x: Tensor, device: torch.device, pinned: bool = False) -> Tensor:
    """A copy on a device with the same strides, gaps included: kernels round as they would for ``x``.

    Between the host and a device of another type it is only started.
    """
    if isinstance(x, FakeTensor) or (not x.is_cuda and device.type != "cuda"):
        into = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
        _distinct(into).copy_(_distinct(x))
        return into
    device = _indexed(device) if device.type == "cuda" else device
    into = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device, pin_memory=pinned)
    return _started(into, x, x.device if x.is_cuda else device)


def _distinct(x: Tensor) -> Tensor:
    """The distinct elements of a tensor: an expanded dim is reduced to its first index."""
    for dim, stride in enumerate(x.stride()):
        if not stride and x.shape[dim] > 1:
            x = x.narrow(dim, 0, 1)
    return x


def _started(into: Tensor, x: Tensor, device: torch.device) -> Tensor:
    """Start to copy ``x`` into ``into``, in stream order behind earlier work of the device.

    A source on the device is kept until :func:`stored`. One in pinned memory may be let go at once: torch's allocator
    of pinned memory has an event for the copy.
    """
    stream = _stream(device, x.is_cuda)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        _distinct(into).copy_(_distinct(x), non_blocking=True)
    if x.is_cuda:
        setattr(into, SOURCE, x)
    setattr(into, THERE, stream.record_event())
    return into
