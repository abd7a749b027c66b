"""Correctness and completeness of sharding rules, over every op of PyTorch's own operator database.

    python -m benchmarks.op_coverage [--samples 6] [--most 6] [--seed 0] [--ops conv pool] [--list]
        [--no-dtensor] [--jobs 2]

The ops are those that the samples of ``op_db`` call, forward and backward, at the level of aten. By category (the file
of the rule book that holds the op's rule; an op without one is discovered) the table gives

    sound     of the shardings and partial sums that the rules allow, those that the oracle does not refute by running
              them, on the values of the database and on others: both signs, zeros, ties, integers over their full range
    shardings of the one-axis shardings of operands that the oracle finds right, those that the rules allow
    sums      of the sets of operands that may be partial sums, those that the rules let pass; of placements in which
              an axis shards some operands while others are partial sums over it, those that ``sx.strategies`` lists
    DTensor   the same of DTensor (:mod:`benchmarks.op_dtensor`), and what it accepts and gets wrong

Another ``--seed`` takes other samples of an op, other values of them, and other draws. The exit status is 1 if a rule
is refuted.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.op_dtensor import Answers, ask
from benchmarks.op_instances import record
from shardfx.ir.oracle.completeness import joint_placements, missing_placements, missing_sums
from shardfx.ir.oracle.discover import Discovery
from shardfx.ir.oracle.instance import Instance
from shardfx.ir.oracle.sharding_search import Oracle, Placement
from shardfx.ir.oracle.soundness import UNDEFINED, refutations, trials
from shardfx.ir.rulebook import CATEGORIES, default_rules
from shardfx.ir.rules.sharding_rule import Linear

BOOK = default_rules().with_fallback(Discovery().entry)
DISCOVERED = "discovered"
NO_RULE = "no rule"


@dataclass(frozen=True)
class Score:
    """What was found of one op instance."""

    category: str
    op: str
    text: str
    trials: int = 0
    refuted: tuple[str, ...] = ()
    shardings: int = 0
    missing_shardings: tuple[Placement, ...] = ()
    sums: int = 0
    missing_sums: tuple[Linear | Placement, ...] = ()
    dtensor: Answers | None = None


def category(op: Any) -> str:
    """The file of the rule book that holds an op's rule; or that it was discovered, or has none."""
    packet = getattr(op, "overloadpacket", op)
    for name, entries in CATEGORIES.items():
        if any(op in entry.ops or packet in entry.ops for entry in entries):
            return name
    entry = BOOK.entry(op)
    return NO_RULE if entry is None else DISCOVERED if entry.discovered else "pointwise"


def score(of: Instance, dtensor: bool = True, seed: int = 0) -> Score:
    """Run the oracle over one instance, and ask DTensor."""
    entry = BOOK.entry(of.node.op)
    rule = entry.make(of.node) if entry is not None else None
    tried, refuted = 0, []
    if entry is not None and rule is not None:
        tried = len(list(trials(rule, of.results, of.tensors)))
        refuted = refutations(entry, of, seed=seed) + refutations(entry, of, seed=seed, drawn=True)
    oracle = Oracle(of, seed)
    undefined = of.node.op.overloadpacket in UNDEFINED
    shardings, sums = oracle.shardings(), [] if undefined else oracle.linear()
    joints = [] if undefined else joint_placements(oracle)
    missing = functools.partial(missing_placements, rule, of.node, ignored=oracle.ignored())
    return Score(
        category(of.node.op),
        str(of.node.op),
        repr(of),
        tried,
        tuple(refuted),
        len(shardings),
        tuple(missing(shardings)),
        len(sums) + len(joints),
        (*missing_sums(rule, sums), *missing(joints)),
        ask(of, shardings, [each.operands for each in sums]) if dtensor else None,
    )


@dataclass
class Total:
    """The scores of a category."""

    ops: set[str] = field(default_factory=set)
    scores: list[Score] = field(default_factory=list)

    def add(self, each: Score) -> None:
        self.ops.add(each.op)
        self.scores.append(each)

    @property
    def sound(self) -> tuple[int, int]:
        allowed = sum(s.trials for s in self.scores)
        return allowed - sum(len(s.refuted) for s in self.scores), allowed

    @property
    def shardings(self) -> tuple[int, int]:
        valid = sum(s.shardings for s in self.scores)
        return valid - sum(len(s.missing_shardings) for s in self.scores), valid

    @property
    def sums(self) -> tuple[int, int]:
        valid = sum(s.sums for s in self.scores)
        return valid - sum(len(s.missing_sums) for s in self.scores), valid

    @property
    def answers(self) -> list[Answers]:
        return [s.dtensor for s in self.scores if s.dtensor is not None]

    def row(self, name: str) -> list[str]:
        """The category's line of the table."""
        cells = [name, str(len(self.ops)), str(len(self.scores))]
        cells += [percent(*each) for each in (self.sound, self.shardings, self.sums)]
        if self.answers:
            accepted = sum(a.accepted for a in self.answers)
            untrue = sum(len(a.wrong) + len(a.raised) for a in self.answers)
            cells += [
                percent(sum(a.shardings for a in self.answers), self.shardings[1]),
                percent(sum(a.sums for a in self.answers), self.sums[1]),
                percent(untrue, accepted),
            ]
        return cells


