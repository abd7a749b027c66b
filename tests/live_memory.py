"""What the programs of an engine's ranks really hold while they run: storages that are there, looked at op by op.

Whoever holds a storage, it counts: a variable of the program, the engine's pool, a collective under way. Engines keep
memory between steps, so that the second step is looked at.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.ir.cost.footprint import STEPS, Footprint
from shardfx.ir.cost.replay import group_of, replay
from shardfx.ir.graph import Input
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.pools.pool_ops import pool_of_row
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.distributed.shm import open_groups
from shardfx.runtime.engine import Engine
from tests.zoo import Case


@dataclass
class Held:
    """What a rank holds behind each call and during it, by the call's name, and ``beside`` the device then; its inputs
    are not counted."""

    behind: dict[str, int] = field(default_factory=dict)
    during: dict[str, int] = field(default_factory=dict)
    beside: dict[str, int] = field(default_factory=dict)

    @property
    def peak(self) -> int:
        """At most."""
        return max(self.during.values())

    @staticmethod
    def least(steps: Sequence[Held]) -> Held:
        """Of several steps of one program: a thread that ends later now and then does not count."""
        names = steps[0].behind
        return Held(
            {name: min(step.behind[name] for step in steps) for name in names},
            {name: min(step.during[name] for step in steps) for name in names},
            {name: min(step.beside[name] for step in steps) for name in names},
        )


Storages = dict[int, tuple[StorageWeakRef, int]]
"""By their address, which is taken as long as there is a weak reference."""


class LiveMemory(TorchDispatchMode):
    """A watch of an engine, which must run within it.

    Args:
        alone: the process is one rank: whatever is there is its own. Else memory belongs to the rank whose program
            shows it first, and what virtual collectives take for all their ranks is nobody's.
    """

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.alone = alone
        self.steps: dict[int, list[Held]] = {}
        self._owned: dict[int, Storages] = {}
        self._beside: dict[int, Storages] = {}
        self._given: Storages = {}
        self._stored: set[int] = set()
        """Inputs that lie beside the device."""
        self._fresh: Storages = {}
        self._inside = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out, own = func(*args, **(kwargs or {})), transport()
        self._fresh = {key: each for key, each in self._fresh.items() if key not in own}
        self._fresh.update((key, each) for key, each in storages(out) if not (key in own or self._known(key)))
        self._inside = max(self._inside, alive(self._fresh))
        return out

    def watch(self, rank: int) -> RankLiveMemory:
        """One for each rank and step."""
        self.steps.setdefault(rank, []).append(Held())
        self._owned.setdefault(rank, {})
        self._beside.setdefault(rank, {})
        return RankLiveMemory(self, rank)

    def take(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Inputs."""
        for given, tensor in zip(inputs, tensors, strict=True):
            if given.pool:
                self._stored.update(key for key, _ in storages(tensor))
        self._given.update(storages(list(tensors)))
        for key in self._given:
            self._fresh.pop(key, None)
        self._inside = 0

    def see(self, rank: int, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """A call is done."""
        held, owned, beside = self.steps[rank][-1], self._owned[rank], self._beside[rank]
        row = row_of(node.target)
        if self.alone and node.target is torch.ops._c10d_functional.wait_tensor.default:
            time.sleep(0.001)  # the thread that did it holds it a moment longer
        before, own = alive(owned), transport()
        shown = {key: each for key, each in self._fresh.items() if key not in own}
        shown = shown if self.alone else dict(storages(result))
        there = any(key in beside or key in self._stored for key, _ in storages(operands))
        if pool_of_row(row, there):
            beside.update((key, each) for key, each in shown.items() if key not in self._given)
            shown, self._inside = {}, 0
        made = {key: each for key, each in shown.items() if not (key in self._given or key in owned or key in beside)}
        owned.update(made)
        there, inside = before + alive(made), self._inside if self.alone or group_of(node) is None else 0
        for found, nbytes in (
            (held.behind, there),
            (held.beside, alive(beside)),
            (held.during, max(there, before + inside)),
        ):
            found[node.name] = max(found.get(node.name, 0), nbytes)  # of all iterations
        self._fresh, self._inside = {}, 0

    def _known(self, key: int) -> bool:
        every = (*self._owned.values(), *self._beside.values())
        return key in self._given or any(key in owned for owned in every)


def transport() -> set[int]:
    """What carries collectives, whose buffers belong to no program, as gloo's do not."""
    return {each.untyped_storage()._cdata for group in open_groups for each in group.memory}


@dataclass(frozen=True)
class RankLiveMemory:
    """Looks at one rank."""

    memory: LiveMemory
    rank: int

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """What goes in."""
        self.memory.take(inputs, tensors)

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """What a call made."""
        self.memory.see(self.rank, node, result, operands)


def storages(nest: Any) -> Iterator[tuple[int, tuple[StorageWeakRef, int]]]:
    """Those of the tensors in a nest."""
    for tensor in tree_leaves(nest):
        if isinstance(tensor, Tensor):
            storage = tensor.untyped_storage()
            yield storage._cdata, (StorageWeakRef(storage), storage.nbytes())


def alive(found: Storages) -> int:
    """The bytes of those that somebody holds; the others are forgotten."""
    for key in [key for key, (storage, _) in found.items() if storage.expired()]:
        del found[key]
    return sum(nbytes for _, nbytes in found.values())


class Measured:
    """An engine whose ranks are looked at."""

    def __init__(self, engine: Engine, alone: bool) -> None:
        self.engine, self.device, self.seed = engine, engine.device, engine.seed
        self.memory = LiveMemory(alone)

    def run(
        self, programs: Mapping[int, RankProgram], inputs: Mapping[int, Sequence[Tensor]], watch: Any = None
    ) -> Mapping[int, Sequence[Tensor]]:
        """Run the engine."""
        with self.memory:
            return self.engine.run(programs, inputs, self.memory)


def held_in_a_step(pm: sx.ParallelModule, case: Case, run: Callable[..., object] | None = None) -> dict[int, Held]:
    """What the ranks of this process hold in a step, when memory that is kept is there."""
    step, make = pm._programs.step, pm._programs.step.make_engine
    step.renew(lambda: Measured(make(), len(step.ranks) == 1))
    engine = step.engine
    assert isinstance(engine, Measured)
    settled = STEPS - 1  # until then memory is kept that no later step asks for
    for _ in range(settled + (3 if engine.memory.alone else 1)):
        (run or pm)(*case.args, *case.targets, **case.kwargs)
    step.renew(make)
    return {rank: Held.least(steps[settled:]) for rank, steps in engine.memory.steps.items()}


def check_footprint(program: RankProgram, held: Held, *, exact: bool = True, ahead: int = 0) -> Footprint:
    """The footprint of a program is what its rank held, call by call, to the byte; and at most, within a percent.

    Not ``exact``: a call may hold more for a moment, as threads do.
    """
    found = replay(program, ahead)
    for call, predicted, beside in zip(found.calls, found.live, found.beside, strict=True):
        real = held.behind[call.name]
        assert held.beside[call.name] == beside, (call.name, beside, held.beside[call.name])
        assert real == predicted or (real > predicted and not exact), (call.name, predicted, real)
    assert abs(found.peak.nbytes / held.peak - 1) < 0.01, (found.peak.nbytes, held.peak)
    return found
