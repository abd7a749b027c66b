"""Memory that other processes of this machine may map: a file without a name, which ends with its last user."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from itertools import count

import torch

Tensor = torch.Tensor
_number = count()


@dataclass(eq=False)
class Segment:
    """One such file, mapped here at ``address``."""

    number: int
    file: int
    nbytes: int
    address: int


_mapped_here: dict[int, Segment] = {}
forgotten: list[int] = []
"""The numbers of segments that are no more."""


def shared_bytes(nbytes: int) -> Tensor:
    """Memory of so many bytes, one at least; its file ends with the last tensor in it.

    Raises:
        AttributeError: this system has no files without a name.
        OSError: there is no room for it.
    """
    file = os.memfd_create("shardfx")
    try:
        os.posix_fallocate(file, 0, nbytes)
        flat = map_file(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    segment = Segment(next(_number), file, nbytes, flat.data_ptr())
    _mapped_here[segment.address] = segment
    weakref.finalize(flat.untyped_storage(), _forget, segment)
    return flat


def map_file(file: int, nbytes: int) -> Tensor:
    """The memory of a file that is open here."""
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)


def segment_of(x: Tensor) -> tuple[Segment, int] | None:
    """The shared memory that ``x`` lies in, and at which byte of it; None where it lies elsewhere."""
    address = x.untyped_storage().data_ptr()
    segment = _mapped_here.get(address)
    return None if segment is None else (segment, x.data_ptr() - address)


def _forget(segment: Segment) -> None:
    del _mapped_here[segment.address]
    forgotten.append(segment.number)
    os.close(segment.file)
