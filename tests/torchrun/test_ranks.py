"""Whole programs on real processes (gloo): what one device computes, and what torch's own tools ask of a module.

A launch costs more than most of what is tested in it, so that one launch makes several calls.
"""

from __future__ import annotations

from pathlib import Path

import torch

import shardfx as sx
from tests.plans import plan
from tests.reference import rel_err
from tests.torchrun.launch import on_ranks, torchrun
from tests.zoo import make


def test_whole_models_and_checkpoints(tmp_path: Path) -> None:
    on_ranks(
        4,
        "trains_like_one_device:gpt_fused,dp2tp2",
        "counts_equal_the_graph:gpt_fused,dp2tp2",
        f"records_steps:gpt_fused,dp2tp2,{tmp_path}",
        "takes_global_or_local_batches",
        "accumulates_and_scales_gradients",
        "dropout_is_drawn_by_rank_0:dropout_mlp,dp2tp2",
        "what_dtensor_cannot_say_is_an_error",
        "weights_come_from_rank_0_or_later",
        f"checkpoints_move_between_plans:{tmp_path}",
    )


def test_optimizers_of_ones_own() -> None:
    on_ranks(
        4,
        "torchs_optimizers_step_shards:dp",
        "other_optimizers_step_what_is_shown:megatron",
        "steps_among_others:megatron",
        "sparse_adam_steps_rows_of_shards",
        "modules_and_state_dicts_are_copied:megatron",
    )


def test_whole_steps(tmp_path: Path) -> None:
    on_ranks(
        2,
        "steps_like_one_device:dp2,1,AdamW",
        "steps_like_one_device:dp2,3,two",
        f"states_are_saved_and_loaded:{tmp_path}",
        "experts_get_more_room",
        "ids_go_to_the_ranks_of_their_rows",
    )


def test_mistakes_and_programs(tmp_path: Path) -> None:
    on_ranks(
        2,
        f"saves_programs:mlp3,{tmp_path}",
        "counts_equal_the_graph:mlp3,dp2",
        "mistakes_are_errors",
        "measures_links",
    )


def test_programs_run_as_they_are_printed() -> None:
    on_ranks(
        2,
        "shared_memory_does_what_gloo_does",
        "torchs_own_calls_work_in_shared_memory",
        "runs_what_is_printed:mlp3,tp2",
        "runs_what_is_printed:gpt_fused,dp2,stored",
        "runs_compiled_and_changed:mlp3,dp2",
    )


def test_saved_programs_compute_the_same_alone(tmp_path: Path) -> None:
    """Programs of virtual ranks, run by torchrun without us."""
    case = make("gpt_fused")
    pm = plan(case, sx.Mesh(pp=2, mb=sx.Loop(2)), pipeline=sx.Pipeline())
    pm.save_programs(tmp_path)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    grads = pm.full_grads()
    printed = torchrun(2, [str(tmp_path / "run.py"), "--save"], tmp_path)
    assert "rank 1: loss:loss" in printed
    text = (tmp_path / "rank0.py").read_text()
    assert "import shardfx" not in text and "from shardfx" not in text
    everywhere = [torch.load(tmp_path / f"results{rank}.pt", weights_only=True) for rank in range(2)]
    assert {f"gradient:{name}" for name in grads} <= {*everywhere[0], *everywhere[1]}
    for results in everywhere:
        assert rel_err(results["loss:loss"], loss) < 1e-12
        for name, grad in grads.items():
            if f"gradient:{name}" in results:  # else another stage's
                assert rel_err(results[f"gradient:{name}"], grad) < 1e-12
