"""The process-group backend ``"shm"``: collectives among CPU ranks of one machine, through memory that they share.

    torch.distributed.init_process_group("cpu:shm")

    all-reduce of a bucket        each rank says SHARED, reduces its n-th of all buckets, writes that into all of them
    smaller ones, gathers, ...    each rank copies its tensor into a slot: READY; the others read it: TAKEN
    a message                     a copy in a slot: SENT; the sender goes on; the receiver reads it: TAKEN

It takes a fifth of the CPU time of gloo, which sends through sockets (``python -m benchmarks.collectives``).
Reductions are in rank order: results are the same on all ranks. A collective runs lazily, in its ``wait``, after those
of its group that were started before. Control messages go over Unix sockets, the file descriptor of a segment along
with the first message that names it. A process that ends closes its sockets, which its peers notice at once. Gloo does
the rest: objects, other layouts, groups over several machines. CUDA tensors are not supported.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from itertools import count
from select import select
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from shardfx.ir.ops import memory_ops
from shardfx.runtime.memory_pool import MemoryPool
from shardfx.runtime.rendezvous import REDUCTIONS

Tensor = torch.Tensor
NAME = "shm"

# ---- memory that other processes may map: a file without a name, which ends with its last user


@dataclass(eq=False)
class SharedFile:
    """A shared-memory segment, mapped into this process."""

    number: int
    file: int
    nbytes: int


NOTHING = SharedFile(0, -1, 0)
_segments: dict[int, SharedFile] = {}
"""The segments of this process, by mapped address."""
_segment_numbers = count(1)
forgotten: list[int] = []
"""The numbers of freed segments, in order."""


def shared_bytes(nbytes: int) -> Tensor:
    """Allocate a shared-memory segment of at least one byte; its file is closed when its last tensor is freed."""
    file = os.memfd_create("shardfx")
    try:
        os.posix_fallocate(file, 0, nbytes)
        flat = _map_file(file, nbytes)
    except BaseException:
        os.close(file)
        raise
    _segments[flat.data_ptr()] = SharedFile(next(_segment_numbers), file, nbytes)
    weakref.finalize(flat.untyped_storage(), _forget, flat.data_ptr())
    return flat


def segment_of(x: Tensor) -> tuple[SharedFile, int] | None:
    """The segment of a tensor and its byte offset there; None if it is not in shared memory."""
    address = x.untyped_storage().data_ptr()
    return (_segments[address], x.data_ptr() - address) if address in _segments else None


def _map_file(file: int, nbytes: int) -> Tensor:
    return torch.from_file(f"/proc/self/fd/{file}", shared=True, size=nbytes, dtype=torch.uint8)


def _forget(address: int) -> None:
    segment = _segments.pop(address)
    forgotten.append(segment.number)
    os.close(segment.file)


# ---- connections between ranks

MESSAGE = struct.Struct("=QQQQQ")
FILES = socket.CMSG_SPACE(struct.calcsize("i"))
CONNECT = 10.0
"""The connection time-out in seconds."""


class LinkWord(IntEnum):
    """The type of a control message: a collective's operand is ready; a bucket is ready to be reduced in place; a
    point-to-point message was sent; a slot was read; a segment was freed."""

    READY = 0
    SHARED = 1
    SENT = 2
    TAKEN = 3
    FREED = 4


class LinkError(RuntimeError):
    """A connection is lost, or a rank has not been heard of in time."""


class SocketLink:
    """The control connection to another rank of a group."""

    def __init__(self, connection: socket.socket, rank: int, timeout: float) -> None:
        connection.setblocking(True)
        waits = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, waits)
        self._socket, self.rank, self._timeout = connection, rank, timeout
        self._heard: dict[tuple[int, int], deque[tuple[int, int]]] = {}
        self._known: set[int] = set()
        """The segments whose file descriptors the peer has."""
        self.memory: dict[int, Tensor] = {}
        """The peer's segments that are mapped here, by number."""
        self._forgotten = len(forgotten)

    def tell(self, word: LinkWord, number: int, where: tuple[SharedFile, int] | None = None) -> None:
        """Send a control message about a numbered collective, and its location. A closed connection is ignored."""
        with suppress(OSError, LinkError):
            for gone in forgotten[self._forgotten :]:
                self._forgotten += 1
                if gone in self._known:
                    self._known.remove(gone)
                    self._send(MESSAGE.pack(LinkWord.FREED, 0, gone, 0, 0))
            segment, offset = where or (NOTHING, 0)
            files = [segment.file] if where is not None and segment.number not in self._known else []
            self._known.update(segment.number for _ in files)
            self._send(MESSAGE.pack(word, number, segment.number, segment.nbytes, offset), files)

    def _send(self, message: bytes, files: Sequence[int] = ()) -> None:
        """Send a message; while the socket's buffer is full, read, so that two ranks cannot deadlock."""
        along = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", file)) for file in files]
        while True:
            try:
                self._socket.sendmsg([message], along, socket.MSG_DONTWAIT)
                return
            except BlockingIOError:
                mine = [self._socket]
                if not self._read(socket.MSG_DONTWAIT) and not any(select(mine, mine, [], self._timeout)):
                    raise LinkError(f"Timed out waiting {self._timeout:g} s for rank {self.rank}") from None

    def hear(self, word: LinkWord, number: int) -> tuple[int, int]:
        """Wait for a message; returns the segment and byte offset in it. Raises :class:`LinkError` if none arrives."""
        while (found := self._heard.get((word, number))) is None:
            if not self._read():
                raise LinkError(f"Timed out waiting {self._timeout:g} s for rank {self.rank}")
        first = found.popleft()
        if not found:
            del self._heard[word, number]
        return first

    def has_heard(self, word: LinkWord, number: int) -> bool:
        """Whether a message has arrived; does not block."""
        while (word, number) not in self._heard:
            if not self._read(socket.MSG_DONTWAIT):
                return False
        return True

    def close(self) -> None:
        """Close the connection, which the peer notices."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read(self, flags: int = 0) -> bool:
        """Read one message; False if none arrives in time."""
        try:
            message, along, _, _ = self._socket.recvmsg(MESSAGE.size, FILES, flags)
        except BlockingIOError:
            return False
        except OSError:
            message, along = b"", []
        if len(message) < MESSAGE.size:
            raise LinkError(f"Connection closed by rank {self.rank}")
        word, number, segment, nbytes, offset = MESSAGE.unpack(message)
        for _, _, data in along:
            (file,) = struct.unpack("i", data)
            self.memory[segment] = _map_file(file, nbytes)
            os.close(file)
        if word == LinkWord.FREED:
            self.memory.pop(segment, None)
        else:
            self._heard.setdefault((word, number), deque()).append((segment, offset))
        return True


def connect(gather: Callable[[Any], list[Any]], place: int, ranks: Sequence[int], timeout: float) -> list[SocketLink]:
    """Connect all members of a group, which all call it; returns the links in the group's order, or none where they are
    not all on one machine. ``gather`` all-gathers an object."""
    links: dict[int, SocketLink] = {}
    with socket.socket(socket.AF_UNIX) as door:
        here = _machine()
        if here:
            door.bind("")  # the system gives it a name
            door.listen(len(ranks))
        every = gather((here, door.getsockname().hex() if here else ""))
        if here and len({machine for machine, _ in every}) == 1:
            with suppress(OSError):
                door.settimeout(CONNECT)
                for other in range(place):
                    made = socket.socket(socket.AF_UNIX)
                    made.connect(bytes.fromhex(every[other][1]))
                    made.sendall(struct.pack("=I", place))
                    links[other] = SocketLink(made, ranks[other], timeout)
                while len(links) < len(ranks) - 1:
                    made, _ = door.accept()
                    peer = made.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
                    if struct.unpack("3i", peer)[1] == os.getuid():  # its process, user and group
                        (other,) = struct.unpack("=I", made.recv(4))
                        links[other] = SocketLink(made, ranks[other], timeout)
        complete = gather(len(links) == len(ranks) - 1)
    for link in links.values() if not all(complete) else ():
        link.close()
    return [links[other] for other in sorted(links)] if all(complete) else []


def _machine() -> str:
    """An identifier of the machine, equal in processes that can share memory; empty where none can."""
    try:
        shared_bytes(1)
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')}"
    except (AttributeError, OSError, RuntimeError):  # a system without such memory
        return ""


# ---- the process group

LARGE = 1 << 20
"""From this many bytes, tensors in shared memory are not copied; all ranks share the work of their all-reduce."""
BLOCK = 1 << 18
"""The block size of reductions in bytes, which fits a processor's cache."""


