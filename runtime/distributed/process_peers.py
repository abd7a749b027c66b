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

Where digests differ, ranks exchange what they stand for, and all raise the same error; nothing was run.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.text import print_graph
from shardfx.runtime.peers import (
    AROUND,
    Agreed,
    OtherSurroundings,
    Passed,
    Peers,
    RankInput,
    RankInputs,
    Subjects,
    Words,
)
from shardfx.runtime.store import Store

from .checksum import checksum
from .groups import make_cpu_group, make_groups
from .peer_failure import ending_together, exchange, tell_all
from .process_store import ProcessStore

T = TypeVar("T")
c10d = torch.ops._c10d_functional
log = logging.getLogger("shardfx")
FAILED = max(Passed) + 1
"""In the place of how inputs are passed: this rank cannot make the call."""
NO_DRAW = -1
SHOWN = 4
START, PLANNING = "the start of a call", "parallelize(...), or planning a new specialization"
WRITTEN, DONE = "parameters were written into since the last call", "done since the last call"
_numbers = itertools.count()
_lock = threading.RLock()
_refused: list[str] = []
"""What this rank is to tell the others at its next call."""
_stores: WeakSet[ProcessStore] = WeakSet()


class ProcessPeers(Peers):
    """The other processes of a job, for one parallel module, or one that is yet to be planned."""

    def __init__(self) -> None:
        with ending_together("making the group of all ranks"):
            make_cpu_group()
        self.number: object = "yet to be planned"
        self._copies = itertools.count(1)
        self._store: ProcessStore | None = None
        self._agreed = self._together = False
        """Whether ranks were told of this call, and all make it."""
        self._writes: int | None = None
        """The count of writes into parameters when the last call was over."""
        self._digests: dict[Hashable, int] = {}
        self._seen: Counter[Hashable] = Counter()

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessPeers:
        made = ProcessPeers()
        made.number = f"{self.number} copy {next(self._copies)}"
        return made

    def holds(self, store: Store) -> None:
        """Note the store; steps of optimizers of its parameters are noted from now on."""
        assert isinstance(store, ProcessStore)
        self._store = store
        _stores.add(store)

    @contextmanager
    def calling(self) -> Iterator[None]:
        """The scope of a call; those of other threads follow."""
        with _lock:
            self._agreed = self._together = False
            try:
                yield
            except Exception as error:
                if not self._agreed:
                    self._refuse(error)
                raise
            finally:
                if self._together and self._store is not None:
                    self._writes = self._store.writes()

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        rates: Mapping[str, torch.Tensor] | None = None,
        anew: bool = False,
    ) -> Agreed:
        """Exchange the digest of a call, of the history, and a number that is drawn."""
        if key not in self._digests:
            self._digests[key] = digest(f"{self.number} {sorted(words().items())}")
        said = {name: f"{rate.tolist()}" for name, rate in (rates or {}).items() if rate.device.type == "cpu"}
        history = {} if anew else self._history()
        also = digest(f"{history} {said}") if history or said else 0
        rows = self._exchange(self._digests[key], passed, also, NO_DRAW if draw is None else draw)
        ways = {row[1] for row in rows} - {Passed.EITHER}
        if len({row[0] for row in rows}) > 1 or len(ways) > 1:
            how = {} if passed is Passed.EITHER else {"inputs": ("the global batch", "this rank's own part")[passed]}
            raise other_calls(tell_all({"module": f"parallel module {self.number}", **words(), **how}))
        if len({row[2] for row in rows}) > 1:
            every = tell_all(said)
            if _differ(every):
                raise other_calls(every)
            if self._store is not None and self._store.is_staged:  # steps are not counted, so this remains
                self._store.history[f"the others did not do the same as rank {dist.get_rank()}"] = 1
            raise drifted(tell_all({WRITTEN: "0 times", DONE: "nothing", **history}))
        self._seen[key] += 1
        self._together = True
        if self._store is not None:
            self._store.forget_history()
        drawn = rows[0][3]
        return Agreed(Passed.PART in ways, None if drawn == NO_DRAW else drawn)

    def _history(self) -> dict[str, str]:
        """What was done to parameters since the last call."""
        if self._store is None:
            return {}
        done = self._store.history
        written = 0 if self._writes is None or self._store.is_loaded_anew else self._store.writes() - self._writes
        text = "; ".join(f"{what}, {times} times" if times > 1 else what for what, times in done.items())
        return {WRITTEN: f"{written} times", DONE: text or "nothing"} if written or done else {}

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """Make a plan, and compare its digest."""
        try:
            made = make()
            lines = subjects(made)
        except Exception as error:
            self._refuse(error)
            raise
        mine = digest(str({name: [*map(_compared, each)] for name, each in lines.items()}))
        rows = self._exchange(digest(f"a plan of {self.number}"), Passed.EITHER, mine, next(_numbers))
        if len({row[0] for row in rows}) > 1:
            raise other_calls(tell_all({"runs": PLANNING, "module": f"parallel module {self.number}"}))
        if len({row[2] for row in rows}) > 1:
            raise other_plans(tell_all(lines))
        if self._store is None:
            self.number = rows[0][3]
        self._together = True
        return made

    def compare(self, key: Hashable, inputs: RankInputs, always: bool = False) -> None:
        if not (always or self._seen[key] & (self._seen[key] - 1) == 0) or not (given := inputs()):
            return
        mine = [number for each in given for number in (each.shard, checksum(each.tensor))]
        rows = exchange(mine, "comparing inputs")
        for i, each in enumerate(given):
            sides: dict[int, dict[int, list[int]]] = {}
            for rank, row in enumerate(rows):
                sides.setdefault(row[2 * i], {}).setdefault(row[2 * i + 1], []).append(rank)
            for found in sides.values():
                if len(found) > 1:
                    raise other_inputs(each, [*found.values()])

    def firsts(self, mesh: Mesh, inputs: RankInputs) -> Mapping[str, torch.Tensor]:
        given = [each for each in inputs() if mesh.extent(each.axes) > 1]
        make_groups(mesh, sorted({each.axes for each in given}))
        found = {}
        for each in given:
            assert self._store is not None
            sent = each.tensor.detach().to(self._store.device, copy=True, memory_format=torch.contiguous_format)
            with ending_together(f"the broadcast of {each.name!r}"):
                group = mesh.group_name(dist.get_rank(), each.axes)
                found[each.name] = c10d.wait_tensor.default(c10d.broadcast.default(sent, 0, group))
        return found

    def _exchange(self, key: int, passed: Passed, also: int, draw: int) -> list[list[int]]:
        """Exchange the numbers of a call.

        Raises:
            Error: a rank failed before this call.
        """
        self._agreed = True
        failed = "\n".join(_refused)
        _refused.clear()
        way = FAILED if failed else int(passed)
        rows = exchange([key, way, also, draw], START if key else "telling that a call failed")
        if any(row[1] == FAILED for row in rows):
            every = tell_all(failed)
            lines = [line for rank, text in enumerate(every) if text for line in f"rank {rank}: {text}".splitlines()]
            raise Error(
                CALL_FAILED,
                where=f"rank {dist.get_rank()}; the start of a call",
                expected="every rank to make this call",
                got=_joined(lines),
                remedy="fix it there; nothing was run, and all ranks can go on",
            )
        return rows

    def _refuse(self, error: Exception) -> None:
        """Tell the other ranks, which then raise, that this rank's call failed before it began."""
        _refused.append(str(error) if isinstance(error, Error) else f"{type(error).__name__}: {error}")
        try:
            self._exchange(0, Passed.EITHER, 0, NO_DRAW)
        except Error as told:
            if told.what != CALL_FAILED:
                log.warning("the other ranks do not hear that a call failed here: %s", told)


