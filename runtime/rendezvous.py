"""Virtual ranks: all programs in this process, in lock-step, deterministic.

Each rank's program becomes a Python generator that yields at every collective; the scheduler runs the ranks up to
their next one, checks that the members of a group ask for the same thing, does it, and goes on. A group whose
members disagree, or that never comes together, is reported by rank, node and source line instead of hanging; and so
is a rank whose program raises, with what the others wait in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.runtime.debug.collective_counts import record
from shardfx.runtime.virtual.collectives import perform
from shardfx.runtime.virtual.coroutine import Request, Steps, op_name

from .rank_errors import failed

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


class Groups:
    """The members of every group, by the name that the programs use."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[str, tuple[int, ...]] = {}

    def members(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self._known:
            shape, _, rest = name.partition("/")
            axes = tuple(rest.partition("@")[0].split("."))
            known = shape == self._mesh.signature and all(a in self._mesh.names for a in axes)
            group = self._mesh.group(rank, axes) if known else ()
            if not known or self._mesh.group_name(rank, axes) != name:
                raise Error(
                    f"rank {rank} uses a group that it is not in",
                    expected=f"a group of mesh {self._mesh}",
                    got=name,
                    remedy="take group names from Mesh.group_name(rank, axes)",
                )
            self._known[name] = group
        if rank not in self._known[name]:
            raise Error(
                f"rank {rank} uses a group that it is not in",
                expected=f"ranks {self._known[name]}",
                got=name,
                remedy="take group names from Mesh.group_name(rank, axes)",
            )
        return self._known[name]


def run(programs: Sequence[Steps], inputs: Sequence[Sequence[Tensor]], mesh: Mesh) -> list[Sequence[Tensor]]:
    """Run one program per rank to its end; gives what each returns.

    Raises:
        Error: a rank's program raises (the first node of the plan that does so, if several do); members of a group
            ask for different collectives, or wait for one that never comes.
    """
    groups = Groups(mesh)
    calls = [program(*given) for program, given in zip(programs, inputs, strict=True)]
    results: list[Sequence[Tensor]] = [()] * len(calls)
    waiting: dict[int, tuple[Request, Tensor]] = {}
    failures: dict[int, Exception] = {}

    def advance(rank: int, reply: Tensor | None) -> None:
        try:
            waiting[rank] = calls[rank].send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            results[rank] = stop.value
        except Exception as error:  # whatever a kernel raises; the others go on to where they need this rank
            failures[rank] = error

    for rank in range(len(calls)):
        advance(rank, None)
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            if rank not in waiting:
                continue
            request, _ = waiting[rank]
            members = groups.members(request.group, rank)
            if any(m not in waiting or waiting[m][0].group != request.group for m in members):
                continue
            requests = [waiting[m][0] for m in members]
            tensors = [waiting[m][1] for m in members]
            _check(members, requests, tensors)
            record(op_name(request.op), request.group, tensors[0], len(members))
            for member in members:
                del waiting[member]
            for member, reply in zip(members, perform(request, requests, tensors), strict=True):
                advance(member, reply)
            progressed = True
        if waiting and not progressed:
            if not failures:
                raise _deadlock(waiting, groups)
            break
    if failures:
        raise _first(failures, programs, waiting)
    return results


def _first(
    failures: Mapping[int, Exception], programs: Sequence[Steps], waiting: Mapping[int, tuple[Request, Tensor]]
) -> Error:
    """The failure at the first node of the plan; of several ranks there, the first."""
    at = {rank: programs[rank].node_of(error) for rank, error in failures.items()}
    rank = min(failures, key=lambda rank: (programs[rank].position(at[rank]), rank))
    others = [f"rank {other} waits in {waiting[other][0]}" for other in sorted(waiting)]
    others += [f"rank {other} failed too" for other in sorted(failures) if other != rank]
    return failed(rank, at[rank], failures[rank], others)


def _check(members: Sequence[int], requests: Sequence[Request], tensors: Sequence[Tensor]) -> None:
    first = requests[0]
    for member, request, tensor in zip(members[1:], requests[1:], tensors[1:], strict=True):
        exchange = first.op is c10d.all_to_all_single.default
        alike = tensor.dtype == tensors[0].dtype and (exchange or tensor.shape == tensors[0].shape)
        if not request.same(first) or not alike:
            raise Error(
                "collectives do not match between ranks",
                where=f"ranks {members[0]} and {member}",
                expected=f"{first}, {tuple(tensors[0].shape)} {tensors[0].dtype}",
                got=f"{request}, {tuple(tensor.shape)} {tensor.dtype}",
                remedy="every rank of a group must run the same collectives in the same order",
            )


def _deadlock(waiting: Mapping[int, tuple[Request, Tensor]], groups: Groups) -> Error:
    lines = []
    for rank in sorted(waiting)[:4]:
        request = waiting[rank][0]
        missing = [
            m for m in groups.members(request.group, rank) if m not in waiting or waiting[m][0].group != request.group
        ]
        lines.append(f"rank {rank} waits in {request} for ranks {missing}")
    return Error(
        "deadlock: no group of ranks comes together",
        where="; ".join(lines),
        expected="every rank of a group in the same collective",
        got=f"{len(waiting)} ranks waiting",
        remedy="every rank of a group must run the same collectives in the same order",
    )
