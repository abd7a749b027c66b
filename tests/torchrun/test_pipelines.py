"""Pipelines on real processes (gloo): what one device computes, and what torch's own tools ask of a module."""

from __future__ import annotations

from pathlib import Path

from tests.deep import CHUNKS
from tests.torchrun.launch import on_ranks


def test_pipelines_on_two_ranks(tmp_path: Path) -> None:
    on_ranks(
        2,
        "pipelines_hold_what_is_predicted:gpt_fused,pp2",
        "pipelines_hold_what_is_predicted:gpt_fused,pp2,1f1b,gloo",
        "ranks_hold_their_own_stages:pp2",
        "pipelines_serve_torchs_tools:pp2",
        "pipelines_step_like_one_device:pp2",
        "pipelines_train_by_stream:gpt_fused,pp2",
        "interleaved_iterations_train_like_one_device:gpt_fused",
        f"checkpoints_move_between_pipelines:{tmp_path}/whole,pp2,dp2",
        f"stages_are_the_whole_batch:{','.join(CHUNKS)}",
        "compiled_stages_on_gloo:eager,1f1b",
    )


def test_pipelines_on_four_ranks() -> None:
    on_ranks(4, "pipelines_train_like_one_device:gpt_fused,dp2pp2,3")
