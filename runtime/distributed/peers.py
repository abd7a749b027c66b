"""Agreement of real ranks: digests of plans and calls, exchanged among CPU ranks before anything runs.

    rank 0                                rank 1
    a training step, [8, 6]               a loss without gradients, [8, 6]     -> both raise, with both sides
    [digest, passing, history, draw]      [digest, passing, history, draw]     one all-gather for each call

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
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.text import print_graph
from shardfx.runtime.store import Store

from .checksum import checksum
from .groups import make_cpu_group, make_groups
from .peer_failure import ending_together, exchange, tell_all
from .process_store import DONE, WRITTEN, ProcessStore

T = TypeVar("T")
c10d = torch.ops._c10d_functional
log = logging.getLogger("shardfx")
NO_DRAW = -1
SHOWN = 4
START, PLANNING = "the start of a call", "parallelize(...), or planning a new specialization"
_numbers = itertools.count()
_lock = threading.RLock()
_stores: WeakSet[ProcessStore] = WeakSet()


Words = Callable[[], Mapping[str, str]]
"""A function that describes a rank's next call, by subject; called only where ranks differ."""
Subjects = Mapping[str, Sequence[str]]
"""The lines of a plan's description, by subject."""
AROUND = "what the code reads beside its inputs"


class OtherSurroundings(Error):
    """Ranks make the same call, but the values that their code reads beside its inputs have changed on some."""


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


