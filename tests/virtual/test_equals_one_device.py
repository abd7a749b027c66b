"""Losses, gradients, buffers and parameters are one device's, in float64: models, features, and pairs of features."""

from __future__ import annotations

import pytest

from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.pairs import FEATURES, MODELS, Names, alone_and_in_pairs, beside_one_device, model_of, planned
from tests.plans import MESHES, train_beside
from tests.zoo import CASES, WITH_SEQUENCE

EXACT = [name for name in CASES if "dropout" not in name]
MIXTURES = [name for name in EXACT if name.startswith("moe")]
SLOW = {"hf_llama", "hf_qwen3", "hf_bert", "llama", "gpt_separate", "hf_t5", "hf_vit", "unet", *MIXTURES} - {"moe_loop"}
QUICK = {("dp2tp2", name) for name in EXACT if name not in SLOW}
QUICK |= {("tp4", "llama"), ("ep2", "moe_slots")}


@pytest.mark.parametrize(
    ("mesh", "name"),
    [
        pytest.param(mesh, name, marks=() if (mesh, name) in QUICK else pytest.mark.slow)
        for mesh in MESHES
        for name in (MIXTURES if "ep" in MESHES[mesh].names else EXACT)
    ],
)
@pytest.mark.one_in(2)
def test_training_equals_one_device(mesh: str, name: str) -> None:
    assert train_beside(name, MESHES[mesh]).worst < 1e-9


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("mesh", ["dp2tp2", *(pytest.param(m, marks=pytest.mark.slow) for m in ("tp2", "2x2x2"))])
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in WITH_SEQUENCE],
)
def test_sequence_parallel_training_equals_one_device(mesh: str, name: str) -> None:
    assert train_beside(name, MESHES[mesh], sequence=True).worst < 1e-9


PAIR_QUICK = [
    ("gpt_separate", ("clip", "activations")),
    ("gpt_separate", ("tp", "zero 3")),
    ("llama", ("recompute", "zero 1")),
]
ALONE = [(model, (name,)) for name in FEATURES for model in MODELS]
PAIRS = [names for names in alone_and_in_pairs() if len(names) == 2]
LOOP_OPS = [(MODELS[i % len(MODELS)], names) for i, names in enumerate(PAIRS)]
"""Each pair on one of the models, each of which meets each feature in some."""


def slow(case: tuple[str, Names]) -> object:
    return pytest.param(*case, marks=pytest.mark.slow)


def named(case: object) -> str:
    return case if isinstance(case, str) else " + ".join(case)  # type: ignore[call-overload]


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "names"),
    [*PAIR_QUICK, *(slow(each) for each in (*ALONE, *LOOP_OPS) if each not in PAIR_QUICK)],
    ids=named,
)
def test_features_alone_and_in_pairs_equal_one_device(model: str, names: Names) -> None:
    """Losses, gradients, buffers and parameters of five steps; to the bit what changes no number; and proven."""
    memory = beside_one_device(model, names).memory()
    assert sum(memory.by_category.values()) == memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("feature", FEATURES)
def test_the_formula_of_a_peak_is_its_number(model: str, feature: str) -> None:
    """Also where something was chosen for a budget: plans for other sizes keep to the choice."""
    pm, case = planned(model, (feature,)), model_of(model)
    first = (case.args or tuple(case.kwargs.values()))[0]
    sizes = {"batch": first.shape[0], "sequence": first.shape[1], **{axis.name: axis.size for axis in pm.mesh.axes}}
    memory = pm.memory()
    assert memory.formula.subs(sizes) == memory.peak


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("feature", FEATURES)
def test_what_ranks_hold_is_predicted_call_by_call(model: str, feature: str) -> None:
    pm, case = planned(model, (feature,)), model_of(model)
    steps = pm._compiled.hints.optimizer is not None
    for run, kinds in ((pm, TRAIN), *([(pm.step, STEP)] if steps else [])):
        for rank, held in held_in_a_step(pm, case, run).items():
            check_footprint(pm._programs.running(rank, kinds), held)
