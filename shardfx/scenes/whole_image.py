"""Images whose reader decodes all of them: one rank of a group does, cuts, and sends each of the others its window.

    rank 0 (worker)     decode() -> image, windows of ranks 0..3 -> store["7/0@1"], store["7/0@2"], store["7/0@3"]
    rank 2 (worker)     store["7/0@2"]

Workers of a ``DataLoader`` are processes of their own, which are in no process group: they meet at a store, which the
first rank of each group holds.
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

from .reading import read_window, unreadable
from .turn import Window

CHUNK = 1 << 22
"""A store takes so many bytes at once."""
PATIENCE = timedelta(minutes=10)


@dataclass(frozen=True)
class WholeImage:
    """An image that is decoded as a whole (a PNG, a JPEG), for :class:`shardfx.TileDataset`::

        sx.WholeImage(lambda: np.asarray(Image.open(path)).transpose(2, 0, 1), shape=(3, 5000, 4000))

    Under ``torchrun`` one rank of those that share a sample decodes it, and sends the others their windows.

    Args:
        decode: gives the image, an array of this shape.
        shape: (C, H, W), (H, W), ...
    """

    decode: Callable[[], Any]
    shape: tuple[int, ...]

    def read(self, window: Window, name: str) -> tuple[torch.Tensor, int]:
        """A window of it, and how many bytes were decoded.

        Raises:
            Error: it has another shape.
        """
        made = self.decoded(name)
        return read_window(made, window, name), made.nbytes

    def decoded(self, name: str) -> Any:
        """All of it.

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
class Sharing:
    """The ranks that share samples, the first of which decodes; and where its store is."""

    rank: int
    group: tuple[int, ...]
    address: tuple[str, int]
    number: int
    """Which of the data sets that share it is."""
    _clients: dict[int, dist.Store] = field(default_factory=dict)

    def of_worker(self) -> Sharing:
        """The same for another process."""
        return Sharing(self.rank, self.group, self.address, self.number)

    @property
    def store(self) -> Any:
        """The store, as this process speaks to it: a fork needs a connection of its own. (It takes bytes, which its
        type does not say.)"""
        if os.getpid() not in self._clients:
            host, port = self.address
            made = dist.TCPStore(host, port, is_master=False, timeout=PATIENCE)
            self._clients[os.getpid()] = dist.PrefixStore(str(self.number), made)
        return self._clients[os.getpid()]

    def read(self, image: WholeImage, windows: Mapping[int, Window], key: str, name: str) -> tuple[torch.Tensor, int]:
        """This rank's window of an image, and how many bytes it decoded.

        Raises:
            Error: the image could not be decoded, here or by the rank that does.
        """
        if self.rank != self.group[0]:
            return self._received(f"{key}@{self.rank}", name), 0
        try:
            made = image.decoded(name)
            pieces = {rank: read_window(made, windows[rank], name) for rank in self.group}
        except Exception as error:
            for rank in self.group[1:]:
                self._send(f"{key}@{rank}", f"{type(error).__name__}: {error}")
            raise
        for rank in self.group[1:]:
            self._send(f"{key}@{rank}", pieces[rank])
        return pieces[self.rank], made.nbytes

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
def own_server() -> dist.TCPStore:
    """The store that this process holds as long as it lives, for others may still read when it is done."""
    return dist.TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)


_numbers = itertools.count()


def shared(group: Mapping[int, Window]) -> Sharing:
    """How the ranks of a group share what one of them decodes; all ranks call it."""
    rank, ranks = dist.get_rank(), tuple(sorted(group))
    address = (own_address(), own_server().port) if rank == ranks[0] else ("", 0)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, address, group=the_cpu_group())
    return Sharing(rank, ranks, found[ranks[0]], next(_numbers))


def own_address() -> str:
    """The address by which the other hosts of the job know this one: that from which it speaks to the first of them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        asked.connect((os.environ.get("MASTER_ADDR", "localhost"), 1))
        return str(asked.getsockname()[0])
