"""A scheduler of virtual ranks: matches them at collectives, and diagnoses mismatches and deadlocks.

It runs the coroutines of all ranks up to their next collective, checks that the members of a group request the same
one, executes it, and goes on. A group whose members disagree, or that never meets, is reported by rank, node and source
line instead of hanging; and so is a rank whose program raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Generic, TypeVar

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.experts.dispatch import Overflow
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.loop.stage_transfer import Message
from shardfx.ir.program.source import ProgramSource
from shardfx.ir.program.validate_program import KINDS

from .rank_errors import failed

Tensor = torch.Tensor
T = TypeVar("T")


@dataclass(frozen=True)
class Request:
    """A rank's request to its group: the collective (``all_reduce``) and its arguments after the tensor."""

    op: str
    args: tuple[Any, ...]
    group: str
    node: str
    where: str
    message: str = ""
    """``sends`` or ``receives``, for point-to-point messages."""

    @staticmethod
    def of(node: fx.Node) -> Request | None:
        """The request of a call; None if it is no collective."""
        row = row_of(node.target) if node.op == "call_function" else None
        if row is None or row.group is None:
            return None
        made = node.meta.get("shardfx")
        args = tuple(tuple(arg) if isinstance(arg, (list, tuple)) else arg for arg in node.args[1 : row.group])
        name = KINDS.get(row.name, row.name).removeprefix("c10d.")
        where = str(made.where) if made is not None else ""
        return Request(name, args, str(node.args[row.group]), node.name, where, row.message)

    def of_iteration(self, numbers: Mapping[str, int]) -> Request:
        """The same request with the induction variables of one iteration substituted."""
        args = fx.node.map_aggregate(self.args, lambda arg: numbers[arg.name] if isinstance(arg, fx.Node) else arg)
        return replace(self, args=args)

    def of_rank(self, place: int) -> Message:
        """The message that the rank at a place of the group sends or receives."""
        other, tag, iteration = self.args[-3:]
        origin, to = (place, other) if self.message == "sends" else (other, place)
        return Message(self.group, origin, to, tag, iteration)

    def same(self, other: Request) -> bool:
        """Whether two requests match; in an all-to-all each rank has its own sizes."""
        return self.op == other.op and (self.op == "all_to_all_single" or self.args == other.args)

    def __str__(self) -> str:
        return f"{self.op}{self.args} on {self.group} at node {self.node!r} ({self.where})"


REDUCTIONS: dict[Any, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}
Asked = tuple[Request, Tensor, Tensor | None]
RankCoroutine = Generator[Asked, list[Tensor], Sequence[Tensor]]
"""A running rank: it yields its request, the tensor that it sends, and the memory for its result. It pops the result
from the list that is sent to it, so that no other reference remains."""


@lru_cache(maxsize=4096)
def members(mesh: Mesh, group: str, rank: int) -> tuple[int, ...]:
    """The members of a rank's group of that name, in the group's order.

    Raises:
        Error: the mesh has no such group, or the rank is not in it.
    """
    axes = mesh.group_axes(group)
    if (own := mesh.group_name(rank, axes)) != group:
        remedy = "take group names from Mesh.group_name(rank, axes)"
        raise Error(f"rank {rank} uses a group that it is not in", expected=own, got=group, remedy=remedy)
    return mesh.group(rank, axes)


def run(
    sources: Mapping[int, ProgramSource], inputs: Mapping[int, Sequence[Tensor]], mesh: Mesh
) -> dict[int, Sequence[Tensor]]:
    """Run one program per rank to its end; returns the results of each.

    Raises:
        Error: a rank's program raises; members of a group ask for different collectives, or wait for one that never
            comes.
    """
    calls: dict[int, RankCoroutine] = {rank: source(*inputs[rank]) for rank, source in sources.items()}
    results: dict[int, Sequence[Tensor]] = {}
    waiting: dict[int, Asked] = {}
    mail: Mailbox[Tensor] = Mailbox()

    def advance(rank: int, reply: list[Tensor] | None) -> None:
        try:
            waiting[rank] = calls[rank].send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            results[rank] = stop.value
        except Exception as error:  # whatever a kernel raises
            if isinstance(error, Overflow):
                raise
            raise failed(rank, sources[rank].node_of(error), error) from error

    for rank in calls:
        advance(rank, None)
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            if rank not in waiting:
                continue
            request = waiting[rank][0]
            group = members(mesh, request.group, rank)
            if request.message:
                reply = _passed(request.of_rank(group.index(rank)), waiting[rank], mail)
                if reply:
                    del waiting[rank]
                    advance(rank, reply)
                    progressed = True
                continue
            if any(m not in waiting or waiting[m][0].message or waiting[m][0].group != request.group for m in group):
                continue
            asked = [waiting.pop(member) for member in group]
            _check(group, asked)
            replies = [[made] for made in perform(*zip(*asked, strict=True))]
            asked.clear()  # what was sent is the ranks' to hold, or to let go
            for member, reply in zip(group, replies, strict=True):
                advance(member, reply)
            progressed = True
        if waiting and not progressed:
            raise _deadlock(waiting, results)
    if left := mail.left():
        raise Error(
            "nobody receives what a rank sends", where=str(left), expected="a receive for each send", got="none"
        )
    return results


