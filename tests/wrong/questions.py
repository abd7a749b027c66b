"""Everything wrong as a question: a kind, what it was done to, and how the verdict is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import shardfx as sx
from tests.damage import MUTATIONS
from tests.damage_plan import DROPS, MORE, WRONG, Changes, ChangesFirst
from tests.mutants import Programs

from . import newer, rules
from .forms import FORMS, malformed
from .nets import of_many_ranks, planned

ONE = 37
"""A rank that nothing is special about, of 64."""


class Question(NamedTuple):
    kind: str
    what: str
    ask: Callable[[bool], sx.Verdict]
    """With ``run``."""


def by_passes() -> Iterator[Question]:
    """Passes that change what the plan gives, or what it holds."""
    for name, change in {**DROPS, **MORE}.items():
        yield Question("a pass changes outputs or constants", name, _asked(planned(Changes(change))))
    for name, change in WRONG.items():
        yield Question("a pass changes what is computed", name, _asked(planned(ChangesFirst(change))))


def by_rules() -> Iterator[Question]:
    for name, row in rules.WRONG.items():
        yield Question("a wrong rule", name, lambda run, row=row: rules.planned(*row).verify(run=run))  # type: ignore[misc]


def by_form() -> Iterator[Question]:
    pm = planned()
    for name in FORMS:
        for ranks in (range(2), [1]):

            def ask(run: bool, name: str = name, ranks: range | list[int] = ranks) -> sx.Verdict:
                return pm.verify({rank: malformed(name, pm.rank_module(rank)) for rank in ranks}, run=run)

            yield Question("a program that is none", f"{name} on {len(ranks)} of 2 ranks", ask)


def on_one_rank() -> Iterator[Question]:
    """Damage to nodes, arguments, constants and groups on one rank of 64."""
    pm = of_many_ranks()
    programs = Programs.of(pm)
    for mutation in MUTATIONS:
        for place, damaged in programs.damaged(mutation, 1, on=ONE):
            modules = {rank: program.module() for rank, program in damaged.items()}
            what = f"{mutation.name} at {place}"
            yield Question("on one rank of 64", what, lambda run, given=modules: pm.verify(given, run=run))  # type: ignore[misc]


def of_newer_kinds() -> Iterator[Question]:
    """Damage to what only some plans have, on all ranks and on one."""
    for name, damage in newer.DAMAGES.items():
        for alone in (False, True):

            def ask(run: bool, name: str = name, alone: bool = alone, pm: str = damage.plan) -> sx.Verdict:
                return newer.plan(pm).verify(newer.damaged(name, alone), run=run)

            yield Question("what only some plans have", f"{name} on {'one rank' if alone else 'all ranks'}", ask)


SECTIONS: dict[str, Callable[[], Iterator[Question]]] = {
    "passes": by_passes,
    "rules": by_rules,
    "forms": by_form,
    "one of many ranks": on_one_rank,
    "newer kinds": of_newer_kinds,
}
"""All of them; plans are made when they are come to."""


def _asked(pm: sx.ParallelModule) -> Callable[[bool], sx.Verdict]:
    return lambda run: pm.verify(run=run)


def refused(question: Question, run: bool) -> bool:
    """Whether the verdict is false, or the question an error that says what is wrong."""
    try:
        return not question.ask(run)
    except sx.Error:
        return True
