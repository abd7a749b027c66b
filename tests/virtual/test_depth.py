"""Equal blocks planned once, or one by one: the plan of a deep model is the same text, with the same reasons."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch

import shardfx as sx
from shardfx.ir.capture.trace import capture
from tests.plans import MESHES, plan
from tests.zoo import Case, make

DEPTH = 7
STORED = {
    "hf_llama": {"model.layers.*.mlp.up_proj.weight": "tp, dp", "model.layers.*.self_attn.o_proj.weight": "dp, tp"},
    "hf_gpt2": {"transformer.h.*.mlp.c_fc.weight": "dp, tp", "transformer.h.*.attn.c_proj.weight": "tp, dp"},
    "hf_gpt2_dropout": {},
    "hf_bert": {"bert.encoder.layer.*.intermediate.dense.weight": "tp, dp"},
}
CASES = [(name, how) for name in STORED for how in ("plain", "sequence", "stored")]


def deep(name: str) -> Case:
    """A case of the zoo with more blocks."""
    case = make(name)
    config = copy.deepcopy(case.model.config)
    config.num_hidden_layers = DEPTH
    with torch.device("meta"):
        return replace(case, model=type(case.model)(config).double().train())


def planned(name: str, how: str) -> sx.ParallelModule:
    more = STORED[name] if how == "stored" else {}
    return plan(deep(name), MESHES["dp2tp2"], sequence=how == "sequence", specs=more)


@pytest.mark.parametrize(("name", "how"), [pytest.param(*case, marks=pytest.mark.slow) for case in CASES])
def test_the_plan_is_the_same(name: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    short = planned(name, how)
    monkeypatch.setattr("shardfx.compile.capture", partial(capture, fold=False))
    whole = planned(name, how)
    assert short._compiled.captured.graph.repeats and not whole._compiled.captured.graph.repeats
    assert short.after.notes == whole.after.notes
    assert str(short.before) == str(whole.before)
    assert str(short.after) == str(whole.after)
    assert [(node.made_by, node.why) for node in short.after.nodes] == [(n.made_by, n.why) for n in whole.after.nodes]
    assert short.plan == whole.plan
    for value in [*(given.name for given in short.after.inputs), *(f"%{node.name}" for node in short.after.nodes[::9])]:
        assert str(short.explain(value)) == str(whole.explain(value))


WHOLE = (torch.ops.aten._native_batch_norm_legit_functional.default, torch.ops.aten._native_batch_norm_legit.default)
"""Those that make their own statistics, of all that they are given."""


def test_batch_norms_one_behind_the_other_are_taken_apart_however_many() -> None:
    """Each is in the way of the cut of the batch, which the next one sees only when it is out of it."""
    torch.manual_seed(0)
    model, x = (
        torch.nn.Sequential(*[torch.nn.BatchNorm1d(2) for _ in range(10)]).double(),
        torch.randn(6, 2, dtype=torch.float64),
    )
    hints = sx.Hints(args=(x,), loss=lambda out: (out**3).sum(), specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert not [node for node in pm.after.nodes if node.op in WHOLE]
    alone, together = (model(x) ** 3).sum(), pm(x)
    alone.backward()
    together.backward()
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-9)
    for name, grad in pm.full_grads().items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-7, atol=1e-9)