def percent(part: int, of: int) -> str:
    """A share in percent with what it is of; never 100 % where something is missing."""
    if not of:
        return "-"
    share = 100 * part / of
    return f"{min(share, 99.99) if part < of else share:.2f} ({of})"


def table(scores: Iterable[Score], dtensor: bool = True) -> Table:
    """The figures by category, and of all together."""
    totals: dict[str, Total] = defaultdict(Total)
    everything = Total()
    for each in scores:
        totals[each.category].add(each)
        everything.add(each)
    made = Table(title="rules over op_db, forward and backward: % (of how many)")
    made.add_column("category")
    names = ["ops", "instances", "sound", "shardings", "sums"]
    for name in names + (["DTensor shardings", "DTensor sums", "DTensor wrong"] if dtensor else []):
        made.add_column(name, justify="right")
    order = [*CATEGORIES, DISCOVERED, NO_RULE]
    for name in sorted(totals, key=order.index):
        made.add_row(*totals[name].row(name))
    made.add_section()
    made.add_row(*everything.row("all"))
    return made


_work: list[Instance] = []


def _score(i: int, dtensor: bool, seed: int) -> Score:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    return score(_work[i], dtensor, seed)


def _score_one(job: tuple[int, bool, int]) -> Score:
    return _score(*job)


def measure(instances: Sequence[Instance], *, jobs: int = 2, dtensor: bool = True, seed: int = 0) -> Iterator[Score]:
    """The scores of all instances, as they come; forked workers take the instances along."""
    _work[:] = instances
    work = [(i, dtensor, seed) for i in range(len(instances))]
    if jobs < 2:
        yield from map(_score_one, work)
        return
    with multiprocessing.get_context("fork").Pool(jobs) as pool:
        yield from pool.imap_unordered(_score_one, work, chunksize=4)


def chosen(samples: int, most: int, patterns: Sequence[str], console: Console, seed: int = 0) -> list[Instance]:
    """The instances of the operator database whose op's name or category contains one of the patterns."""
    with console.status("recording the operator database") as status:
        recorder = record(samples, most, lambda name: status.update(f"recording {name}"), seed=seed)
    found = [each for of_op in recorder.found.values() for each in of_op.values()]
    if not patterns:
        return found
    return [each for each in found if any(p in f"{each.node.op} {category(each.node.op)}" for p in patterns)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=6, help="samples of the database per op")
    parser.add_argument("--most", type=int, default=6, help="instances per overload")
    parser.add_argument("--ops", nargs="*", default=[], help="only ops whose name or category contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seed", type=int, default=0, help="of samples, values and draws")
    parser.add_argument("--no-dtensor", action="store_true", help="leave DTensor out")
    parser.add_argument("--list", action="store_true", help="name what is missing, and what DTensor gets wrong")
    args = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 150)
    began = time.monotonic()
    torch.set_num_threads(1)
    instances = chosen(args.samples, args.most, args.ops, console, args.seed)
    console.print(f"{len(instances)} instances recorded in {time.monotonic() - began:.0f} s")
    scores = []
    with Progress(console=console, disable=not console.is_terminal) as progress:
        bar = progress.add_task("running the oracle", total=len(instances))
        for each in measure(instances, jobs=args.jobs, dtensor=not args.no_dtensor, seed=args.seed):
            scores.append(each)
            progress.advance(bar)
            if not console.is_terminal and len(scores) % 250 == 0:
                console.print(f"{len(scores)} of {len(instances)}, {time.monotonic() - began:.0f} s")
    console.print(table(scores, not args.no_dtensor))
    report(scores, console, args.list)
    console.print(f"{time.monotonic() - began:.0f} s")
    return 1 if any(each.refuted for each in scores) else 0


def report(scores: Sequence[Score], console: Console, everything: bool) -> None:
    """Name what is refuted; with ``everything`` what is missing too, and what DTensor gets wrong."""

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    for each in scores:
        for text in each.refuted:
            say(f"refuted: {text}")
    answers = [each.dtensor for each in scores if each.dtensor is not None]
    if answers:
        wrong, raised = sum(len(a.wrong) for a in answers), sum(len(a.raised) for a in answers)
        accepted = sum(a.accepted for a in answers)
        slow = {each.op for each in scores if each.dtensor is not None and each.dtensor.slow}
        say(
            f"DTensor accepts {accepted} placements: {wrong} give other values, {raised} fail when executed"
            + (f"; it takes too long to say of {', '.join(sorted(slow))}" if slow else "")
        )
    if not everything:
        return
    for each in scores:
        for choice in each.missing_shardings:
            say(f"missing sharding: {each.text}: {choice}")
        for group in each.missing_sums:
            say(f"missing sum: {each.text}: {group}")
    for answer in answers:
        for text in (*answer.wrong, *answer.raised):
            say(f"DTensor: {text}")


if __name__ == "__main__":
    sys.exit(main())
