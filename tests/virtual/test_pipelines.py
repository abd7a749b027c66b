"""Stages: loss and gradients of the whole batch on one device, by every schedule; proven, and damaged ones refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.program.program_text import parse_program
from tests.live_memory import held_in_a_step
from tests.plans import plan, train_beside
from tests.reference import rel_err
from tests.zoo import Case, make

slow = pytest.mark.slow
TOGETHER: dict[str, tuple[sx.Mesh, dict[str, Any]]] = {
    "dp": (sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)), {}),
    "tp": (sx.Mesh(pp=2, tp=2, mb=sx.Loop(3)), {}),
    "dp tp": (sx.Mesh(dp=2, pp=2, tp=2, mb=sx.Loop(2)), {}),
    "zero 1": (sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)), {"zero": 1, "zero_min_numel": 0}),
    "zero 2": (sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)), {"zero": 2, "zero_min_numel": 0}),
    "zero 3": (sx.Mesh(pp=2, dp=2, mb=sx.Loop(2)), {"zero": 3, "zero_min_numel": 0}),
    "halves": (sx.Mesh(pp=2, dp=2, mb=sx.Loop(4)), {"pipeline": sx.Pipeline(schedule="zb-h1")}),
    "no iterations": (sx.Mesh(pp=2, dp=2), {"pipeline": sx.Pipeline(microbatches="", schedule="gpipe")}),
}
NAMES = ["mlp3", "gpt_fused", "llama", "unet", "moe_loop", "hf_gpt2", "hf_t5", "hf_bert", "hf_vit"]
QUICK = {("mlp3", "dp tp"), ("mlp3", "no iterations")}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [pytest.param(n, how, marks=() if (n, how) in QUICK else slow) for n in NAMES for how in TOGETHER],
)
@pytest.mark.one_in(2)
def test_stages_go_with_other_axes(name: str, how: str) -> None:
    mesh, hints = TOGETHER[how]
    hints = {"pipeline": sx.Pipeline(), **hints}
    rows = " ".join(axis for axis in ("mb", "dp") if axis in mesh.names)
    case = make(name)
    named = {f"args.{i}": t for i, t in enumerate(case.args)} | {f"targets.{i}": t for i, t in enumerate(case.targets)}
    named |= {f"kwargs.{key}": t for key, t in case.kwargs.items()}
    specs = {key: ", ".join([rows] + ["-"] * (t.dim() - 1)) for key, t in named.items()}
    assert train_beside(name, mesh, specs=specs, steps=2, **hints).worst < 1e-9
    assert plan(make(name), mesh, specs=specs, **hints).verify()


def test_a_message_has_a_tag_of_its_own() -> None:
    pm = three_stages()
    sent = next(node for node in pm.planned.nodes if str(node.op) == "comm.send")
    with pytest.raises(sx.Error, match="a tag below"):
        sent.op.place(sent.operands[0].spec, sent.operands[0].shape, pm.mesh, **{**sent.kwargs, "tag": 1 << 14})


@pytest.mark.long
def test_other_forms_of_call_have_the_same_stages() -> None:
    """Also where a stage begins with a block that multiplies nothing."""
    torch.manual_seed(0)
    layers = [nn.Conv1d(4, 4, 1), nn.AvgPool1d(2), nn.Flatten()]
    model = nn.Sequential(nn.Sequential(*layers), nn.Dropout(0.1), nn.Linear(8, 5)).double()
    x, y = torch.randn(6, 4, 4).double(), torch.randint(5, (6,))
    hints = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), pipeline=sx.Pipeline())
    pm = sx.parallelize(model, sx.Mesh(pp=2, mb=sx.Loop(3)), hints)
    pm(x, y).backward()
    pm.eval()
    assert rel_err(pm(x, y), F.cross_entropy(model.eval()(x), y)) < 1e-9
    with torch.no_grad():
        assert rel_err(pm(x[:3]), model(x[:3])) < 1e-9


@slow
def test_results_evaluation_and_buffers_are_those_of_iterations_alone() -> None:
    found = []
    for mesh, pipeline in ((sx.Mesh(one=1, mb=sx.Loop(4)), None), (sx.Mesh(pp=2, mb=sx.Loop(4)), sx.Pipeline())):
        case = make("resnet")
        specs = {"args.0": "mb, -, -, -", "targets.0": "mb"}
        pm = plan(case, mesh, specs=specs, pipeline=pipeline, batch_stats="microbatch")
        loss, out = pm(*case.args, *case.targets, with_results=True)
        loss.backward()
        pm.eval()
        with torch.no_grad():
            after = pm(*case.args, *case.targets)
        assert pm.verify()
        found.append([loss, out, after, *pm.full_grads().values(), *pm.full_state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


# ---- memory


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zb-h1"])
def test_a_rank_holds_what_a_run_holds(name: str) -> None:
    case = make("mlp3")
    mesh = sx.Mesh(pp=2, mb=sx.Loop(4))
    pm = plan(case, mesh, specs={"args.0": "mb, -", "targets.0": "mb"}, pipeline=sx.Pipeline(schedule=name))
    held = held_in_a_step(pm, case)
    for rank in range(pm.mesh.size):
        program = pm.rank_program(rank)
        footprint = replay(program)
        sent = 4 * 2 * 64 * 8  # what goes to the other stage in four iterations, while it is under way
        assert footprint.peak.nbytes <= held[rank].peak <= footprint.peak.nbytes + sent


# ---- the programs


def three_stages() -> sx.ParallelModule:
    case: Case = make("mlp3")
    mesh, specs = sx.Mesh(pp=3, mb=sx.Loop(4)), {"args.0": "mb, -", "targets.0": "mb"}
    stages = (("fc1",), ("fc2",), ("fc3",))
    return plan(case, mesh, specs=specs, pipeline=sx.Pipeline(stages=stages))


def test_a_rank_has_what_is_of_its_stages_as_text_and_as_a_module() -> None:
    pm = three_stages()
    for rank, layer in enumerate(("fc1", "fc2", "fc3")):
        program = pm.rank_program(rank)
        names = {given.name for given in program.inputs if given.kind == "parameter"}
        assert names == {f"{layer}.weight", f"{layer}.bias"}
        assert str(parse_program(str(program), pm.planned)) == str(program)
        assert f"F{rank}.1" in program.module().code
