"""Failure of real ranks: who failed where, and who waits for whom, told through the store of the job.

A rank whose program raises says why in the store and leaves its groups, so that nobody waits for it. A rank whose
collective breaks (a peer has ended, or the time-out of the process group is up: ten minutes where shardfx joined the
job) reads what the others said, and raises an error with its collective, what failed elsewhere, and the ranks from
which there is no word. On NCCL the watchdog of torch ends ranks, in its own words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.local_ops import row_of
from shardfx.runtime.rank_errors import failed, place, target_name

from .groups import is_dry_run, leave_groups, the_cpu_group

T = TypeVar("T")
WAIT = 2.0
"""Seconds that a rank waits for word from the others before it says that there is none."""


@contextmanager
def ending_together(what: str = "") -> Iterator[None]:
    """The scope of a collective of all ranks (``what`` names it): if it breaks, an error says who is missing."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not (isinstance(error, dist.DistError) or _is_broken(error)):
            raise
        raise ended(None, error, what) from error


@contextmanager
def ending_compiled() -> Iterator[None]:
    """The scope of a compiled program: if it raises, or a collective breaks, an error says so, and the others hear."""
    try:
        yield
    except Exception as error:
        raise ended(None, error, "a collective of the compiled program" if _is_broken(error) else "") from error


def exchange(mine: Sequence[int], what: str) -> list[list[int]]:
    """All-gather as many numbers of 64 bits from every CPU rank; by rank."""
    group = the_cpu_group()
    with ending_together(what):
        every = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
        group._allgather_base(every, torch.tensor(mine)).wait()
    return every.view(-1, len(mine)).tolist()


def tell_all(mine: T) -> list[T]:
    """All-gather an object; by rank."""
    every: list[Any] = [None] * dist.get_world_size()
    with ending_together("telling something"):
        dist.all_gather_object(every, mine, group=the_cpu_group())
    return every


def ended(node: fx.Node | None, error: Exception, what: str = "") -> Error:
    """Tell the others how this rank's program ended, and leave the groups; gives the error to raise."""
    rank, row = dist.get_rank(), row_of(node.target) if node is not None else None
    if is_dry_run():
        return failed(rank, node, error)
    waits = row is not None and row.name == "c10d.wait_tensor"
    communicates = waits or (row is not None and row.group is not None)
    if not what and not (communicates and isinstance(error, RuntimeError)):
        made = failed(rank, node, error)
        _leave({"failed": str(made)})
        return made
    where = f"{place(rank, None)}; {what}" if what else place(rank, node)
    if node is not None:
        started = node.args[0] if waits else node
        what = target_name(started if isinstance(started, fx.Node) else node)
    _leave({"waits": where})
    return _missing(where, what, error)


def _missing(where: str, what: str, error: Exception) -> Error:
    """The error of a rank that waited in vain."""
    words, answers = _listen()
    silent = [str(r) for r in range(dist.get_world_size()) if r != dist.get_rank() and r not in words]
    lines = [f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"]
    failures = [(rank, word["failed"]) for rank, word in sorted(words.items()) if "failed" in word]
    lines += [f"rank {rank}: {line}" for rank, text in failures for line in text.splitlines()]
    if not answers:
        lines.append("the job's store does not answer: the process that kept it (rank 0, without torchrun) has ended")
    elif silent:
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(silent)}"
        lines.append(f"no word within {WAIT:g} s from {ranks}: stuck, killed, or gone from the job")
    lines += [f"waits too: {word['waits']}" for _, word in sorted(words.items()) if "waits" in word][:3]
    return Error(
        f"a rank failed while others waited for it in {what}" if failures else f"a rank is missing in {what}",
        where=where,
        expected="every rank of the group in this collective, before the process group's time-out",
        got=f"\n  {'':<10}".join(lines),
        remedy="see the output of the ranks that are named; start the job again from its last checkpoint",
    )


def _is_broken(error: Exception) -> bool:
    """Whether a backend lost a peer, or waited too long: these raise no type of their own."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text or "timed out" in text)


def _leave(word: Mapping[str, str]) -> None:
    """Say how this rank ends, and leave its groups."""
    with suppress(RuntimeError):  # the store is gone with the process that kept it
        dist.distributed_c10d._get_default_store().set(f"shardfx/ended/{dist.get_rank()}", json.dumps(word))
    leave_groups()


def _listen() -> tuple[dict[int, Any], bool]:
    """What the other ranks said, by rank; and whether the store answers."""
    words: dict[int, Any] = {}
    until = time.monotonic() + WAIT
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    try:
        store = dist.distributed_c10d._get_default_store()
        while len(words) < len(others) and time.monotonic() < until:
            for other in others:
                if other not in words and store.check([f"shardfx/ended/{other}"]):
                    words[other] = json.loads(store.get(f"shardfx/ended/{other}"))
            time.sleep(0.02)
    except RuntimeError:
        return words, False
    return words, True
