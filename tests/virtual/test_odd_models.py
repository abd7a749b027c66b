"""Odd models that are sound equal one device, are proven, and nothing is said of them; damaged ones are refused."""

from __future__ import annotations

import random

import pytest

import shardfx as sx
from tests.captures import captured_once
from tests.damage import MUTATIONS
from tests.mutants import Programs
from tests.odd import ODD, mesh, run
from tests.odd.rewrites import REWRITES, Rewritten

pytestmark = pytest.mark.long
FREELY = ("a copy", "an alias", "times 1", "plus 0", "by 1")
"""Rewrites that are proven wherever they stand."""
OPEN = {"OneStore": "a copy splits the sum of the gradients of overlapping views, which ranks add as one"}
"""Models that are not proven with shards of weights."""


def last_mesh(name: str) -> str:
    """That with most axes."""
    return list(ODD[name].ways())[-1]


@pytest.mark.parametrize("name", ODD)
def test_odd_model_equals_one_device_and_is_proven(name: str) -> None:
    wrong = run(ODD[name], last_mesh(name))
    assert not [each for each in wrong if not (name in OPEN and each.startswith("unknown"))]


def planned(name: str, *passes: sx.Pass) -> sx.ParallelModule:
    """An odd model on its last mesh."""
    odd, given, way = ODD[name], ODD[name].given(), last_mesh(name)
    with captured_once(f"odd {name}"):
        return sx.parallelize(given.model, mesh(way), odd.hints(way, given, passes=passes), virtual=True)


@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
def test_rewrites_that_change_no_value_are_no_alarm() -> None:
    """Copies and neutral factors are proven; iterations that cancel and the like are proven, or unknown."""
    for names, step in ((FREELY, 2), (tuple(REWRITES), 3)):
        verdict = planned("Kronecker", Rewritten(names, step)).verify()
        unknown = verdict.status == "unknown" and "agrees on 3 random draws" in verdict.why
        assert verdict or (unknown and names != FREELY), verdict


@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
def test_two_kinds_of_damage_are_refused() -> None:
    pm = planned("Binary")
    programs, done = Programs.of(pm), 0
    for mutation in random.Random("Binary").sample(MUTATIONS, len(MUTATIONS)):
        for place, damaged in programs.damaged(mutation, 1):
            verdict = pm.verify({rank: program.module() for rank, program in damaged.items()})
            assert not verdict, f"{mutation.name} at {place}"
            done += 1
        if done >= 2:
            return
    assert done, "no kind of damage has a place"
