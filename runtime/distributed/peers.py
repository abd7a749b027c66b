"""Agreement of real ranks: digests of plans and calls, exchanged among CPU ranks before anything runs.

    rank 0                                rank 1
    a training step, [8, 6]               a loss without gradients, [8, 6]     -> both raise, with both sides
    [digest, passing, history]            [digest, passing, history]           one all-gather for each call

============================================================================  ======================================
the plan: mesh, graph, loss, constants, optimizer                             ``parallelize``, a new specialization
the call: outputs, modes, shapes, dtypes, gradients, how inputs are passed    every call
history: backwards, optimizer steps, writes, loads since the last call        every call
rates of the optimizer                                                        every whole step
inputs that several ranks pass alike, by a checksum                           calls 1, 2, 4, 8, ...; ``check_inputs``
============================================================================  ======================================

Where digests differ, ranks exchange the texts behind them, and all raise the same error; nothing was run.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.text import print_graph
from shardfx.runtime.store import Store, checksum

from .groups import make_cpu_group, make_groups
from .peer_failure import ending_together, exchange, tell_all
from .process_store import DONE, WRITTEN, ProcessStore

T = TypeVar("T")
c10d = torch.ops._c10d_functional
SHOWN = 4
START, PLANNING = "the start of a call", "parallelize(...), or planning a new specialization"
FAILED = "failed before it began"
_numbers = itertools.count()
_lock = threading.RLock()
_stores: WeakSet[ProcessStore] = WeakSet()


Words = Callable[[], Mapping[str, str]]
"""A function that describes a rank's next call, by subject; called only where ranks differ."""
Subjects = Mapping[str, Sequence[str]]
"""The lines of a plan's description, by subject."""


AROUND = "what the code reads beside its inputs"
GUARDS = "guards"


class OtherStates(Error):
    """Ranks make the same call, but what their code reads beside its inputs has changed on some."""


class Passed(IntEnum):
    """How a rank's inputs are passed; ``EITHER``: its own shard has the shape of the global input."""

    WHOLE = 0
    PART = 1
    EITHER = 2


@dataclass(frozen=True)
class RankInput:
    """An input as a rank passes it: the global and the local shape, and the number of its shard; -1 for the global
    input. Ranks that differ along ``axes`` alone pass the same."""

    name: str
    tensor: torch.Tensor
    whole: tuple[int, ...]
    part: tuple[int, ...]
    shard: int
    axes: tuple[str, ...] = ()


RankInputs = Callable[[], Sequence[RankInput]]


