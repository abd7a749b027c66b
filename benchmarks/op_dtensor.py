"""DTensor's support of an op instance: the placements that it takes as they are, and whether its results are right.

On a mesh of one axis each operand is sharded along one dim, a partial sum, or replicated. DTensor *accepts* that if its
sharding propagator asks for no other placement of an operand. What it accepts is executed by DTensor's own dispatch, on
all ranks in one process (``LocalTensorMode``), and compared with the op on one device.
"""

from __future__ import annotations

import itertools
import random
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from shardfx.ir.oracle.instance import Instance, bind
from shardfx.ir.oracle.recombine import magnitude, rounding, same, split_sum
from shardfx.ir.oracle.sharding_search import Choice
from shardfx.ir.oracle.soundness import UNDEFINED

PRIMES = (2, 3, 5, 7, 11, 13)
SECONDS = 3
"""For one question to its sharding propagator, which tries products of all placements where it decomposes an op: an op
for which it takes longer is not asked about again."""
OTHERS = 8
"""How many placements that are not right are shown to DTensor as well, by instance and kind."""


@dataclass
class Answers:
    """What DTensor did with the placements of an instance."""

    shardings: int = 0
    """Right shardings that it accepts, and executes rightly."""
    sums: int = 0
    """The same of partial sums."""
    accepted: int = 0
    """All that it accepts, also of placements that are not right."""
    wrong: tuple[str, ...] = ()
    """What it accepts and gives other values for."""
    raised: tuple[str, ...] = ()
    """What it accepts, and then fails to execute."""
    slow: bool = False
    """Whether it took too long to say."""


def ask(of: Instance, shardings: Iterable[Choice], sums: Iterable[frozenset[int]], *, seed: int = 0) -> Answers:
    """Show DTensor the right shardings and partial sums of an instance, and some that are not."""
    draw = random.Random(seed)
    shardings, sums = list(shardings), list(sums)
    made = Answers()
    wrong, raised = [], []
    options = [[None, *(d for d, s in enumerate(t.shape) if s > 1)] for t in of.tensors]
    every: Iterator[Choice] = (c for c in itertools.product(*options) if any(d is not None for d in c))
    other_shardings = [c for c in itertools.islice(every, 4000) if c not in shardings]
    floats = [i for i, t in enumerate(of.tensors) if t.is_floating_point()]
    other_sums = [g for n in (1, 2) for g in map(frozenset, itertools.combinations(floats, n)) if g not in sums]
    asked: list[tuple[Choice | frozenset[int], bool]] = [(c, True) for c in (*shardings, *sums)]
    for others in (other_shardings, other_sums):
        asked += [(c, False) for c in draw.sample(others, min(OTHERS, len(others)))]
    for placed, right in asked:
        answer = _try(of, placed)
        if answer is None:
            continue
        made.accepted += 1
        if answer == "" and right:
            if isinstance(placed, frozenset):
                made.sums += 1
            else:
                made.shardings += 1
        elif answer:
            words = f"sum of {sorted(placed)}" if isinstance(placed, frozenset) else f"sharded {placed}"
            (wrong if answer == "other values" else raised).append(f"{of!r}: {words}: {answer}")
    made.wrong, made.raised, made.slow = tuple(wrong), tuple(raised), of.node.op in _slow
    return made


