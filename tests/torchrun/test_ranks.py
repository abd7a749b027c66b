"""Whole programs on real processes (gloo): what one device computes, and what torch's own tools ask of a module.

A launch costs more than most of what is tested in it, so that one launch makes several calls.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.reference import rel_err
from tests.torchrun.launch import on_ranks, torchrun
from tests.zoo import make


def test_models_train_like_one_device_and_send_what_their_graph_says() -> None:
    llama = make("hf_llama")
    on_ranks(
        4,
        "trains_like_one_device:gpt_fused,dp2tp2",
        "counts_equal_the_graph:gpt_fused,dp2tp2",
        f"trains_like_one_device:hf_llama,dp2tp2,{llama.tolerance},{llama.trained_tolerance}",
        "counts_equal_the_graph:hf_llama,dp2tp2",
        timeout=240,
    )


def test_calling_and_checkpoints(tmp_path: Path) -> None:
    on_ranks(
        4,
        "takes_global_or_local_batches",
        "accumulates_and_scales_gradients",
        "dropout_is_drawn_by_rank_0",
        "what_dtensor_cannot_say_is_an_error",
        "weights_come_from_rank_0_or_later",
        f"checkpoints_move_between_plans:{tmp_path}",
    )


def test_mistakes_and_compiled_programs() -> None:
    on_ranks(2, "mistakes_are_errors", "compiles_whole:mlp3,dp,aot_eager", "compiles_whole:mlp3,tp,aot_eager")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_programs_compile_with_inductor(axis: str) -> None:
    on_ranks(2, f"compiles_whole:gpt_fused,{axis},inductor", timeout=500)


def test_saved_programs_compute_the_same_alone(tmp_path: Path) -> None:
    folder = tmp_path / "programs"
    on_ranks(2, f"saves_programs:gpt_fused,{folder}")
    printed = torchrun(2, [str(folder / "run.py"), "--save"], cwd=folder)
    assert "rank 1: loss:loss" in printed
    imports = [line for line in (folder / "rank0.py").read_text().splitlines() if "import" in line]
    assert not [line for line in imports if "shardfx" in line]
    for rank in range(2):
        expected = torch.load(folder / f"expected{rank}.pt", weights_only=True)
        results = torch.load(folder / f"results{rank}.pt", weights_only=True)
        assert set(expected) <= set(results)
        assert max(rel_err(results[name], value) for name, value in expected.items()) < 1e-12