def _note_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Note a step of an optimizer in the history of each store whose parameters it updates."""
    for store in _stores:
        mine = store.stepped_by_all()
        groups = [g for g in optimizer.param_groups if any(id(p) in mine for p in g["params"])]
        if groups and store.is_staged:  # of other parameters each, perhaps not as often
            store.history["an optimizer stepped"] = 1
        elif groups:
            settings = dict.fromkeys(map(_settings, groups))
            store.history[f"{type(optimizer).__name__} stepped with " + ", and with ".join(settings)] += 1


register_optimizer_step_post_hook(_note_step)


def _settings(group: Mapping[str, Any]) -> str:
    """The options of a group of parameters that are switched on."""
    plain, found = (bool, int, float, str), []
    for name, value in group.items():
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
            value = value.item()
        each = value if isinstance(value, tuple) else (value,)
        if value is not False and all(isinstance(number, plain) for number in each):
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


def other_calls(every: Sequence[Mapping[str, str]]) -> Error:
    """Ranks make other calls."""
    differ = _differ(every)
    kind = OtherSurroundings if differ == [AROUND] else Error
    return kind(
        "the ranks do not make the same call",
        where=f"rank {dist.get_rank()}; pm(...)",
        expected="the same call on all ranks: training or evaluation, mode, shapes, numbers, rates of the optimizer",
        got=sides(every, differ),
        remedy="call a parallel module on all ranks alike, also to evaluate, to save, and for an epoch's last batch; "
        "ranks that pass their own parts pad them to one length; nothing was run, and all ranks can go on",
    )


def drifted(every: Sequence[Mapping[str, str]]) -> Error:
    """Ranks did something else before a call."""
    return Error(
        "the ranks' parameters are no longer the same",
        where=f"rank {dist.get_rank()}; before pm(...)",
        expected="the same done to parameters by all ranks: backwards, optimizers' steps at the same rates, writes",
        got=sides(every, _differ(every)),
        remedy="let all ranks do the same between calls; pm.load_full_state_dict(...), or a checkpoint that all load, "
        "makes them the same again, and until then this is raised",
    )


def _differ(every: Sequence[Mapping[str, str]]) -> list[str]:
    """The subjects in which ranks differ."""
    of_any = dict.fromkeys(subject for words in every for subject in words)
    return [subject for subject in of_any if len({words.get(subject) for words in every}) > 1]


def other_plans(every: Sequence[Subjects]) -> Error:
    """Ranks made other plans: the first line that differs."""
    rows = ((n, row) for n in every[0] for row in itertools.zip_longest(*(e[n] for e in every), fillvalue="no more"))
    subject, first = next((name, row) for name, row in rows if len({*map(_compared, row)}) > 1)
    return Error(
        "the ranks have made different plans",
        where=f"rank {dist.get_rank()}; parallelize(...), or a call that needs a new specialization",
        expected="the same model, loss, mesh, hints and shapes of example inputs on all ranks",
        got=sides([{subject: " ".join(line.split())} for line in first], [subject]),
        remedy="let nothing in the model, its loss or the hints depend on the rank; examples are of the global batch; "
        "and make a model on meta there, with torch.device('meta'), for one that is moved loses its ties",
    )


def other_inputs(given: RankInput, alike: Sequence[Sequence[int]]) -> Error:
    """An input that should be the same on several ranks, and is not."""
    full, part = given.whole, given.part
    return Error(
        "ranks pass different batches as the same one",
        where=f"pm(...), {given.name!r}",
        expected=f"the global batch {full}, the same on all ranks" if given.shard < 0 else f"the same part {part}",
        got="contents differ between " + " and ".join(named(ranks) for ranks in alike[:SHOWN]),
        remedy="ranks that work on the same part of the batch pass the same: let samplers depend on the data axes alone"
        if given.shard >= 0 or part == full
        else f"pass the same batch on all ranks, or each rank its own part of it, {part}; where each has a batch of "
        f"{full} of its own, as with DDP, parallelize with example inputs of all ranks' rows together",
    )


def sides(every: Sequence[Mapping[str, str]], differ: Sequence[str]) -> str:
    """The subjects in which ranks differ, each side once."""
    found: dict[str, list[int]] = {}
    for rank, words in enumerate(every):
        text = "; ".join(f"{subject}: {words.get(subject, 'no')}" for subject in differ[:SHOWN])
        found.setdefault(text, []).append(rank)
    return _joined([f"{named(ranks)}: {text}" for text, ranks in found.items()][:SHOWN])


def named(ranks: Sequence[int]) -> str:
    """``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _joined(lines: Sequence[str]) -> str:
    return f"\n  {'':<10}".join(lines)