def _try(of: Instance, placed: Choice | frozenset[int]) -> str | None:
    """None if it is not accepted, "" if it is executed rightly, else what is wrong."""
    from torch.distributed._local_tensor import LocalTensorMode
    from torch.distributed.tensor import DTensor

    count = _ranks(of, placed)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        _start()
        dispatcher = DTensor._op_dispatcher
        parts = [_parts(t, i, placed, count) for i, t in enumerate(of.tensors)]
        args, kwargs = bind(of.node, [_hold(*each, count) for each in zip(of.tensors, parts, strict=True)])
        try:
            info = dispatcher.unwrap_to_op_info(of.node.op, args, kwargs)
            with _limit(of.node.op):
                dispatcher.sharding_propagator.propagate(info)
            answer = info.output_sharding
            if answer.needs_redistribute and _moves(info.schema, answer.redistribute_schema):
                return None
        except Exception:  # an op that it does not know, or whose shapes it does not take
            return None
        with LocalTensorMode(count):
            args, kwargs = bind(of.node, [_hold(*each, count, True) for each in zip(of.tensors, parts, strict=True)])
            try:
                given = [_whole(each) for each in tree_leaves(of.node.op(*args, **kwargs))]
            except Exception as error:  # whatever it fails on
                return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    if of.node.op.overloadpacket in UNDEFINED:
        return ""
    bound = rounding((*of.tensors, *of.results))
    wholes = [r for r in tree_leaves(of.results) if r is not None]
    given = [g for g in given if g is not None]
    fine = len(wholes) == len(given) and all(
        same(g, w, magnitude([w, *of.tensors]), bound) for g, w in zip(given, wholes, strict=True)
    )
    return "" if fine else "other values"


@contextmanager
def _limit(op: Any) -> Iterator[None]:
    """Raise TimeoutError after SECONDS, and at once for an op for which that happened before."""
    if op in _slow:
        raise TimeoutError

    def stop(*_: Any) -> None:
        _slow.add(op)
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


_slow: set[Any] = set()


def _ranks(of: Instance, placed: Choice | frozenset[int]) -> int:
    """The smallest number of ranks that divides the sharded dims, as DTensor takes some ops only so."""
    if isinstance(placed, frozenset):
        return 2
    common = gcd(*(t.shape[d] for t, d in zip(of.tensors, placed, strict=True) if d is not None))
    return next((p for p in PRIMES if common % p == 0), 2)


def _start() -> None:
    """A process group that only looks like one, as large as the largest mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not dist.is_initialized():
        dist.init_process_group("fake", rank=0, world_size=max(PRIMES), store=FakeStore())


@lru_cache
def _mesh(count: int) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", list(range(count)))


def _parts(tensor: torch.Tensor, i: int, placed: Choice | frozenset[int], count: int) -> tuple[Any, list[torch.Tensor]]:
    """The placement of operand ``i``, and its shards."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    dim = None if isinstance(placed, frozenset) else placed[i]
    if isinstance(placed, frozenset) and i in placed:
        return Partial(), split_sum(tensor, count, torch.Generator().manual_seed(i))
    if dim is None:
        return Replicate(), [tensor.clone() for _ in range(count)]
    parts = [p.contiguous() for p in tensor.chunk(count, dim)]
    return Shard(dim), [*parts, *[tensor.narrow(dim, 0, 0).contiguous()] * (count - len(parts))]


def _hold(whole: torch.Tensor, placed: tuple[Any, list[torch.Tensor]], count: int, every: bool = False) -> Any:
    """A DTensor, of the first rank or (``every``) of all ranks in this process."""
    from torch.distributed._local_tensor import LocalTensor
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    placement, parts = placed
    spec = DTensorSpec(_mesh(count), (placement,), TensorMeta(whole.shape, whole.stride(), whole.dtype))
    local = LocalTensor(dict(enumerate(parts))) if every else parts[0]
    return DTensor(local, spec, requires_grad=False)


def _moves(given: Any, wanted: Any) -> bool:
    """Whether another placement of an operand is asked for."""
    from torch.distributed.tensor._dtensor_spec import DTensorSpec

    def specs(schema: Any) -> list[Any]:
        return [s for s in tree_leaves((schema.args_schema, schema.kwargs_schema)) if isinstance(s, DTensorSpec)]

    pairs = list(zip(specs(given), specs(wanted), strict=False))
    return any(a.placements != b.placements for a, b in pairs)


def _whole(result: Any) -> torch.Tensor | None:
    """The full result, which all ranks must agree on."""
    if result is None:
        return None
    full = result.full_tensor() if hasattr(result, "full_tensor") else result
    first, *rest = getattr(full, "_local_tensors", {0: full}).values()
    return first if all(torch.allclose(first, other, equal_nan=True) for other in rest) else torch.full((), torch.nan)