def _passed(message: Message, asked: Asked, mail: Mailbox[Tensor]) -> list[Tensor]:
    """The reply to a rank that sends or receives; empty where no message has arrived yet."""
    request, given, _ = asked
    if request.message == "sends":
        mail.put(message, given)
        return [given]
    received = mail.take(message)
    return [] if received is None else [received.clone()]


class Mailbox(Generic[T]):
    """Messages in flight: a FIFO queue for each pair of places of a group."""

    def __init__(self) -> None:
        self._sent: dict[tuple[str, int, int], deque[tuple[Message, T]]] = {}

    def put(self, message: Message, content: T) -> None:
        """Send."""
        self._sent.setdefault(message[:3], deque()).append((message, content))

    def take(self, message: Message) -> T | None:
        """Receive; None where nothing has arrived yet.

        Raises:
            Error: another message comes first.
        """
        sent = self._sent.get(message[:3])
        if not sent:
            return None
        if sent[0][0] != message:
            raise Error(
                "two ranks do not send and receive in one order",
                where=f"place {message.to} of {message.group}",
                expected=str(message),
                got=str(sent[0][0]),
                remedy="let both ranks run their iterations in the order of one schedule",
            )
        return sent.popleft()[1]

    def left(self) -> Message | None:
        """A message that was never received."""
        return next((sent[0][0] for sent in self._sent.values() if sent), None)


def _check(group: Sequence[int], asked: Sequence[Asked]) -> None:
    """Raise where members of a group request different collectives, or an invalid one.

    Raises:
        Error: they do.
    """
    first, given, _ = asked[0]
    got = ""
    for member, (request, tensor, _) in zip(group, asked, strict=True):
        alike = tensor.dtype == given.dtype and (first.op == "all_to_all_single" or tensor.shape == given.shape)
        if not request.same(first) or not alike:
            got = f"rank {member}: {request}, {tuple(tensor.shape)} {tensor.dtype}"
    if got := got or unfit(first.op, [request.args for request, _, _ in asked], len(group)):
        raise Error(
            "collectives do not match between ranks",
            where=f"ranks {' and '.join(map(str, group[:8]))}",
            expected=f"rank {group[0]}: {first}, {tuple(given.shape)} {given.dtype}",
            got=got,
            remedy="every rank of a group must run the same collectives in the same order",
        )


def unfit(op: str, asked: Sequence[Sequence[Any]], ranks: int) -> str:
    """The reason why a collective is invalid on a group of so many ranks; empty where it is valid.

    Args:
        op: the collective, as a :class:`Request` names it.
        asked: of each member, the arguments between the tensor and the group.
    """
    first = asked[0]
    if op in ("all_reduce", "reduce_scatter_tensor") and first[0] not in REDUCTIONS:
        return f"{first[0]!r} is no reduction"
    if op == "reduce_scatter_tensor" and first[1] != ranks:
        return f"a reduce-scatter into {first[1]} shards over {ranks} ranks"
    if op == "all_gather_into_tensor" and first[0] != ranks:
        return f"an all-gather over {ranks} ranks that says {first[0]}"
    if op == "all_to_all_single":
        got, sent = ([list(each[i]) for each in asked] for i in (0, 1))
        if any(len(each) != ranks for each in (*got, *sent)) or list(map(list, zip(*sent, strict=True))) != got:
            return "an exchange in which a rank expects other sizes than are sent"
    return ""


def _deadlock(waiting: Mapping[int, Asked], ended: Collection[int]) -> Error:
    return Error(
        "deadlock: no group of ranks comes together",
        where="; ".join(f"rank {rank} waits in {waiting[rank][0]}" for rank in sorted(waiting)[:4]),
        expected="every rank of a group in the same collective",
        got=f"{len(waiting)} ranks waiting; at their ends: {sorted(ended)[:8]}",
        remedy="every rank of a group must run the same collectives in the same order",
    )


# ---- collectives, in the order of the group: deterministic


def perform(requests: Sequence[Request], tensors: Sequence[Tensor], into: Sequence[Tensor | None]) -> list[Tensor]:
    """Execute a collective on the tensors of a group's members, into the memory that each rank provides, if any."""
    made = _results(requests, tensors)
    return [new if at is None else at.copy_(new.view(at.shape)) for new, at in zip(made, into, strict=True)]


def _results(requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    n, op, args = len(tensors), requests[0].op, requests[0].args
    if op == "reduce_scatter_tensor":
        return [shard.clone() for shard in reduce(tensors, args[0]).chunk(n)]
    if op in ("all_reduce", "all_gather_into_tensor"):
        same = reduce(tensors, args[0]) if op == "all_reduce" else torch.cat([torch.atleast_1d(t) for t in tensors])
        return [same, *(same.clone() for _ in tensors[1:])]
    sent = [t.split(list(r.args[1])) for t, r in zip(tensors, requests, strict=True)]
    return [torch.cat([each[k] for each in sent]) for k in range(n)]


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce tensors in rank order."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        REDUCTIONS[kind](total, other, out=total)
    return total / len(tensors) if kind == "avg" else total