FAILED = max(Passed) + 1
"""Sent in place of :class:`Passed`: this rank cannot make the call."""


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
        draw: int | None = None,
        rates: Mapping[str, torch.Tensor] | None = None,
        anew: bool = False,
    ) -> tuple[bool, int | None]:
        """Check that all ranks make the same call, of which ``key`` is the local and ``words`` the common description.
        Returns whether inputs are passed as shards, and the number that rank 0 drew.

        Args:
            passed: how this rank's inputs are passed.
            draw: a number that this rank drew, where all ranks need the same one.
            rates: numbers of the optimizer, the same on all ranks.
            anew: all that is stored is loaded, so that earlier differences do not matter.

        Raises:
            OtherSurroundings: on all ranks, if they differ in :data:`AROUND` alone.
            Error: they differ; a rank did something else to its parameters since the last call; or a rank failed
                before it came here.
        """
        if self._alone:
            return passed is Passed.PART, draw
        if key not in self._digests:
            self._digests[key] = digest(f"{self.number} {sorted(words().items())}")
        said = {name: f"{rate.tolist()}" for name, rate in (rates or {}).items() if rate.device.type == "cpu"}
        done = {} if anew or self._store is None else self._store.done()
        also = digest(f"{said} {done}") if said or done else 0
        rows = self._exchange(self._digests[key], passed, also, NO_DRAW if draw is None else draw)
        ways = {row[1] for row in rows} - {Passed.EITHER}
        if len({(row[0], row[2]) for row in rows}) > 1 or len(ways) > 1:
            how = {} if passed is Passed.EITHER else {"inputs": ("the global batch", "this rank's own part")[passed]}
            raise self._other_calls({**words(), **how, **said, **done})
        self._seen[key] += 1
        self._together = True
        drawn = rows[0][3]
        return Passed.PART in ways, None if drawn == NO_DRAW else drawn

    def _other_calls(self, mine: Mapping[str, str]) -> Error:
        """The error of ranks whose calls differ, or whose parameters were treated differently before this one."""
        every = tell_all({**mine, "module": f"parallel module {self.number}"})
        if not {*_differ(every)} <= {WRITTEN, DONE}:
            return disagreement(
                "the ranks do not make the same call",
                "pm(...)",
                "the same call on all ranks: training or evaluation, mode, shapes, numbers, rates of the optimizer",
                every,
                "call a parallel module on all ranks alike, also to evaluate, to save, and for an epoch's last batch; "
                "ranks that pass their own parts pad them to one length; nothing was run, and all ranks can go on",
                OtherSurroundings if _differ(every) == [AROUND] else Error,
            )
        if self._store is not None and self._store.is_staged:  # steps are not counted, so this remains
            self._store.history[f"the others did not do the same as rank {dist.get_rank()}"] = 1
        return disagreement(
            "the ranks' parameters are no longer the same",
            "before pm(...)",
            "the same done to parameters by all ranks: backwards, optimizers' steps at the same rates, writes",
            every,
            "let all ranks do the same between calls; pm.load_full_state_dict(...), or a checkpoint that all load, "
            "makes them the same again, and until then this is raised",
        )

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """Make a plan, and check that all ranks made the same one."""
        if self._alone:
            return make()
        self._agreed = False
        made = make()
        lines = subjects(made)
        mine = digest(str({name: [*map(_compared, each)] for name, each in lines.items()}))
        rows = self._exchange(digest(f"a plan of {self.number}"), Passed.EITHER, mine, next(_numbers))
        if len({row[0] for row in rows}) > 1:
            raise self._other_calls({"runs": PLANNING})
        if len({row[2] for row in rows}) > 1:
            raise disagreement(
                "the ranks have made different plans",
                "parallelize(...), or a call that needs a new specialization",
                "the same model, loss, mesh, hints and shapes of example inputs on all ranks",
                _first_difference(tell_all(lines)),
                "let nothing in the model, its loss or the hints depend on the rank; examples are of the global batch; "
                "and make a model on meta there, with torch.device('meta'), for one that is moved loses its ties",
            )
        if self._store is None:
            self.number = rows[0][3]
        self._together = True
        return made

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
                full, part = each.whole, each.part
                raise disagreement(
                    "ranks pass different batches as the same one",
                    f"pm(...), {each.name!r}",
                    f"the global batch {full}, the same on all ranks" if each.shard < 0 else f"the same part {part}",
                    [{"content": f"{content} of shard {n}" if n >= 0 else content} for n, content in shards],
                    "ranks that work on the same part of the batch pass the same, so samplers depend on the data axes "
                    f"alone; or each rank passes its own part of the global batch, {part}; where each has a batch of "
                    f"{full} of its own, as with DDP, parallelize with example inputs of all ranks' rows together",
                )

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

    def _exchange(self, key: int, passed: int, also: int, draw: int, failed: str = "") -> list[list[int]]:
        """Exchange the numbers of a call, or tell the other ranks, which then raise, that it ``failed`` here before it
        began.

        Raises:
            Error: a rank failed before this call.
        """
        self._agreed = True
        rows = exchange([key, passed, also, draw], "telling that a call failed" if failed else START)
        if any(row[1] == FAILED for row in rows):
            told = [f"rank {rank}: {text}" for rank, text in enumerate(tell_all(failed)) if text]
            raise Error(
                CALL_FAILED,
                where=f"rank {dist.get_rank()}; the start of a call",
                expected="every rank to make this call",
                got=_joined([line for text in told for line in text.splitlines()]),
                remedy="fix it there; nothing was run, and all ranks can go on",
            )
        return rows

    def _refuse(self, error: Exception) -> None:
        """Tell the other ranks that this rank's call failed before it began."""
        try:
            self._exchange(0, FAILED, 0, NO_DRAW, str(error) if isinstance(error, Error) else repr(error))
        except Error as told:
            if told.what != CALL_FAILED:
                log.warning("the other ranks do not hear that a call failed here: %s", told)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note a step of an optimizer in the history of each store whose parameters it updates."""
    for store in _stores:
        mine = {id(shard) for shards in store.parameters.values() for shard in shards}
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
    found = []
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        each = value if isinstance(value, tuple) else (value,)
        if value is not False and all(isinstance(number, (int, float, str)) for number in each):
            found.append(f"{name} {value!r}")
    return ", ".join(found)


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

CALL_FAILED = "a call failed on another rank"


def disagreement(
    what: str, where: str, expected: str, every: Sequence[Mapping[str, str]], remedy: str, kind: type[Error] = Error
) -> Error:
    """The error of ranks that differ: the subjects in which they do, each side once."""
    differ, found = _differ(every)[:SHOWN], dict[str, list[int]]()
    for rank, words in enumerate(every):
        text = "; ".join(f"{subject}: {words.get(subject, 'nothing')}" for subject in differ)
        found.setdefault(text, []).append(rank)
    got = [f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {text}" for text, ranks in found.items()]
    return kind(
        what, where=f"rank {dist.get_rank()}; {where}", expected=expected, got=_joined(got[:SHOWN]), remedy=remedy
    )


def _differ(every: Sequence[Mapping[str, str]]) -> list[str]:
    """The subjects in which ranks differ."""
    of_any = dict.fromkeys(subject for words in every for subject in words)
    return [subject for subject in of_any if len({words.get(subject) for words in every}) > 1]


def _first_difference(every: Sequence[Subjects]) -> list[dict[str, str]]:
    """The first line in which plans differ, by its subject."""
    rows = ((n, row) for n in every[0] for row in itertools.zip_longest(*(e[n] for e in every), fillvalue="no more"))
    subject, first = next((name, row) for name, row in rows if len({*map(_compared, row)}) > 1)
    return [{subject: " ".join(line.split())} for line in first]


def _joined(lines: Sequence[str]) -> str:
    return f"\n  {'':<10}".join(lines)