class Peers:
    """The peers of this process, for one parallel module, or one yet to be planned; ``alone``: there are none, as all
    ranks are in this process, or it is a dry run."""

    def __init__(self, alone: bool) -> None:
        self._alone, self._lock = alone, threading.RLock() if alone else _lock
        if not alone:
            with ending_together("making the group of all ranks"):
                make_cpu_group()
        self.number: object = "yet to be planned"
        self._copies = itertools.count(1)
        self._store: ProcessStore | None = None
        self._agreed = self._together = False
        """Whether this call was announced to all ranks, and whether all make it."""
        self._digests: dict[Hashable, int] = {}
        self._seen: Counter[Hashable] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> Peers:
        made = Peers(self._alone)
        made.number = f"{self.number} copy {next(self._copies)}"
        return made

    def holds(self, store: Store) -> None:
        """Set the store; from now on, optimizer steps on its parameters are recorded in its history."""
        if isinstance(store, ProcessStore) and not self._alone:
            self._store = store
            _stores.add(store)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The scope of a call; calls of other threads wait. Errors before :meth:`agree` are sent to the other ranks."""
        with self._lock:
            self._agreed = self._together = False
            try:
                yield
            except Exception as error:
                if not (self._agreed or self._alone):
                    self._refuse(error)
                raise
            finally:
                if self._together and self._store is not None:
                    self._store.forget_history()

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        rates: Mapping[str, torch.Tensor] | None = None,
        anew: bool = False,
        beside: Words = dict,
    ) -> bool:
        """Check that all ranks make the same call, of which ``key`` is the local and ``words`` the common description.
        Returns whether inputs are passed as shards.

        Args:
            passed: how this rank's inputs are passed.
            rates: numbers of the optimizer, the same on all ranks.
            anew: all that is stored is loaded, so that earlier differences do not matter.
            beside: what is said beside ``words`` where they differ.

        Raises:
            Error: they differ; a rank did something else to its parameters since the last call; or a rank failed
                before it came here.
        """
        if self._alone:
            return passed is Passed.PART
        if key not in self._digests:
            self._digests[key] = digest(f"{self.number} {sorted(words().items())}")
        said = {name: f"{rate.tolist()}" for name, rate in (rates or {}).items() if rate.device.type == "cpu"}
        done = {} if anew or self._store is None else self._store.done()
        also = digest(f"{said} {done}") if said or done else 0
        how = {} if passed is Passed.EITHER else {"inputs": ("the global batch", "this rank's own part")[passed]}
        mine = [self._digests[key], passed, also, 0]
        rows = self._exchange(mine, lambda: {**words(), **beside(), **how, **said, **done})
        self._seen[key] += 1
        self._together = True
        return any(row[1] == Passed.PART for row in rows)

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """Make a plan, and check that all ranks made the same one."""
        if self._alone:
            return make()
        self._agreed = False
        made = make()
        lines = {f"{name} ({i})": line for name, each in subjects(made).items() for i, line in enumerate(each, 1)}
        same = digest(str([(name, _compared(line)) for name, line in lines.items()]))
        mine = [digest(f"a plan of {self.number}"), Passed.EITHER, same, next(_numbers)]
        rows = self._exchange(mine, lambda: {"runs": PLANNING, **lines})
        if self._store is None:
            self.number = rows[0][3]
        self._together = True
        return made

    def _exchange(self, mine: Sequence[int], words: Words) -> list[list[int]]:
        """Exchange the numbers of a call: digest, way to pass inputs, digest, and a plan's number.

        Raises:
            Error: ranks differ in them, with their ``words``.
        """
        self._agreed = True
        rows = exchange(mine, START)
        ways = {row[1] for row in rows} - {Passed.EITHER}
        if len({(row[0], row[2]) for row in rows}) == 1 and len(ways) <= 1:
            return rows
        every = tell_all({**words(), "module": f"parallel module {self.number}"})
        differ = _differ(every)
        if FAILED in differ:
            raise disagreement(FAILURE, every, [FAILED])
        if "runs" not in differ and every[0]["runs"] == PLANNING:
            raise disagreement(PLANS, every, differ[:1], PLANNING)
        if not {*differ} <= {WRITTEN, DONE}:
            raise disagreement(
                CALLS, every, differ[:SHOWN], kind=OtherStates if {*differ} <= {AROUND, GUARDS} else Error
            )
        if self._store is not None and self._store.is_staged:  # steps are not counted, so this remains
            self._store.history[f"the others did not do the same as rank {dist.get_rank()}"] = 1
        raise disagreement(HISTORIES, every, differ)

    def _refuse(self, error: Exception) -> None:
        """Tell the other ranks, which then raise, that this rank's call failed before it began."""
        text = str(error) if isinstance(error, Error) else repr(error)
        with suppress(Error):  # the other ranks' calls, or that they are gone
            self._exchange([0, Passed.EITHER, 0, 0], lambda: {FAILED: text})

    def compare(self, key: Hashable, inputs: RankInputs, always: bool = False) -> None:
        """Check inputs that should be the same on several ranks by a checksum: on the first, second, fourth, eighth ...
        call of this ``key``, or ``always``."""
        if self._alone or not (always or self._seen[key] & (self._seen[key] - 1) == 0) or not (given := inputs()):
            return
        mine = [number for each in given for number in (each.shard, checksum(each.tensor))]
        rows = exchange(mine, "comparing inputs")
        for i, each in enumerate(given):
            shards = [(row[2 * i], f"{row[2 * i + 1] & 0xFFFFFFFF:08x}") for row in rows]
            if len({*shards}) > len({shard for shard, _ in shards}):
                expected = f"the global batch {each.whole}, or of each rank its own part of it, {each.part}"
                contents = [{"content": content + f" of shard {n}" * (n >= 0)} for n, content in shards]
                raise disagreement(INPUTS, contents, ["content"], f"pm(...), {each.name!r}", expected)

    def firsts(self, mesh: Mesh, inputs: RankInputs) -> Mapping[str, torch.Tensor]:
        """Broadcast inputs that should be the same on several ranks from the first of these; returned by name."""
        given = [each for each in ([] if self._alone else inputs()) if mesh.extent(each.axes) > 1]
        make_groups(mesh, sorted({each.axes for each in given}))
        found = {}
        for each in given:
            assert self._store is not None
            sent = each.tensor.detach().to(self._store.device, copy=True, memory_format=torch.contiguous_format)
            with ending_together(f"the broadcast of {each.name!r}"):
                group = mesh.group_name(dist.get_rank(), each.axes)
                found[each.name] = c10d.wait_tensor.default(c10d.broadcast.default(sent, 0, group))
        return found


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note a step of an optimizer in the history of each store whose parameters it updates."""
    for store in _stores:
        mine = {id(parameter) for parameter in store.parameters.values()}
        groups = [g for g in optimizer.param_groups if any(id(p) in mine for p in g["params"])]
        if not groups or (store.is_staged and not store.all_train):
            continue
        if store.is_staged:  # of other parameters each, perhaps not as often
            store.history["an optimizer stepped"] = 1
        else:
            settings = dict.fromkeys(map(_settings, groups))
            store.history[f"{type(optimizer).__name__} stepped with " + ", and with ".join(settings)] += 1


register_optimizer_step_post_hook(_note_step)


def _settings(group: Mapping[str, Any]) -> str:
    """The enabled options of a parameter group."""
    values = {n: v.tolist() if isinstance(v, torch.Tensor) and v.is_cpu else v for n, v in group.items()}
    shown = {n: v for n, v in values.items() if v is not False and isinstance(v, (int, float, str, tuple))}
    return ", ".join(f"{name} {value!r}" for name, value in shown.items())


def subjects(captured: Graph, planned: Graph, more: Subjects) -> Subjects:
    """The lines of a plan that all ranks must have alike: the captured graph, the planned one, and ``more``."""
    constants = []
    for inp in captured.of_kind(InputKind.CONSTANT):
        if inp.constant is not None:
            known = inp.constant.device.type != "meta"
            content = f"{checksum(inp.constant) & 0xFFFFFFFF:08x}" if known else "unknown"
            constants.append(f"{inp.name} : {inp.value.type}, content {content}")
    return {
        "mesh": [str(planned.mesh)],
        "the model and its loss": print_graph(captured, sources=False).splitlines(),
        "constants": constants,
        **more,
        "the plan": print_graph(planned, sources=False).splitlines(),
    }


def _compared(line: str) -> str:
    """A line of a plan without its source position, which may differ."""
    return line.split("  @ ")[0].rstrip()


def digest(text: str) -> int:
    """The digest of a text, of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


