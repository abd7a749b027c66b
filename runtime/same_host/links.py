"""Connections between neighbours: the ranks of a group whose processes are on one machine.

    rank 0                                  rank 1
    READY 7, segment 3 at byte 0     ->     maps segment 3 when it hears of it first, and sees what rank 0 wrote
    ...                              <-     DONE 7

Messages are a few numbers over a Unix socket; a segment's file goes along with the first message that names it. They
are sent without waiting: a sender whose neighbour does not listen yet reads what that one has sent in the meantime. A
neighbour that ends closes its connection, which is noticed at once.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any

import torch

from .shared_memory import Segment, forgotten, map_file, shared_bytes

Tensor = torch.Tensor
MESSAGE = struct.Struct("=QQQQQ")
FILES = socket.CMSG_SPACE(struct.calcsize("i"))
SOON = 10.0
"""So many seconds a process has to connect, once all have said where they are."""


SAID = 3
"""So many numbers go along with a message that names no memory."""


class Word(IntEnum):
    """What a message says: of a collective that there is something to be seen, or that it has been seen; of a segment
    that it is no more; or some numbers."""

    READY = 0
    DONE = 1
    GONE = 2
    SAYS = 3


class NeighbourError(RuntimeError):
    """A connection is lost, or a neighbour has not been heard of in time."""


class Link:
    """The connection to one neighbour."""

    def __init__(self, connection: socket.socket, rank: int, timeout: float) -> None:
        connection.setblocking(False)
        self._socket, self.rank, self._timeout = connection, rank, timeout
        self._poll = select.poll()
        self._heard: dict[tuple[int, int], tuple[int, ...]] = {}
        self._told: set[int] = set()
        self.memory: dict[int, Tensor] = {}
        """The neighbour's segments, as far as they were named."""
        self._forgotten = len(forgotten)

    def tell(self, word: Word, number: int, where: tuple[Segment, int] | None = None) -> None:
        """Say something of the collective of this number, and where it is to be seen.

        One who has ended needs it no more; who still needs that one will notice.
        """
        while self._forgotten < len(forgotten):
            gone = forgotten[self._forgotten]
            self._forgotten += 1
            if gone in self._told:
                self._told.remove(gone)
                self._send(MESSAGE.pack(Word.GONE, 0, gone, 0, 0))
        if where is None:
            self._send(MESSAGE.pack(word, number, 0, 0, 0))
        else:
            segment, offset = where
            file = segment.file if segment.number not in self._told else None
            self._told.add(segment.number)
            self._send(MESSAGE.pack(word, number, segment.number, segment.nbytes, offset), file)

    def say(self, number: int, numbers: Sequence[int]) -> None:
        """Say :data:`SAID` numbers, 0 .. 2**64 - 1, under the number of a collective."""
        self._send(MESSAGE.pack(Word.SAYS, number, *numbers))

    def _send(self, message: bytes, file: int | None = None) -> None:
        along = [] if file is None else [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file))]
        while True:
            try:
                self._socket.sendmsg([message], along)
                return
            except BlockingIOError:
                self._wait(select.POLLIN | select.POLLOUT)
                self._read()
            except OSError:
                return

    def hear(self, word: Word, number: int) -> Tensor:
        """Wait for a message; gives the memory that it names, from its place on.

        Raises:
            NeighbourError: it does not come.
        """
        segment, _, offset = self._await(word, number)
        return self.memory[segment][offset:] if word is Word.READY else NOTHING

    def said(self, number: int) -> tuple[int, ...]:
        """Wait for what the neighbour says.

        Raises:
            NeighbourError: it does not come.
        """
        return self._await(Word.SAYS, number)

    def _await(self, word: Word, number: int) -> tuple[int, ...]:
        while (found := self._heard.pop((word, number), None)) is None:
            if not self._read():
                self._wait(select.POLLIN)
        return found

    def has_heard(self, word: Word, number: int) -> bool:
        """Whether a message is there by now."""
        while (word, number) not in self._heard:
            if not self._read():
                return False
        return True

    def comes(self, word: Word, number: int, seconds: float) -> bool:
        """Whether a message comes within so many seconds.

        Raises:
            NeighbourError: the neighbour has ended.
        """
        until = time.monotonic() + seconds
        while not self.has_heard(word, number):
            left = until - time.monotonic()
            if left <= 0:
                return False
            self._poll.register(self._socket, select.POLLIN)
            self._poll.poll(left * 1e3)
        return True

    def close(self) -> None:
        """Leave: the neighbour notices it."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self) -> bool:
        """Take one message in, if there is one."""
        try:
            message, along, _, _ = self._socket.recvmsg(MESSAGE.size, FILES)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._lost(error) from error
        if len(message) < MESSAGE.size:
            raise self._lost(None)
        word, number, segment, nbytes, offset = MESSAGE.unpack(message)
        for _, _, data in along:
            (file,) = struct.unpack("i", data)
            self.memory[segment] = map_file(file, nbytes)
            os.close(file)
        if word == Word.GONE:
            self.memory.pop(segment, None)
        else:
            self._heard[word, number] = segment, nbytes, offset
        return True

    def _wait(self, events: int) -> None:
        if self._socket.fileno() < 0:
            raise self._lost(None)
        self._poll.register(self._socket, events)
        until = time.monotonic() + self._timeout
        while not self._poll.poll(max(0.0, until - time.monotonic()) * 1e3):
            if time.monotonic() >= until:
                raise NeighbourError(f"Timed out waiting {self._timeout:g} s for rank {self.rank}")

    def _lost(self, error: OSError | None) -> NeighbourError:
        return NeighbourError(f"Connection closed by rank {self.rank}" + (f": {error}" if error is not None else ""))


NOTHING = torch.empty(0, dtype=torch.uint8)


def connect(gather: Callable[[Any], list[Any]], ranks: Sequence[int], mine: int, timeout: float) -> list[Link] | None:
    """A link to each other member of a group, in their order; None where they are not all on one machine.

    All members call it, and all get links, or none. ``gather`` gives what each of them gives, in their order; a
    neighbour is waited for ``timeout`` seconds.
    """
    with socket.socket(socket.AF_UNIX) as door:
        secret, name, here = secrets.token_bytes(16), b"", _machine()
        if here:
            door.bind("")  # the system gives it a name
            door.listen(len(ranks))
            name = door.getsockname()
        every = gather((here, name, secret))
        links: dict[int, Link] = {}
        if here and len({machine for machine, _, _ in every}) == 1:
            with suppress(OSError):
                links = _meet(door, dict(zip(ranks, every, strict=True)), mine, timeout)
        complete = gather(len(links) == len(ranks) - 1)
    if all(complete):
        return [links[rank] for rank in ranks if rank != mine]
    for link in links.values():
        link.close()
    return None


def _meet(
    door: socket.socket, every: dict[int, tuple[str, bytes, bytes]], mine: int, timeout: float
) -> dict[int, Link]:
    """Connect to those that come before in the group, and let in those that come behind."""
    links: dict[int, Link] = {}
    ranks = list(every)
    place = ranks.index(mine)
    door.settimeout(SOON)
    for rank in ranks[:place]:
        _, name, secret = every[rank]
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(SOON)
        made.connect(name)
        made.sendall(secret + struct.pack("=Q", mine))
        links[rank] = Link(made, rank, timeout)
    while len(links) < len(ranks) - 1:
        made, _ = door.accept()
        made.settimeout(SOON)
        said = made.recv(24, socket.MSG_WAITALL)
        (rank,) = struct.unpack("=Q", said[16:]) if len(said) == 24 else (-1,)
        if said[:16] == every[mine][2] and rank in ranks[place + 1 :] and rank not in links:
            links[rank] = Link(made, rank, timeout)
        else:
            made.close()
    return links


def _machine() -> str:
    """The same text in processes that can share memory; empty where none can."""
    try:
        shared_bytes(1)
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except (AttributeError, OSError, RuntimeError):  # a system that has no such memory, or lets nobody map it
        return ""
