"""Damaged programs are refused: by the proof, and by the comparison on random numbers."""

from __future__ import annotations

from itertools import islice

import pytest

from benchmarks.mutants import ask, measure, planned
from tests.damage import HARMLESS, Mutation, any_call, blind
from tests.mutants import Programs
from tests.wrong.questions import ONE, SECTIONS, on_one_rank


@pytest.mark.long
def test_every_damaged_program_is_refused() -> None:
    rates = measure(["mlp3@dp2tp2"], count=1)
    assert rates.total >= 15 and rates.static == rates.made
    # the moments of all are the same of shards in another order, and random numbers do not weigh every constant
    assert len(rates.survivors) <= 1, rates.survivors


@pytest.mark.long
def test_changes_that_change_no_value_are_proven() -> None:
    pm = planned("mlp3@dp2tp2")
    programs = Programs.of(pm)
    for mutation in HARMLESS:
        for place, changed in programs.damaged(mutation, 2):
            verdict = pm.verify({rank: program.module() for rank, program in changed.items()})
            assert verdict, f"{mutation.name} at {place}: {verdict.why}"


@pytest.mark.long
@pytest.mark.parametrize("section", ["passes", "rules", "forms", "newer kinds"])
def test_wrong_passes_rules_and_programs_are_refused(section: str) -> None:
    """By the proof, and where all ranks run: the first few of each section (``benchmarks.mutants`` asks all)."""
    rates = ask(islice(SECTIONS[section](), 4))
    assert rates.total == 4 and not rates.survivors


@pytest.mark.long
def test_one_rank_of_many_that_is_wrong_is_refuted_with_numbers() -> None:
    question = next(each for each in on_one_rank() if each.what.startswith("all-reduce over"))
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
def test_damage_that_the_comparison_refuses_is_refused_by_the_proof() -> None:
    """Some argument of some call is changed blindly. That may do no harm; but if it does, nothing was proven."""
    rates = measure(["mlp3@dp2tp2"], count=12, mutations=[Mutation("anything", any_call, blind)])
    assert rates.dynamic.total() >= 6
    assert not [text for text in rates.survivors if "not seen by static" in text and "dynamic" not in text]
