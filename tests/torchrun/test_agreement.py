"""Ranks make the same call on equal plans and weights, or all of them raise an error that says both sides."""

from __future__ import annotations

import pytest

from tests.torchrun.launch import on_ranks


@pytest.mark.parametrize(
    "calls",
    [
        (
            "other_forms_are_right_on_all_ranks",
            "ranks_that_differ_are_told_both_sides",
            "own_batches_in_the_shape_of_the_whole_are_noticed",
            "shards_are_this_ranks",
            "optimizers_and_results_go_on",
            "inputs_are_compared_at_every_call",
            "inputs_of_the_first_rank_are_taken",
        ),
        (
            "ranks_that_plan_otherwise_are_told_where",
            "what_is_done_between_calls_is_compared",
            "what_several_ranks_hold_is_compared",
            "a_step_that_one_stage_leaves_out_is_noticed",
            "rates_that_one_rank_changes_are_noticed",
            "what_one_ranks_code_reads_may_be_its_own",
        ),
    ],
    ids=["calls", "plans and weights"],
)
def test_ranks_agree(calls: tuple[str, ...]) -> None:
    on_ranks(2, *calls)
