"""Images that can only be decoded as a whole: one rank of a group decodes, and sends the others their windows.

    rank 0 (worker)     decode() -> image, windows of ranks 0..3 -> store["7/0@1"], store["7/0@2"], store["7/0@3"]
    rank 2 (worker)     store["7/0@2"]

Workers of a ``DataLoader`` are processes outside of any process group: they communicate by a store, which the first
rank of each group serves.
"""

from __future__ import annotations

import io
import itertools
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.runtime.distributed.groups import the_cpu_group

from .image_files import Window, read_window, unreadable

CHUNK = 1 << 22
"""The most bytes of a message to a store."""
PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class WholeImage:
    """An image that is decoded as a whole (a PNG, a JPEG), for :class:`shardfx.images.TileDataset`::

        sx.images.WholeImage(lambda: np.asarray(Image.open(path)).transpose(2, 0, 1), shape=(3, 5000, 4000))

    Under ``torchrun`` one rank of those that share a sample decodes it, and sends the others their windows.

    Args:
        decode: returns the image, an array of this shape.
        shape: (C, H, W), (H, W), ...
    """

    decode: Callable[[], Any]
    shape: tuple[int, ...]

    def read(self, window: Window, name: str) -> tuple[torch.Tensor, int]:
        """A window of it, and the number of bytes that were decoded.

        Raises:
            Error: it has another shape.
        """
        made = self.decoded(name)
        return read_window(made, window, name), made.nbytes

    def decoded(self, name: str) -> Any:
        """The full image.

        Raises:
            Error: it cannot be decoded, or has another shape.
        """
        try:
            made = self.decode()
        except Error:
            raise
        except Exception as error:
            raise unreadable(name, "WholeImage(decode, shape)", error) from error
        if tuple(made.shape) != tuple(self.shape):
            raise Error(
                f"{name} is decoded to another shape than was said",
                where="WholeImage(decode, shape)",
                expected=tuple(self.shape),
                got=tuple(made.shape),
                remedy="give the shape that decode() gives, (C, H, W)",
            )
        return made


@dataclass
class DecodingGroup:
    """The ranks that share samples, the first of which decodes; and the address of its store."""

    rank: int
    group: tuple[int, ...]
    address: tuple[str, int]
    number: int
    """The number of the data set, among those that share images."""
    _clients: dict[int, dist.Store] = field(default_factory=dict)

    def of_worker(self) -> DecodingGroup:
        """A copy for another process."""
        return DecodingGroup(self.rank, self.group, self.address, self.number)

    @property
    def store(self) -> Any:
        """This process's connection to the store: a fork needs one of its own. (It takes bytes, which its type does
        not say.)"""
        if os.getpid() not in self._clients:
            host, port = self.address
            made = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
            self._clients[os.getpid()] = dist.PrefixStore(str(self.number), made)
        return self._clients[os.getpid()]

    def read(self, image: WholeImage, windows: Mapping[int, Window], key: str, name: str) -> tuple[torch.Tensor, int]:
        """This rank's window of an image, and the number of bytes that it decoded.

        Raises:
            Error: the image could not be decoded, here or by the rank that does.
        """
        if self.rank != self.group[0]:
            return self._received(f"{key}@{self.rank}", name), 0
        try:
            made = image.decoded(name)
            parts = {rank: read_window(made, windows[rank], name) for rank in self.group}
        except Exception as error:
            for rank in self.group[1:]:
                self._send(f"{key}@{rank}", f"{type(error).__name__}: {error}")
            raise
        for rank in self.group[1:]:
            self._send(f"{key}@{rank}", parts[rank])
        return parts[self.rank], made.nbytes

    def _send(self, key: str, what: torch.Tensor | str) -> None:
        file = io.BytesIO()
        torch.save(what, file)
        sent = file.getvalue()
        for i, start in enumerate(range(0, len(sent), CHUNK)):
            self.store.set(f"{key}/{i}", sent[start : start + CHUNK])
        self.store.set(key, str(-(-len(sent) // CHUNK)))

    def _received(self, key: str, name: str) -> torch.Tensor:
        where = f"rank {self.group[0]}, which decodes it for ranks {', '.join(map(str, self.group))}"
        try:
            parts = [f"{key}/{i}" for i in range(int(self.store.get(key)))]
            made = torch.load(io.BytesIO(b"".join(self.store.get(part) for part in parts)), weights_only=True)
            for part in (key, *parts):
                self.store.delete_key(part)
        except dist.DistError as error:
            raise Error(f"{name} did not come", where=where, got=error, remedy="has that rank ended?") from error
        if isinstance(made, str):
            raise Error(f"{name} could not be read", where=where, got=made)
        assert isinstance(made, torch.Tensor)
        return made


@cache
def _server() -> dist.TCPStore:
    """The store that this process serves as long as it lives, for others may still read when it is done."""
    return dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


_numbers = itertools.count()


def decoding_group(group: Mapping[int, Window]) -> DecodingGroup:
    """The group by which ranks share the images that one of them decodes; all ranks call it."""
    rank, ranks = dist.get_rank(), tuple(sorted(group))
    address = ("", 0)
    if rank == ranks[0]:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # the address that the job's first host sees
            probe.connect((os.environ.get("MASTER_ADDR", "localhost"), 1))
            address = str(probe.getsockname()[0]), _server().port
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, address, group=the_cpu_group())
    return DecodingGroup(rank, ranks, found[ranks[0]], next(_numbers))
