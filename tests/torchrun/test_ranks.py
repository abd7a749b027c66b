"""Whole programs on real processes (gloo): what one device computes, and what torch's own tools ask of a module.

A launch costs more than most of what is tested in it, so that one launch makes several calls.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import shardfx as sx
from tests.plans import MESHES, plan
from tests.reference import rel_err
from tests.torchrun.launch import on_ranks, torchrun
from tests.zoo import CASES, make


def test_models_train_like_one_device_and_send_what_their_graph_says() -> None:
    on_ranks(4, "trains_like_one_device:gpt_fused,dp2tp2", "counts_equal_the_graph:gpt_fused,dp2tp2")


@pytest.mark.slow
def test_a_model_of_others_trains_like_one_device() -> None:
    llama = make("hf_llama")
    on_ranks(
        4,
        f"trains_like_one_device:hf_llama,dp2tp2,{llama.tolerance},{llama.trained_tolerance}",
        "counts_equal_the_graph:hf_llama,dp2tp2",
        timeout=240,
    )


@pytest.mark.long
def test_calling_and_checkpoints(tmp_path: Path) -> None:
    on_ranks(
        4,
        "takes_global_or_local_batches",
        "evaluates_with_the_trained_weights",
        "accumulates_and_scales_gradients",
        "dropout_is_drawn_by_rank_0:dropout_mlp,dp2tp2",
        "what_dtensor_cannot_say_is_an_error",
        "weights_come_from_rank_0_or_later",
        f"checkpoints_move_between_plans:{tmp_path}",
    )


@pytest.mark.long
def test_optimizers_of_ones_own() -> None:
    on_ranks(
        4,
        "torchs_optimizers_step_shards:dp",
        "other_optimizers_step_what_is_shown:megatron",
        "steps_among_others:megatron",
        "modules_and_state_dicts_are_copied:megatron",
    )


@pytest.mark.slow
def test_optimizers_of_ones_own_on_all_plans() -> None:
    for call in ("torchs_optimizers_step_shards", "modules_and_state_dicts_are_copied"):
        on_ranks(4, *(f"{call}:{name}" for name in ("megatron", "crossed", "tp")))


@pytest.mark.long
def test_whole_steps(tmp_path: Path) -> None:
    on_ranks(
        2,
        "steps_like_one_device:dp2,1,AdamW",
        "steps_like_one_device:dp2,3,two",
        f"states_are_saved_and_loaded:{tmp_path}",
    )


@pytest.mark.slow
def test_what_is_offloaded_is_not_compiled() -> None:
    on_ranks(2, "steps_are_compiled_around_what_is_offloaded:eager")


@pytest.mark.slow
def test_tables_stay_in_the_host() -> None:
    on_ranks(2, "tables_stay_in_the_host:dp2,1", "tables_stay_in_the_host:dp2,3", "tables_stay_in_the_host:tp2,0")


@pytest.mark.slow
def test_whole_steps_on_two_axes() -> None:
    on_ranks(4, *(f"steps_like_one_device:dp2tp2,{zero},AdamW,Adafactor,Lamb,dampening,two" for zero in (0, 1, 3)))


@pytest.mark.slow
def test_checkpoints_move_between_all_plans(tmp_path: Path) -> None:
    on_ranks(4, f"checkpoints_move_between_plans:{tmp_path},all")


@pytest.mark.long
def test_mistakes_and_programs(tmp_path: Path) -> None:
    on_ranks(
        2,
        f"saves_programs:mlp3,{tmp_path}",
        "counts_equal_the_graph:mlp3,dp2",
        "trains_in_less_memory:gpt_fused,dp2,layers.*",
        "compiles_whole:mlp3,dp,aot_eager",
        "compiles_whole:mlp3,tp,aot_eager",
        "mistakes_are_errors",
        "measures_links",
    )


@pytest.mark.slow
def test_shared_memory_of_three_ranks() -> None:
    on_ranks(3, "shared_memory_does_what_gloo_does", "torchs_own_calls_work_in_shared_memory")


@pytest.mark.long
def test_programs_run_as_they_are_printed() -> None:
    on_ranks(
        2,
        "shared_memory_does_what_gloo_does",
        "torchs_own_calls_work_in_shared_memory",
        "is_proven:mlp3,dp2",
        "runs_what_is_printed:mlp3,tp2",
        "runs_what_is_printed:gpt_fused,dp2,stored",
        "times_collectives:mlp3,dp2",
        "runs_compiled_and_changed:mlp3,dp2",
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", CASES)
def test_every_model_runs_as_it_is_printed_and_holds_what_is_predicted(name: str) -> None:
    on_ranks(2, *(f"runs_what_is_printed:{name},{how}" for how in ("tp2", "dp2", "dp2,stored")), timeout=500)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("axis", ["dp", "tp"])
def test_programs_compile_with_inductor(axis: str) -> None:
    on_ranks(2, f"compiles_whole:gpt_fused,{axis},inductor", timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "hints"),
    [(MESHES["tp2"], {}), (sx.Mesh(pp=2, mb=sx.Loop(2)), {"pipeline": sx.Pipeline()})],
    ids=["tp", "pipeline"],
)
def test_saved_programs_compute_the_same_alone(mesh: sx.Mesh, hints: dict[str, Any], tmp_path: Path) -> None:
    """Programs of virtual ranks, run by torchrun without us."""
    case = make("gpt_fused")
    pm = plan(case, mesh, **hints)
    pm.save_programs(tmp_path)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    printed = torchrun(2, [str(tmp_path / "run.py"), "--save"], tmp_path)
    assert "rank 1: loss:loss" in printed
    text = (tmp_path / "rank0.py").read_text()
    assert "import shardfx" not in text
    assert "from shardfx" not in text
    everywhere = [torch.load(tmp_path / f"results{rank}.pt", weights_only=True) for rank in range(2)]
    assert {f"gradient:{name}" for name in pm._state.store.parameters} <= {*everywhere[0], *everywhere[1]}
    for rank, results in enumerate(everywhere):
        assert rel_err(results["loss:loss"], loss) < 1e-12
        for name, shards in pm._state.store.parameters.items():
            if f"gradient:{name}" in results:  # else another stage's
                grad = shards[pm._state.store._layouts[name].by_rank[rank]].grad
                assert rel_err(results[f"gradient:{name}"], grad) < 1e-12


def test_what_is_measured_is_that_of_all_ranks(tmp_path: Path) -> None:
    on_ranks(4, f"records_steps:gpt_fused,dp2tp2,{tmp_path}")
