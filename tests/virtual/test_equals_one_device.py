"""Loss, every gradient, every buffer and the parameters after three AdamW steps equal one device's, in float64."""

from __future__ import annotations

import pytest

from tests.plans import MESHES, plan, train_beside
from tests.reference import rel_err, single_device
from tests.zoo import CASES, WITH_SEQUENCE, make

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


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["gpt_fused", "unet", "resnet", "hf_vit"])
def test_outputs_equal_one_device(name: str) -> None:
    """The first call, before any step: a batch norm in training mode moves its buffers at every call."""
    import torch.utils._pytree as pytree

    reference = single_device(make(name), steps=1)
    case = make(name)
    pm = plan(case, MESHES["dp2tp2"])
    outputs = [o for o in pytree.tree_leaves(pm(*case.args, **case.kwargs)) if hasattr(o, "shape")]
    assert len(outputs) == len(reference.outputs)
    assert max(rel_err(a, b) for a, b in zip(outputs, reference.outputs, strict=True)) < 1e-9
