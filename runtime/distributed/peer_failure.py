"""Failure handling of real ranks: one whose program raises leaves its groups, so that no peer waits for it.

A rank whose collective breaks (a peer has failed or ended, or the time-out of the process group is up: ten minutes
where shardfx joined the job) raises an error with its collective, and leaves its groups, too. On NCCL the watchdog of
torch ends ranks. ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` and torch's flight recorder show which rank waits where.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.local_ops import row_of
from shardfx.runtime.rank_errors import failed, place, target_name

from .groups import is_dry_run, leave_groups, the_cpu_group

T = TypeVar("T")


@contextmanager
def ending_together(what: str = "") -> Iterator[None]:
    """The scope of a collective of all ranks: if it breaks, the error says that a rank is missing in ``what``."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        if not (isinstance(error, dist.DistError) or _is_broken(error)):
            raise
        raise ended(None, error, what) from error


def exchange(mine: Sequence[int], what: str) -> list[list[int]]:
    """All-gather 64-bit numbers, equally many from each rank, on the CPU; by rank."""
    group = the_cpu_group()
    with ending_together(what):
        every = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
        group._allgather_base(every, torch.tensor(mine)).wait()
    return every.view(-1, len(mine)).tolist()


def tell_all(mine: T) -> list[T]:
    """All-gather an object; by rank. In a dry run, what this rank has for each."""
    every: list[Any] = [mine] * dist.get_world_size()
    if is_dry_run():
        return every
    with ending_together("telling something"):
        dist.all_gather_object(every, mine, group=the_cpu_group())
    return every


def ended(node: fx.Node | None, error: Exception, what: str = "") -> Error:
    """Leave the groups after this rank's failure; returns the error to raise: its own, or that a peer is gone."""
    rank, row = dist.get_rank(), row_of(node.target) if node is not None else None
    if node is None and not what and _is_broken(error):
        what = "a collective of the compiled program"
    waits = row is not None and row.name == "c10d.wait_tensor"
    communicates = waits or (row is not None and row.group is not None)
    if not is_dry_run():
        leave_groups()
    if not what and not (communicates and isinstance(error, RuntimeError)):
        return failed(rank, node, error)
    started = node.args[0] if node is not None and waits else node
    return Error(
        f"a rank is missing in {target_name(started) if isinstance(started, fx.Node) else what}",
        where=place(rank, node) if node is not None else f"{place(rank, None)}; {what}",
        expected="every rank of the group in this collective, before the process group's time-out",
        got=f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}",
        remedy="the output of the rank that failed first says why; start the job again from its last checkpoint",
    )


def _is_broken(error: Exception) -> bool:
    """Whether an error is a lost peer or a time-out of a backend, for which there is no exception type."""
    text = str(error).lower()
    return isinstance(error, RuntimeError) and ("gloo" in text or "connection" in text or "timed out" in text)
