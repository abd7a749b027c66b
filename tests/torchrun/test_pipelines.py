"""Pipelines on real processes (gloo): what one device computes, and what torch's own tools ask of a module."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.torchrun.launch import on_ranks


@pytest.mark.long
def test_pipelines_on_two_ranks(tmp_path: Path) -> None:
    on_ranks(
        2,
        "pipelines_hold_what_is_predicted:gpt_fused,pp2",
        "pipelines_hold_what_is_predicted:gpt_fused,pp2,1f1b,gloo",
        "ranks_hold_their_own_stages:pp2,first",
        "pipelines_serve_torchs_tools:pp2",
        "pipelines_step_like_one_device:pp2",
        "pipelines_train_by_stream:gpt_fused,pp2",
        "interleaved_iterations_train_like_one_device:gpt_fused",
        f"checkpoints_move_between_pipelines:{tmp_path}/whole,pp2,dp2",
        "compiled_stages_on_gloo:eager,mlp,pp2,,1f1b",
    )


@pytest.mark.slow
def test_pipelines_on_four_ranks() -> None:
    on_ranks(
        4,
        "pipelines_train_like_one_device:gpt_fused,dp2pp2,3",
        "pipelines_serve_torchs_tools:pp2dp2",
        "pipelines_step_like_one_device:pp4",
        "pipelines_train_by_stream:gpt_fused,pp2dp2,gpipe",
    )


@pytest.mark.slow
def test_other_forms_of_call_keep_the_stages() -> None:
    on_ranks(2, "pipelines_are_called_in_other_forms:pp2", "pipelines_give_inputs_gradients")
    on_ranks(4, "pipelines_are_called_in_other_forms:pp2dp2")


@pytest.mark.slow
def test_stages_on_several_machines() -> None:
    whose = [f"ranks_hold_their_own_stages:pp2,{weights}" for weights in ("whole", "later")]
    on_ranks(2, "pipelines_hold_what_is_predicted:gpt_fused,pp2,gpipe,gloo", *whose)
    on_ranks(2, "pipelines_train_on_gloo:gpt_fused,pp2", "pipelines_train_on_gloo:unet,pp2")
    on_ranks(4, "pipelines_train_on_gloo:gpt_fused,pp2dp2")


@pytest.mark.slow
@pytest.mark.parametrize("zero", ["0", "1", "3"])
def test_models_train_in_stages_like_one_device(zero: str) -> None:
    names = ("gpt_fused", "hf_t5", "unet")
    on_ranks(2, *(f"pipelines_train_like_one_device:{name},pp2" for name in names))
    plans = ("dp2pp2", "pp2dp2", *(["pp2tp2"] if zero == "0" else []))
    on_ranks(4, *(f"pipelines_train_like_one_device:{name},{plan},{zero}" for name in names for plan in plans))


@pytest.mark.slow
def test_checkpoints_move_between_pipelines(tmp_path: Path) -> None:
    on_ranks(
        2,
        f"checkpoints_move_between_pipelines:{tmp_path}/torchs,pp2,pp2uneven,pp2chunks,dp2",
        f"program_states_move_between_pipelines:{tmp_path}/ours,pp2,pp2uneven,pp2chunks,dp2",
    )
    on_ranks(
        4,
        f"checkpoints_move_between_pipelines:{tmp_path}/four,pp4,pp2dp2,dp4",
        f"program_states_move_between_pipelines:{tmp_path}/four_ours,pp4,pp2dp2,dp4",
    )
