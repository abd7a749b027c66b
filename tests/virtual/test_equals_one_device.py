"""Losses, gradients, buffers and parameters are one device's, in float64: models, and features of a step together."""

from __future__ import annotations

import pytest

from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.pairs import Names, beside_one_device, hints_of, model_of
from tests.plans import MESHES, train_beside

MODELS = {
    "resnet": "dp2tp2",
    "unet": "dp2tp2",
    "hf_gpt2": "dp2tp2",
    "hf_t5": "dp2",
    "llama": "tp4",
    "gpt_separate": "2x2x2",
    "moe_loop": "dp2tp2",
    "moe_slots": "dp2ep2",
}
"""Of each kind of model the hardest mesh that it goes with."""


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_training_equals_one_device(name: str) -> None:
    assert train_beside(name, MESHES[MODELS[name]]).worst < 1e-9


@pytest.mark.long
@pytest.mark.parametrize(("name", "mesh"), [("gpt_fused", "2x2x2"), ("hf_qwen3", "dp2tp2")])
def test_sequence_parallel_training_equals_one_device(name: str, mesh: str) -> None:
    assert train_beside(name, MESHES[mesh], sequence=True).worst < 1e-9


FEATURES: list[tuple[str, Names]] = [
    ("gpt_separate", ("tp", "recompute", "clip", "activations")),
    ("llama", ("recompute", "zero 1", "two", "arena")),
    ("resnet", ("zero 3, two axes", "momentum", "disk")),
    ("tied llama", ("zero 3", "AdamW", "optimizer", "clip")),
    ("llama", ("keep", "zero 3, large", "parameters")),
    ("gpt_separate", ("memory", "Adafactor", "bfloat16")),
]


@pytest.mark.long
@pytest.mark.parametrize(("model", "names"), FEATURES, ids=[" + ".join(names) for _, names in FEATURES])
def test_features_together_equal_one_device(model: str, names: Names) -> None:
    """Losses, gradients, buffers and parameters of five steps; to the bit what changes no number; and proven. The
    figure of memory is the sum of its parts, its formula's value, and what ranks hold call by call."""
    pm, case = beside_one_device(model, names), model_of(model)
    memory = pm.memory()
    assert sum(memory.by_category.values()) == memory.peak
    first = (case.args or tuple(case.kwargs.values()))[0]
    sizes = {"batch": first.shape[0], "sequence": first.shape[1], **{axis.name: axis.size for axis in pm.mesh.axes}}
    assert memory.formula.subs(sizes) == memory.peak
    steps = "optimizer" in hints_of(names)[1]
    for run, kinds in ((pm, TRAIN), *([(pm.step, STEP)] if steps else [])):
        for rank, held in held_in_a_step(pm, case, run).items():
            check_footprint(pm._programs.running(rank, kinds), held)