def is_read(copy: Tensor, readers: list[SocketLink]) -> bool:
    """Whether all readers have read a copy in shared memory; removes those that have."""
    (segment, _) = segment_of(copy) or (NOTHING, 0)
    for link in [link for link in readers if link.has_heard(LinkWord.TAKEN, segment.number)]:
        link.hear(LinkWord.TAKEN, segment.number)
        readers.remove(link)
    return not readers


class ShmWork(dist.Work):
    """The handle of a collective or receive into ``out``, which runs when it is waited for, after those before it in
    the ``queue``; without ``finish`` it is complete."""

    def __init__(self, finish: Callable[[], object] | None, queue: deque[ShmWork], out: Tensor) -> None:
        super().__init__()
        self._finish, self._queue, self._out = finish, queue, out
        if finish is not None:
            queue.append(self)

    def wait(self, timeout: Any = None) -> bool:
        """Run this rank's part, and that of handles started before it."""
        while self._finish is not None:
            first = self._queue.popleft()
            assert first._finish is not None
            first._finish()
            first._finish = None
        return True

    def is_completed(self) -> bool:
        return self._finish is None

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """A completed future of the result; waits for it."""
        self.wait()
        made: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        made.set_result([self._out])
        return made


class ShmGroup(dist.ProcessGroup):
    """A process group of ranks on one machine: ``links`` to the other members, in their order, and ``gloo`` for all
    unsupported calls."""

    def __init__(self, links: Sequence[SocketLink], gloo: Any) -> None:
        super().__init__(gloo.rank(), gloo.size())  # type: ignore[call-arg]
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        self._gloo, self._place, self._count = gloo, gloo.rank(), gloo.size()
        self._links = links
        self._of = [*links[: self._place], None, *links[self._place :]]
        self._numbers = count()
        self._pool = MemoryPool(shared_bytes)
        self._unread: list[tuple[Tensor, list[SocketLink]]] = []
        """Copies that peers have not read yet, and those peers; a copy's memory is reused once it has no references."""
        self._queue: deque[ShmWork] = deque()
        open_groups.add(self)

    @property
    def memory(self) -> list[Tensor]:
        """The memory of this group's transport, which belongs to no program: peers' mapped segments, and copies."""
        seen = [each for link in self._links for each in link.memory.values()]
        return [*seen, *self._pool.memory]

    def shutdown(self) -> None:
        """Close the links to the other members, and gloo's group."""
        for link in self._links:
            link.close()
        open_groups.discard(self)
        self._gloo.shutdown()

    abort = shutdown

    # The names that torch calls here, from Python and from below ``_c10d_functional``.

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:  # type: ignore[override]
        """All-reduce a tensor in place."""
        x, fold = tensors[0], self._fold_of(tensors[0], opts)
        if fold is None or len(tensors) > 1 or not x.is_contiguous():
            return self._gloo.allreduce(tensors, opts)
        where = segment_of(x) if x.nbytes >= LARGE else None
        if where is None:
            return self._start(x, x, lambda parts: fold([part.view(x.shape) for part in parts], x))

        def finish(parts: list[Tensor]) -> None:
            per = -(-x.numel() // self._count)
            mine = [part[self._place * per : (self._place + 1) * per] for part in parts]
            fold(mine, mine[0])
            for part in mine[1:]:
                part.copy_(mine[0])

        return self._start(x, x, finish, where, word=LinkWord.SHARED)

    def all_gather_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        """All-gather several tensors."""
        return [self.all_gather_single(out, x) for x, out in zip(tensors, outs, strict=True)][-1]

    def all_gather_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        """All-gather a tensor of each rank into one."""

        def finish(parts: list[Tensor]) -> None:
            for to, part in zip(out.view(self._count, x.numel()), parts, strict=True):
                to.copy_(part)

        return self._start(x, out, finish)

    def reduce_scatter_single_coalesced(self, outs: list[Tensor], tensors: list[Tensor], opts: Any = None) -> Any:
        """Reduce-scatter several tensors."""
        *works, last = [self.reduce_scatter_single(out, x, opts) for x, out in zip(tensors, outs, strict=True)]
        for each in works:
            each.wait()
        return last

    def reduce_scatter_single(self, out: Tensor, x: Tensor, opts: Any = None) -> Any:
        """Reduce-scatter a tensor."""
        fold = self._fold_of(x, opts)
        if fold is None:
            return self._gloo._reduce_scatter_base(out, x, opts)

        def finish(parts: list[Tensor]) -> None:
            fold([part.view(self._count, out.numel())[self._place] for part in parts], out)

        where = segment_of(x) if x.is_contiguous() and x.nbytes >= LARGE else None
        return self._start(x, out, finish, where)

    def send(self, tensors: list[Tensor], to: int, tag: int = 0) -> Any:
        """Send a copy of a tensor, without blocking."""
        link = self._of[to]
        assert link is not None, "a rank sends to itself"
        link.tell(LinkWord.SENT, tag, segment_of(self._copied(tensors[0], [link])))
        return ShmWork(None, deque(), tensors[0])

    def recv(self, tensors: list[Tensor], origin: int, tag: int = 0) -> Any:
        """Receive a tensor: messages of one tag arrive in the order in which they were sent."""
        (out,), link = tensors, self._of[origin]
        assert link is not None, "a rank receives from itself"

        def finish() -> None:
            segment, byte = link.hear(LinkWord.SENT, tag)
            out.copy_(link.memory[segment][byte : byte + out.nbytes].view(out.dtype).view(out.shape))
            link.tell(LinkWord.TAKEN, segment)

        return ShmWork(finish, deque(), out)

    # Names of other versions of torch.
    allgather_into_tensor_coalesced = all_gather_single_coalesced  # type: ignore[assignment]
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced  # type: ignore[assignment]
    _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single  # type: ignore[assignment]

    # ---- what they are made of

    def _fold_of(self, x: Tensor, opts: Any) -> Callable[[Sequence[Tensor], Tensor], None] | None:
        """The reduction of tensors like ``x``, in rank order, into another; None if gloo has to do it."""
        op = opts.reduceOp.op.name.lower() if opts is not None else "sum"
        function = REDUCTIONS.get(op)
        if function is None or x.device.type != "cpu" or not x.is_floating_point():
            return None

        def fold(parts: Sequence[Tensor], out: Tensor) -> None:
            flat: list[Any] = [each.view(-1).split(BLOCK // out.element_size()) for each in (out, *parts)]
            for to, first, second, *rest in zip(*flat, strict=True):
                function(first, second, out=to)
                for each in rest:
                    function(to, each, out=to)
                if op == "avg":
                    to.div_(self._count)

        return fold

    def _start(
        self,
        x: Tensor,
        out: Tensor,
        finish: Callable[[list[Tensor]], None],
        where: tuple[SharedFile, int] | None = None,
        word: LinkWord = LinkWord.READY,
    ) -> ShmWork:
        """Start a collective: show ``x``, or a copy where it is not in shared memory (``where``), to the others, and
        ``finish`` it, in ``out``, on what each rank shows."""
        number, shown = next(self._numbers), x if where is not None else self._copied(x, self._links)
        mine = shown.view(-1) if shown is x else shown[: x.nbytes].view(x.dtype)
        segment, offset = where or segment_of(shown) or (NOTHING, 0)
        for link in self._links:
            link.tell(word, number, (segment, offset))

        def work() -> None:
            heard = [link.hear(word, number) for link in self._links]
            seen = [link.memory[at][byte:] for link, (at, byte) in zip(self._links, heard, strict=True)]
            parts = [part[: x.nbytes].view(x.dtype) for part in seen]
            finish([*parts[: self._place], mine, *parts[self._place :]])
            for link, (at, _) in zip(self._links, heard, strict=True):
                link.tell(LinkWord.TAKEN, at)
            for link in self._links if shown is x else ():
                link.hear(LinkWord.TAKEN, segment.number)

        return ShmWork(work, self._queue, out)

    def _copied(self, x: Tensor, readers: Sequence[SocketLink]) -> Tensor:
        """A shared-memory copy of a tensor, which is live until all readers have read it."""
        self._unread = [each for each in self._unread if not is_read(*each)]
        copy = self._pool.arena(max(x.nbytes, 1))
        copy[: x.nbytes].view(x.dtype).view(x.shape).copy_(x)
        self._unread.append((copy, [*readers]))
        return copy


def _by_gloo(name: str) -> Any:
    """A method that calls gloo's: torch's own would hold the GIL, which gloo's threads need to free tensors."""
    return lambda self, *args, **kwargs: getattr(self._gloo, name)(*args, **kwargs)


for _name in (
    *("reduce", "gather", "scatter", "allgather", "allgather_coalesced", "alltoall", "alltoall_base", "reduce_scatter"),
    *("allreduce_coalesced", "broadcast", "barrier", "monitored_barrier"),
):
    setattr(ShmGroup, _name, _by_gloo(_name))
ShmGroup.all_to_all_single = _by_gloo("alltoall_base")  # type: ignore[method-assign]  # its name in newer torch

open_groups: weakref.WeakSet[ShmGroup] = weakref.WeakSet()


# ---- the collectives of a program, called without torch's dispatcher

c10d = torch.ops._c10d_functional


class Started(NamedTuple):
    """The handle of a collective or a receive, and its result."""

    work: Any
    out: Tensor

    def wait(self) -> Tensor:
        """The result, after a wait."""
        self.work.wait()
        return self.out


def _all_reduce(group: ShmGroup, x: Tensor, op: str) -> Started:
    return Started(group.allreduce([x], _options(dist.AllreduceOptions, op)), x)


def _all_reduce_copy(group: ShmGroup, x: Tensor, op: str) -> Started:
    return _all_reduce(group, x.clone(memory_format=torch.contiguous_format), op)


def _all_gather(group: ShmGroup, x: Tensor, size: int, *, out: Tensor | None = None) -> Started:
    out = x.new_empty([x.shape[0] * size, *x.shape[1:]]) if out is None else out
    return Started(group.all_gather_single(out, x), out)


def _reduce_scatter(group: ShmGroup, x: Tensor, op: str, size: int) -> Started:
    out = x.new_empty([x.shape[0] // size, *x.shape[1:]])
    return Started(group.reduce_scatter_single(out, x, _options(dist.ReduceScatterOptions, op)), out)


@cache
def _options(kind: Callable[[], Any], op: str) -> Any:
    made = kind()
    made.reduceOp = getattr(dist.ReduceOp, op.upper())
    return made


def _direct(op: Callable[..., Any], start: Callable[..., Started]) -> Callable[..., Any]:
    def call(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        group = _resolve_process_group(args[-1])
        if not isinstance(group, ShmGroup) or torch._C._len_torch_dispatch_stack():  # which may count collectives
            return op(x, *args, **kwargs)
        return start(group, x, *args[:-1], **kwargs)

    return call


DIRECT: dict[Any, Callable[..., Any]] = {
    c10d.all_reduce.default: _direct(c10d.all_reduce, _all_reduce_copy),
    memory_ops.all_reduce_: _direct(memory_ops.all_reduce_, _all_reduce),
    c10d.all_gather_into_tensor.default: _direct(c10d.all_gather_into_tensor, _all_gather),
    memory_ops.all_gather_into: _direct(memory_ops.all_gather_into, _all_gather),
    c10d.reduce_scatter_tensor.default: _direct(c10d.reduce_scatter_tensor, _reduce_scatter),
}
"""Direct implementations of these ops, without the CPU overhead of torch's dispatcher."""


# ---- the backend


def _create(options: Any, _: Any) -> Any:
    """The backend of a new group: gloo's, where its ranks are not all on one machine."""
    place, ranks = options.group_rank, list(options.global_ranks_in_group) or list(range(options.group_size))
    store = dist.PrefixStore(NAME, options.store)
    gloo = dist.ProcessGroupGloo(store, place, options.group_size, timeout=options.timeout)
    rounds = count()

    def gather(value: Any) -> list[Any]:
        number = next(rounds)
        store.set(f"links/{number}/{place}", json.dumps(value))
        return [json.loads(store.get(f"links/{number}/{other}")) for other in range(len(ranks))]

    links = connect(gather, place, ranks, options.timeout.total_seconds()) if len(ranks) > 1 else []
    return ShmGroup(links, gloo) if links else gloo


if NAME not in dist.Backend.backend_list:
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
