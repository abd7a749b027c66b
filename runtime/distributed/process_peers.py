"""Real ranks make a call together: a handshake of a few numbers among CPU ranks, before anything is sent.

    rank 0                              rank 1
    a training step, [8, 6]             a loss without gradients, [8, 6]      -> both raise, with both sides in words
    [digest, how passed + done, draw]   [digest, how passed + done, draw]     three numbers from each rank

Beside how inputs are passed goes a digest of what was done to parameters since the last call, and of a sample of what
should be passed alike: an optimizer that steps on one rank alone leaves them apart.

(:mod:`.handshake`; the list of what is compared: :mod:`.agreement`.) The words are sent only where the numbers differ;
what ranks pass in and hold is compared by checksums, on the first, second, fourth, eighth ... call of each form.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
import operator
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.runtime.peers import Agreed, Content, Contents, Passed, Subjects, Words
from shardfx.runtime.store import Store

from .agreement.acts import watch_steps
from .agreement.differences import DONE, SAMPLE, WRITTEN, difference, different, no_longer_alike, other_plans
from .agreement.samples import Sketch, sampled, tolerance_of
from .agreement.subjects import compared
from .checksum import checksum
from .groups import make_cpu_group, make_groups, the_cpu_group
from .handshake import Handshake, is_open, leave_open, settle
from .last_words import tell_when_it_ends
from .peer_failure import ending_together
from .process_store import ProcessStore

T = TypeVar("T")
V = TypeVar("V")
c10d = torch.ops._c10d_functional
log = logging.getLogger("shardfx")
FAILED = max(Passed) + 1
"""In the place of how inputs are passed: this rank cannot do what it was to do."""
WAYS = FAILED + 1
"""How many of these there are: what is more is a digest of what was done since the last call."""
NOTHING = 0
"""In the place of a number that a rank drew, which is said as the next one."""
START, PLANNING = "the start of a call", "parallelize(...), or planning a call in a new form"
_numbers = itertools.count()
_turn = threading.RLock()
_refused: list[str] = []
"""What this rank is to tell the others at its next call."""


class ProcessPeers:
    """The other processes of a job, for one parallel module, or one that is yet to be planned."""

    def __init__(self) -> None:
        with ending_together("making the group of all ranks"):
            make_cpu_group()
        tell_when_it_ends()
        self.number: object = "yet to be planned"
        self._copies = itertools.count(1)
        self._store: ProcessStore | None = None
        self._agreed = self._together = self._apart = False
        """Whether this call was agreed on, and all ranks do it; whether what several ranks hold was found to differ."""
        self._written: int | None = None
        """So often parameters were written into when the last call was over."""
        self._digests: dict[Hashable, int] = {}
        self._seen: Counter[Hashable] = Counter()
        """How often all ranks agreed on something."""

    def holds(self, store: Store) -> None:
        """What this rank holds of the module."""
        assert isinstance(store, ProcessStore)
        self._store = store
        watch_steps(store)

    def __deepcopy__(self, memo: dict[int, Any]) -> ProcessPeers:
        made = ProcessPeers()
        made.number = f"{self.number} copy {next(self._copies)}"
        return made

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
            self._agreed = self._together = False
            try:
                yield
            except Exception as error:
                if not self._agreed:
                    self._refuse(error)
                raise
        finally:
            if self._together and self._store is not None:
                self._written = self._store.writes()
            _turn.release()

    def agree(
        self,
        key: Hashable,
        words: Words,
        passed: Passed = Passed.EITHER,
        draw: int | None = None,
        later: bool = False,
        alike: Contents = tuple,
        anew: bool = False,
    ) -> Agreed:
        """All ranks are about to do the same."""
        self._agreed = True
        if key not in self._digests:
            self._digests[key] = digest(f"{self.number} {sorted(words().items())}")
        failed = "\n".join(_refused)
        _refused.clear()
        history = {} if anew else self._history()
        same = alike()
        sample = sampled(each.tensor for each in same)
        said = digest(f"{history} {sample}") // WAYS if history or sample else 0
        way = FAILED if failed else int(passed)
        begun = Handshake([self._digests[key], way + WAYS * said, NOTHING if draw is None else draw + 1], START)

        def end() -> Sequence[Sequence[int]]:
            rows = begun.rows()
            ways = {row[1] % WAYS for row in rows} - {Passed.EITHER}
            if len({row[0] for row in rows}) > 1 or len(ways) > 1 or FAILED in ways:
                raise difference(self._tell_all((failed, {**self._words(words, passed), **history})))
            if len({row[1] // WAYS for row in rows}) > 1:
                self._settle_history(history, same)
            self._seen[key] += 1
            self._begin_history(anew)
            return rows

        if later and self._seen[key] & (self._seen[key] + 1):  # else inputs are compared before anything is done
            leave_open(end)
            return Agreed(passed is Passed.PART)
        rows = end()
        first = rows[0][2]
        return Agreed(any(row[1] % WAYS == Passed.PART for row in rows), first - 1 if first != NOTHING else None)

    def _words(self, words: Words, passed: Passed) -> dict[str, str]:
        said = {"module": f"parallel module {self.number}", **words()}
        if passed is not Passed.EITHER:
            said["inputs"] = "the whole of each" if passed is Passed.WHOLE else "this rank's own part"
        return said

    # ---- what was done since the last call

    def _history(self) -> dict[str, str]:
        """What was done to parameters since the last call, in words."""
        if self._store is None:
            return {}
        acts = self._store.acts
        written = 0 if self._written is None or acts.anew else self._store.writes() - self._written
        return {WRITTEN: f"{written} times", DONE: str(acts)} if written or acts.done else {}

    def _begin_history(self, anew: bool) -> None:
        """All ranks did the same; what several of them hold is compared where it was loaded by each, or differed.

        Raises:
            Error: it differs.
        """
        self._together = True
        if self._store is not None:
            loaded = self._store.acts.anew
            self._store.acts.clear()
            if (loaded or self._apart) and not anew:
                self._compare_held()

    def _settle_history(self, history: Mapping[str, str], alike: Sequence[Content]) -> None:
        """Some rank did something else, or passes something else.

        Raises:
            Error: that is so, unless it wrote the same into what all ranks hold.
        """
        sums = " ".join(str(checksum(each.tensor)) for each in alike)
        said = {WRITTEN: "0 times", DONE: "nothing", **history, SAMPLE: sums}
        every = [dict(words) for _, words in self._tell_all(("", said))]
        passed = [words.pop(SAMPLE).split() for words in every]
        known = self._store is not None and not self._store.in_common.is_cut
        if len({words[DONE] for words in every}) > 1 or (every[1:] != every[:-1] and not known):
            if self._store is not None and self._store.is_staged:  # steps are not counted: nothing done makes up for it
                self._store.acts.note(f"the others did not do the same as rank {dist.get_rank()}")
            raise difference([("", words) for words in every])
        if every[1:] != every[:-1]:
            self._compare_held()
        for i, each in enumerate(alike):
            sides = apart([(0, sums[i]) for sums in passed], operator.eq)
            if sides:
                raise different(each, sides)

    # ---- plans, inputs, and what is held

    def planned(self, make: Callable[[], T], subjects: Callable[[T], Subjects]) -> T:
        """What ``make()`` plans; all ranks plan the same."""
        try:
            made = make()
            lines = subjects(made)
        except Exception as error:
            self._refuse(error)
            raise
        self._agreed = True
        mine = digest(str({name: [*map(compared, each)] for name, each in lines.items()})) // WAYS
        failed = "\n".join(_refused)
        _refused.clear()
        way = FAILED if failed else int(Passed.EITHER)
        rows = Handshake([digest(f"a plan of {self.number}"), way + WAYS * mine, next(_numbers) + 1], PLANNING).rows()
        if len({row[0] for row in rows}) > 1 or any(row[1] % WAYS == FAILED for row in rows):
            raise difference(self._tell_all((failed, {"runs": PLANNING, "module": f"parallel module {self.number}"})))
        if len({row[1] for row in rows}) > 1:
            raise other_plans([said for _, said in self._tell_all(("", lines))])
        if self._store is None:
            self.number = rows[0][2] - 1
        self._together = True
        return made

    def compare(self, key: Hashable, contents: Contents, always: bool = False) -> None:
        """Inputs that should be the same on several ranks are; and so is what they hold."""
        if always:
            settle()
        elif is_open():
            return
        times = self._seen[key]
        now = times & (times - 1) == 0
        if (now or always) and (given := contents()):
            mine = [number for each in given for number in (each.piece, checksum(each.tensor))]
            rows = Handshake(mine, "comparing inputs").rows()
            for i, each in enumerate(given):
                sides = apart([(row[2 * i], row[2 * i + 1]) for row in rows], operator.eq)
                if sides:
                    raise different(each, sides)
        if now:
            self._compare_held()

    def _compare_held(self) -> None:
        """What several ranks hold is the same, up to rounding."""
        held = self._store.replicas() if self._store is not None else []
        self._apart = bool(held)
        if not held:
            return
        mine = [number for each in held for number in (each.piece, *Sketch.of(each.tensor).numbers())]
        rows = Handshake(mine, "comparing what ranks hold").rows()
        for i, each in enumerate(held):
            alike = partial(Sketch.is_like, tolerance=tolerance_of(each.dtype))
            sides = apart([(row[3 * i], Sketch.said(*row[3 * i + 1 : 3 * i + 3])) for row in rows], alike)
            if sides:
                raise no_longer_alike(each.name, sides)
        self._apart = False

    def firsts(self, mesh: Mesh, contents: Contents) -> Mapping[str, torch.Tensor]:
        """In the place of inputs that should be the same on several ranks, that of the first of these ranks."""
        settle()
        given = [each for each in contents() if mesh.extent(each.axes) > 1]
        make_groups(mesh, sorted({each.axes for each in given}))
        found = {}
        for each in given:
            assert self._store is not None
            sent = each.tensor.detach().to(self._store.device, copy=True, memory_format=torch.contiguous_format)
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

    def _tell_all(self, mine: tuple[str, Mapping[str, V]]) -> list[tuple[str, Mapping[str, V]]]:
        """What every rank says, by rank."""
        every: list[Any] = [None] * dist.get_world_size()
        with ending_together("telling in what the ranks differ"):
            dist.all_gather_object(every, mine, group=the_cpu_group())
        return every


def digest(text: str) -> int:
    """A text as a number of 63 bits."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def apart(said: Sequence[tuple[int, T]], alike: Callable[[T, T], bool]) -> list[list[int]]:
    """The ranks that say the same of one piece, where some say something else; none if all agree on each piece."""
    pieces: dict[int, list[tuple[T, list[int]]]] = {}
    for rank, (piece, what) in enumerate(said):
        known = pieces.setdefault(piece, [])
        ranks = next((ranks for other, ranks in known if alike(other, what)), None)
        if ranks is None:
            known.append((what, [rank]))
        else:
            ranks.append(rank)
    return next(([ranks for _, ranks in known] for known in pieces.values() if len(known) > 1), [])
