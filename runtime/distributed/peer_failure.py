"""Real processes that end together: who failed where, and who waits for whom, told through the job's store.

A rank whose program raises tells the others why and leaves its groups, so that none waits for it. A rank whose
collective breaks (a peer has ended, or the time is up) asks what the others have told, and raises an error that says
in which collective it waited, what failed elsewhere, and from whom there is no word.

- A process that has ended is noticed at once: its connections close.
- One that is alive and stuck is noticed when the time-out of the process group is up: ten minutes where shardfx joined
  the job, or what ``torch.distributed.init_process_group(timeout=...)`` was told before ``parallelize``.

On NCCL it is the watchdog of torch that ends ranks, in its own words.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.local_ops import row_of
from shardfx.runtime.rank_errors import failed, place, target_name

from .groups import group_timeout, is_dry_run, leave_groups

WAIT = 2.0
"""So many seconds a rank waits for word from the others before it says that there is none."""


def _communicates(node: fx.Node) -> bool:
    """Whether a call needs other ranks."""
    row = row_of(node.target)
    return row is not None and (row.group is not None or row.name == "c10d.wait_tensor")


@contextmanager
def ending_together(what: str = "") -> Iterator[None]:
    """Within, a collective of all ranks (``what`` names it) that breaks becomes an error that says for whom it was."""
    try:
        yield
    except dist.DistError as error:
        raise ended(None, error, what) from error
    except RuntimeError as error:
        if not _broken(error):
            raise
        raise ended(None, error, what) from error


@contextmanager
def ending_compiled() -> Iterator[None]:
    """Within, a compiled program that raises, or waits in vain, becomes an error that says so; and the others hear."""
    try:
        yield
    except Exception as error:
        broken = isinstance(error, RuntimeError) and _broken(error)
        raise ended(None, error, "a collective of the compiled program" if broken else "") from error


def ended(node: fx.Node | None, error: Exception, what: str = "") -> Error:
    """Tell the others how this rank's program ended, and leave; gives the error to raise here."""
    rank, generation = dist.get_rank(), _left
    if is_dry_run():
        return failed(rank, node, error)
    waits = bool(what) or (node is not None and _communicates(node) and isinstance(error, RuntimeError))
    collective = f"{place(rank, None)}; {what}" if what else place(rank, node)
    if not waits:
        made = failed(rank, node, error)
        tell({"failed": str(made)})
        leave_groups()
        return made
    tell({"waits": collective})
    leave_groups()
    words, store = _listen(rank, generation)
    return _lost(collective, _waiting_in(node, what), error, words, store)


def _lost(collective: str, name: str, error: Exception, words: Mapping[int, Any], store: bool) -> Error:
    silent = [r for r in range(dist.get_world_size()) if r != dist.get_rank() and r not in words]
    failures = [f"rank {r}: {text}" for r, word in sorted(words.items()) if (text := word.get("failed"))]
    gone = [f"rank {r} has ended: {word['left']}" for r, word in sorted(words.items()) if "left" in word]
    waits = [f"waits too: {word['waits']}" for _, word in sorted(words.items()) if "waits" in word]
    lines = [f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300]}"]
    lines += [line for text in [*failures, *gone] for line in text.splitlines()]
    if not store:
        lines.append("the job's store does not answer: the process that kept it (rank 0, without torchrun) has ended")
    elif silent:
        ranks = f"rank{'s' * (len(silent) > 1)} {', '.join(map(str, silent))}"
        lines.append(f"no word within {WAIT:g} s from {ranks}: stuck, killed, or gone from the job")
    how = "failed" if failures else "ended" if gone else ""
    timed_out = "time" in lines[0].lower() and "out" in lines[0].lower()
    return Error(
        f"a rank {how} while others waited for it in {name}" if how else f"a rank is missing in {name}",
        where=collective,
        expected="every rank of the group in this collective"
        + (", before the process group's time-out" if timed_out else ""),
        got=f"\n  {'':<10}".join(lines + waits[:3]),
        remedy="see the output of the ranks that are named; start the job again from its last checkpoint",
    )


def _waiting_in(node: fx.Node | None, what: str) -> str:
    """The collective that a node waits for."""
    if node is None:
        return what
    row = row_of(node.target)
    started = node.args[0] if row is not None and row.name == "c10d.wait_tensor" else node
    return target_name(started) if isinstance(started, fx.Node) else target_name(node)


def _broken(error: RuntimeError) -> bool:
    """Whether gloo lost a peer, or waited too long: it raises no type of its own."""
    text = str(error).lower()
    return "gloo" in text or "connection" in text or "timed out" in text


def finish_together() -> None:
    """Return once all ranks have come to the end of this step; raise if one of them failed in it.

    A rank may need nothing more from one that failed, and come to its end all the same.
    """
    global _finished
    if is_dry_run():
        return
    _finished += 1
    rank, generation, done = dist.get_rank(), _left, f"shardfx/done/{_finished}/"
    store = dist.distributed_c10d._get_default_store()
    store.set(f"{done}{rank}", "")
    missing = set(range(dist.get_world_size())) - {rank}
    until = time.monotonic() + group_timeout()
    while missing and time.monotonic() < until:
        failed_ones = [other for other in missing if store.check([_key(other, generation)])]
        if failed_ones:
            break
        missing = {other for other in missing if not store.check([f"{done}{other}"])}
        time.sleep(0.005)
    if missing:
        what = "the end of the step"
        raise ended(None, TimeoutError(f"ranks {sorted(missing)} have not come to the end of this step"), what)


# ---- telling one another

_left = _finished = 0
"""How often this process has left its groups, and how many watched steps it has finished: all ranks that end together
agree on both."""


def _key(rank: int, generation: int) -> str:
    return f"shardfx/ended/{generation}/{rank}"


def tell(word: Mapping[str, str]) -> None:
    """Tell the others how this rank ends: what ``failed``, in what it ``waits``, or why it has ``left``."""
    global _left
    _left += 1
    with suppress(RuntimeError):  # the store is gone with the process that kept it
        dist.distributed_c10d._get_default_store().set(_key(dist.get_rank(), _left - 1), json.dumps(word))


def say_waiting(which: int) -> None:
    """Say that this rank waits at the start of its call of this number."""
    with suppress(RuntimeError):
        dist.distributed_c10d._get_default_store().set(f"shardfx/waits/{_left}/{which}/{dist.get_rank()}", "")


def not_waiting(which: int) -> list[int]:
    """The ranks that have not said so."""
    others = [r for r in range(dist.get_world_size()) if r != dist.get_rank()]
    try:
        store = dist.distributed_c10d._get_default_store()
        return [r for r in others if not store.check([f"shardfx/waits/{_left}/{which}/{r}"])]
    except RuntimeError:
        return others


def _listen(rank: int, generation: int) -> tuple[dict[int, Any], bool]:
    """What the other ranks have told, by rank; and whether the store answers."""
    words: dict[int, Any] = {}
    until = time.monotonic() + WAIT
    others = [r for r in range(dist.get_world_size()) if r != rank]
    try:
        store = dist.distributed_c10d._get_default_store()
        while len(words) < len(others) and time.monotonic() < until:
            for other in others:
                if other not in words and store.check([_key(other, generation)]):
                    words[other] = json.loads(store.get(_key(other, generation)))
            time.sleep(0.02)
    except RuntimeError:
        return words, False
    return words, True