# ---- errors


class Disagreement(NamedTuple):
    """An error of all ranks: what is wrong, and a remedy."""

    what: str
    remedy: str


FAILURE = Disagreement("a call failed on another rank", "fix it there; nothing was run, and all ranks can go on")
CALLS = Disagreement(
    "the ranks do not make the same call",
    "call a parallel module on all ranks alike, also to evaluate, to save, and for an epoch's last batch; ranks that "
    "pass their own parts pad them to one length; nothing was run, and all ranks can go on",
)
HISTORIES = Disagreement(
    "the ranks' parameters are no longer the same",
    "let all ranks do the same between calls: backwards, optimizer steps at the same rates, writes; "
    "pm.load_full_state_dict(...), or a checkpoint that all load, makes them the same again",
)
PLANS = Disagreement(
    "the ranks have made different plans",
    "let nothing in the model, its loss or the hints depend on the rank; examples are of the global batch; and make a "
    "model on meta there, with torch.device('meta'), for one that is moved loses its ties",
)
INPUTS = Disagreement(
    "ranks pass different batches as the same one",
    "samplers depend on the data axes alone; where each rank has a batch of the global shape, as with DDP, parallelize "
    "with example inputs of all ranks' rows together",
)


def disagreement(
    case: Disagreement,
    every: Sequence[Mapping[str, str]],
    differ: Sequence[str],
    where: str = START,
    expected: str = "the same on all ranks",
    kind: type[Error] = Error,
) -> Error:
    """The error of ranks that differ in some subjects: what they say about these, each side once."""
    found: dict[str, list[int]] = {}
    for rank, words in enumerate(every):
        text = "; ".join(f"{subject}: {' '.join(words.get(subject, 'nothing').split())}" for subject in differ)
        found.setdefault(text, []).append(rank)
    sides = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in found.items()]
    where, got = f"rank {dist.get_rank()}; {where}", f"\n  {'':<10}".join(sides[:SHOWN])
    return kind(case.what, where=where, expected=expected, got=got, remedy=case.remedy)


def _differ(every: Sequence[Mapping[str, str]]) -> list[str]:
    """The subjects in which ranks differ."""
    of_any = dict.fromkeys(subject for words in every for subject in words)
    return [subject for subject in of_any if len({_compared(words.get(subject, "")) for words in every}) > 1]
