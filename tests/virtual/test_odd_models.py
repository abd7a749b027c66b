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

QUICK = ("Bags", "LowRank")
"""Of these the last mesh is quick."""
FREELY = ("a copy", "an alias", "times 1", "plus 0", "by 1")
"""Rewrites that are proven wherever they stand."""
OPEN_FREELY = {"OneStore": "a copy splits the sum of the gradients of overlapping views, which ranks add as one"}
"""Models that are not proven with shards of weights, nor with copies and neutral factors alone."""


def case(name: str, way: str) -> object:
    """A model on a mesh."""
    quick = name in QUICK and way == list(ODD[name].ways())[-1]
    return pytest.param(name, way, id=f"{name}@{way}", marks=() if quick else pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(("name", "way"), [case(name, way) for name, odd in ODD.items() for way in odd.ways()])
def test_it_equals_one_device_and_is_proven(name: str, way: str) -> None:
    wrong = run(ODD[name], way)
    assert not [each for each in wrong if not (name in OPEN_FREELY and each.startswith("unknown"))]


def planned(name: str, *passes: sx.Pass) -> sx.ParallelModule:
    """An odd model on its last mesh."""
    odd, given = ODD[name], ODD[name].given()
    way = list(odd.ways())[-1]
    with captured_once(f"odd {name}"):
        return sx.parallelize(given.model, mesh(way), odd.hints(way, given, passes=passes), virtual=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "Kronecker" else pytest.mark.slow) for n in ODD])
def test_what_changes_no_value_is_no_alarm(name: str) -> None:
    """Copies and neutral factors are proven; iterations that cancel and the like are proven, or unknown."""
    for names, step in ((FREELY, 2), (tuple(REWRITES), 3)):
        verdict = planned(name, Rewritten(names, step)).verify()
        unknown = verdict.status == "unknown" and "agrees on 3 random draws" in verdict.why
        assert verdict or (unknown and (names != FREELY or name in OPEN_FREELY)), verdict


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::shardfx.ShardfxWarning")
@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "Binary" else pytest.mark.slow) for n in ODD])
def test_damage_is_refused(name: str) -> None:
    """Two kinds of it for each."""
    pm = planned(name)
    programs, done = Programs.of(pm), 0
    for mutation in random.Random(name).sample(MUTATIONS, len(MUTATIONS)):
        for place, damaged in programs.damaged(mutation, 1):
            verdict = pm.verify({rank: program.module() for rank, program in damaged.items()})
            assert not verdict, f"{mutation.name} at {place}"
            done += 1
        if done == 2:
            return
    assert done, "no kind of damage has a place"
