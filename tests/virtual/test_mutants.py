"""Damaged programs are refused: by the proof, and by the comparison on random numbers."""

from __future__ import annotations

import pytest

from benchmarks.mutants import PLANS, STEPPED, ask, measure, planned
from tests.damage import HARMLESS, MUTATIONS, Mutation, any_call, blind
from tests.mutants import AS_THEY_RUN, Programs
from tests.wrong import newer
from tests.wrong.questions import ONE, SECTIONS, on_one_rank

QUICK = ("mlp3@dp2tp2",)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in PLANS])
def test_every_damaged_program_is_refused(name: str) -> None:
    rates = measure([name], count=1)
    assert rates.total >= 15 and rates.static == rates.made
    # the moments of all are the same of shards in another order, and random numbers do not weigh every constant
    assert len(rates.survivors) <= 1, rates.survivors


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPPED)
def test_every_damaged_step_is_refused_by_the_proof(name: str) -> None:
    rates = measure([name], count=2)
    assert rates.total >= 20 and rates.static == rates.made


@pytest.mark.slow
def test_every_kind_of_damage_is_done() -> None:
    """The plans have, between them, a place for each."""
    assert len(MUTATIONS) >= 25
    assert {mutation.name for mutation in (*MUTATIONS, *AS_THEY_RUN)} == set(measure((*PLANS, *STEPPED), count=1).made)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp3@dp2tp2", pytest.param("gpt_fused@dp2tp2+sequence", marks=pytest.mark.slow)])
def test_what_changes_no_value_is_proven(name: str) -> None:
    pm = planned(name)
    programs = Programs.of(pm)
    for mutation in HARMLESS:
        for place, changed in programs.damaged(mutation, 2):
            verdict = pm.verify({rank: program.module() for rank, program in changed.items()})
            assert verdict, f"{mutation.name} at {place}: {verdict.why}"


@pytest.mark.slow
@pytest.mark.parametrize("section", SECTIONS)
def test_what_is_wrong_otherwise_is_refused(section: str) -> None:
    """Passes, rules, forms, damage on one rank of 64, and to what only some plans have: by the proof, and where all
    ranks run."""
    rates = ask(SECTIONS[section]())
    assert rates.total >= 10 and not rates.survivors


@pytest.mark.slow
def test_every_newer_kind_of_damage_has_a_place() -> None:
    assert all(newer.damaged(name, alone=False) for name in newer.DAMAGES)


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize("place", ["a node", "an argument", "a group"])
def test_one_rank_of_many_that_is_wrong_is_refuted_with_numbers(place: str) -> None:
    kinds = {"a node": "another activation", "an argument": "slice at another offset", "a group": "all-reduce over"}
    question = next(each for each in on_one_rank() if each.what.startswith(kinds[place]))
    verdict = question.ask(False)
    assert verdict.status == "refuted" and verdict.fault is not None
    assert verdict.fault.rank == ONE and verdict.fault.numbers


def test_a_refusal_names_the_output_the_rank_the_node_and_the_line() -> None:
    """A sum over tp that rank 1 forgets would hang real ranks; one that all forget gives wrong numbers."""
    pm = planned("mlp3@tp2")
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for module in changed.values():
        wait = next(n for n in module.graph.nodes if "wait_tensor" in str(n.target))
        wait.replace_all_uses_with(wait.args[0].args[0])
        module.graph.eliminate_dead_code()
        module.recompile()
    for run in (False, True):
        verdict = pm.verify(changed, run=run)
        assert not verdict
        assert verdict.fault is not None and verdict.fault.rank == 0
        for part in ("loss", "rank 0", "fc2", "models.py:22"):
            assert part in verdict.why
        assert verdict.why in str(verdict)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mlp3@dp2tp2", pytest.param("gpt_fused@dp2tp2+sequence", marks=pytest.mark.slow)])
def test_what_the_comparison_refuses_the_proof_refuses_too(name: str) -> None:
    """Some argument of some call is changed blindly. That may do no harm; but if it does, nothing was proven."""
    rates = measure([name], count=12, mutations=[Mutation("anything", any_call, blind)])
    assert rates.dynamic.total() >= 6
    assert not [text for text in rates.survivors if "not seen by static" in text and "dynamic" not in text]
