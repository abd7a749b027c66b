"""Real ranks make a call together: a handshake of a few numbers among CPU ranks, before anything is sent.

    rank 0                          rank 1
    a training step, [8, 6]         a loss without gradients, [8, 6]      -> both raise, with both sides in words
    [digest, how passed, draw]      [digest, how passed, draw]            three numbers from each rank

Beside how inputs are passed goes how often parameters were written into since the last call, where all ranks hold them:
an optimizer that steps on one rank alone leaves them apart.

(:mod:`.handshake`.) The words are sent only where the numbers differ; what ranks pass in is compared by a checksum, on
the first, second, fourth, eighth ... call of each form.
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

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp
from shardfx.runtime.peers import Agreed, Content, Passed, Words

from .checksum import checksum
from .groups import make_cpu_group, make_groups, the_cpu_group
from .handshake import Handshake, is_open, leave_open, named, settle
from .last_words import tell_when_it_ends
from .peer_failure import ending_together

T = TypeVar("T")
c10d = torch.ops._c10d_functional
log = logging.getLogger("shardfx")
SHOWN = 4
FAILED = max(Passed) + 1
"""In the place of how inputs are passed: this rank cannot do what it was to do."""
WAYS = FAILED + 1
"""How many of these there are: what is more says how often parameters were written into."""
NOTHING = 0
"""In the place of a number that a rank drew, which is said as the next one."""
WRITTEN = "parameters were written into since the last call"
_numbers = itertools.count()
_turn = threading.RLock()
_refused: list[str] = []
"""What this rank is to tell the others at its next call."""


class ProcessPeers:
    """The other processes of a job, for one parallel module.

    Args:
        writes: how often parameters were written into that all ranks hold.
    """

    def __init__(self, writes: Callable[[], int] | None = None) -> None:
        self.number = next(_numbers)
        with ending_together("making the group of all ranks"):
            make_cpu_group()
        tell_when_it_ends()
        self._agreed = False
        self._writes = writes or (lambda: 0)
        self._written: int | None = None
        """So often before the last call was over."""
        self._digests: dict[Hashable, int] = {}
        self._seen: Counter[Hashable] = Counter()
        """How often all ranks agreed on something."""

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessPeers:
        return ProcessPeers()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """A call of this thread's; another thread must not be in one."""
        if not _turn.acquire(blocking=False):
            made = Error(
                "two threads call parallel modules at once",
                where=f"rank {dist.get_rank()}; thread {threading.current_thread().name!r}",
                expected="calls one after the other, in the same order on all ranks",
                got="a call while another thread is in one",
                remedy="call parallel modules from one thread",
            )
            _refused.append(str(made))
            raise made
        try:
            self._agreed = False
            try:
                yield
            except Exception as error:
                if not self._agreed:
                    self._refuse(error)
                raise
        finally:
            self._written = self._writes()
            _turn.release()

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        later: bool = False,
    ) -> Agreed:
        """All ranks are about to do the same."""
        self._agreed = True
        if key not in self._digests:
            self._digests[key] = digest(f"{self.number} {sorted(words().items())}")
        failed = "\n".join(_refused)
        _refused.clear()
        drawn = NOTHING if draw is None else draw + 1
        way = FAILED if failed else int(passed)
        written = 0 if self._written is None else self._writes() - self._written
        begun = Handshake([self._digests[key], way + WAYS * written, drawn], "the start of a call")

        def end() -> Sequence[Sequence[int]]:
            rows = begun.rows()
            ways = {row[1] % WAYS for row in rows} - {Passed.EITHER}
            alike = len({(row[0], row[1] // WAYS) for row in rows}) == 1
            if not alike or len(ways) > 1 or FAILED in ways:
                said = {"module": f"parallel module {self.number}", **words(), WRITTEN: f"{written} times"}
                if passed is not Passed.EITHER:
                    said["inputs"] = "the whole of each" if passed is Passed.WHOLE else "this rank's own part"
                raise difference(self._tell_all((failed, said)))
            self._seen[key] += 1
            return rows

        if later and self._seen[key] & (self._seen[key] + 1):  # else inputs are compared before anything is done
            leave_open(end)
            return Agreed(passed is Passed.PART)
        rows = end()
        first = rows[0][2]
        return Agreed(any(row[1] % WAYS == Passed.PART for row in rows), first - 1 if first != NOTHING else None)

    def planned(self, make: Callable[[], T], graph: Callable[[T], Graph]) -> T:
        """What ``make()`` plans; all ranks plan the same."""
        try:
            made = make()
        except Exception as error:
            self._refuse(error)
            raise
        text = plan_text(graph(made))
        words = {"plans": f"{text.count(chr(10)) + 1} inputs and transfers ({digest(text) & 0xFFFFFFFF:08x})"}
        self.agree(("plan", text), lambda: words)
        return made

    def compare(self, key: Hashable, contents: Callable[[], Sequence[Content]], always: bool = False) -> None:
        """Inputs that should be the same on several ranks are."""
        if always:
            settle()
        elif is_open():
            return
        times = self._seen[key]
        if (times & (times - 1) and not always) or not (given := contents()):
            return
        mine = [number for each in given for number in (each.piece, checksum(each.tensor))]
        rows = Handshake(mine, "comparing inputs").rows()
        for i, each in enumerate(given):
            sums: dict[int, dict[int, list[int]]] = {}
            for rank, row in enumerate(rows):
                sums.setdefault(row[2 * i], {}).setdefault(row[2 * i + 1], []).append(rank)
            for alike in sums.values():
                if len(alike) > 1:
                    raise different(each, list(alike.values()))

    def firsts(self, mesh: Mesh, contents: Callable[[], Sequence[Content]]) -> Mapping[str, torch.Tensor]:
        """In the place of inputs that should be the same on several ranks, that of the first of these ranks."""
        settle()
        given = [each for each in contents() if mesh.extent(each.axes) > 1]
        make_groups(mesh, sorted({each.axes for each in given}))
        found = {}
        for each in given:
            sent = each.tensor.detach().clone(memory_format=torch.contiguous_format)
            with ending_together(f"the broadcast of {each.name!r}"):
                group = mesh.group_name(dist.get_rank(), each.axes)
                found[each.name] = c10d.wait_tensor.default(c10d.broadcast.default(sent, 0, group))
        return found

    def _refuse(self, error: Exception) -> None:
        """Tell the others that this rank's call failed before it began; they raise, too."""
        self._agreed = True
        try:
            Handshake([0, FAILED, NOTHING], "telling that a call failed", str(error)).rows()
            self._tell_all((f"{type(error).__name__}: {error}" if not isinstance(error, Error) else str(error), {}))
        except Error as ended:
            log.warning("the other ranks do not hear that a call failed here: %s", ended)

    def _tell_all(self, mine: tuple[str, Mapping[str, str]]) -> list[tuple[str, Mapping[str, str]]]:
        """What every rank says, by rank."""
        every: list[Any] = [None] * dist.get_world_size()
        with ending_together("telling in what the ranks differ"):
            dist.all_gather_object(every, mine, group=the_cpu_group())
        return every


def digest(text: str) -> int:
    """A text as a number of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def plan_text(graph: Graph) -> str:
    """What ranks must have planned alike: inputs, and all that is sent."""
    lines = [f"{n.op} {n.kwargs} {[v.type for v in n.outs]}" for n in graph.nodes if isinstance(n.op, OwnOp)]
    return "\n".join([*lines, *(f"{g.name} {g.value.type} {g.value.spec}" for g in graph.inputs)])


def difference(every: Sequence[tuple[str, Mapping[str, str]]]) -> Error:
    """What ranks say that do not do the same, each side once."""
    failures = [f"rank {rank}: {text}" for rank, (text, _) in enumerate(every) if text]
    if failures:
        lines = [line for text in failures[:SHOWN] for line in text.splitlines()]
        return Error(
            "a call failed on another rank",
            where=f"rank {dist.get_rank()}; the start of a call",
            expected="every rank to come to this call",
            got=f"\n  {'':<10}".join(lines),
            remedy="mend it there; nothing was run, and all ranks can go on",
        )
    said = [words for _, words in every]
    subjects = dict.fromkeys(subject for words in said for subject in words)
    differ = [subject for subject in subjects if len({words.get(subject) for words in said}) > 1]
    sides: dict[str, list[int]] = {}
    for rank, words in enumerate(said):
        parts = [f"{subject}: {words.get(subject, 'no')}" for subject in differ[:SHOWN]]
        parts += [f"and {len(differ) - SHOWN} more that differ"] if len(differ) > SHOWN else []
        sides.setdefault("; ".join(parts), []).append(rank)
    lines = [f"{named(ranks)}: {text}" for text, ranks in sides.items()]
    shown = [*lines[:SHOWN], f"and {len(lines) - SHOWN} sides more"] if len(lines) > SHOWN else lines
    if differ == [WRITTEN]:
        return Error(
            "the ranks' parameters are no longer the same",
            where=f"rank {dist.get_rank()}; before pm(...)",
            expected="parameters that all ranks hold to be written into by all of them, as often",
            got=f"\n  {'':<10}".join(shown),
            remedy="step optimizers, and write into parameters, on all ranks alike; pm.load_full_state_dict(...), or a "
            "checkpoint, makes them the same again",
        )
    return Error(
        "the ranks do not make the same call",
        where=f"rank {dist.get_rank()}; pm(...)",
        expected="the same call on all ranks: training or evaluation, mode, shapes, numbers",
        got=f"\n  {'':<10}".join(shown),
        remedy="call a parallel module on all ranks alike, also to evaluate, to save, and for an epoch's last batch; "
        "ranks that pass their own parts pad them to one length; nothing was run, and all ranks can go on",
    )


def different(given: Content, alike: Sequence[Sequence[int]]) -> Error:
    """An input that should be the same on several ranks, and is not."""
    here, whole, part = given.name, given.whole, given.part
    if given.piece >= 0:
        remedy = "ranks that hold the same part of the batch pass the same: let samplers depend on the data axes alone"
    elif part == whole:
        remedy = "no axis cuts this input: its ranks work on one batch, so let all pass the same"
    else:
        larger = tuple(w * (w // p) if p and w != p else w for w, p in zip(whole, part, strict=True))
        remedy = (
            f"either pass the same batch on all ranks; or let each rank pass its own part of it, {part}; where each "
            f"has a batch of {whole} of its own, as with DDP, parallelize with example inputs of all ranks' rows "
            f"together, about {larger}, and each passes its own"
        )
    return Error(
        "ranks pass different batches as the same one",
        where=f"pm(...), {here!r}",
        expected=f"the whole batch {whole}, the same on all ranks" if given.piece < 0 else f"the same part {part}",
        got="contents differ between " + " and ".join(named(ranks) for ranks in alike[:SHOWN]),
        remedy=remedy,
    )
