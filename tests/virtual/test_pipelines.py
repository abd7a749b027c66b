"""Pipelines: loss, gradients and buffers of one device, by every schedule and with other axes; proven."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.program.program_text import parse_program
from tests.deep import CHUNKS, alone, deep, in_stages, worst
from tests.live_memory import held_in_a_step
from tests.plans import plan, train_beside
from tests.reference import rel_err
from tests.zoo import Case, make


def zero(level: int) -> dict[str, Any]:
    return {"zero": level, "zero_min_numel": 0}


def check_stages(name: str, schedule: str, mesh: sx.Mesh, **hints: Any) -> None:
    """A model of as many blocks as there are stages equals one device, and is proven."""
    chunks, count = CHUNKS.get(schedule, 1), mesh["mb"].size
    case = deep(name, mesh["pp"].size * chunks, count, mesh["dp"].size if "dp" in mesh.names else 1)
    pm = in_stages(case, mesh, pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks), **hints)
    assert worst(pm, case, alone(case, count)) < 1e-9
    assert pm.verify()


@pytest.mark.long
@pytest.mark.parametrize("schedule", [*CHUNKS, "auto"])
def test_every_schedule_equals_one_device(schedule: str) -> None:
    """Micro-batches are no multiple of the ranks, nor rows of the micro-batches."""
    check_stages("mlp", schedule, sx.Mesh(pp=3, mb=sx.Loop(7)))


TOGETHER: dict[str, tuple[str, str, sx.Mesh, dict[str, Any]]] = {
    "a language model": ("gpt", "zb-h1", sx.Mesh(pp=2, mb=sx.Loop(5)), {}),
    "statistics of a batch": ("resnet", "1f1b", sx.Mesh(pp=2, mb=sx.Loop(3)), {}),
    "zero 3, recompute": ("mlp", "zb-h1", sx.Mesh(dp=2, tp=2, pp=2, mb=sx.Loop(5)), {"recompute": "**.1"} | zero(3)),
    "zero 2": ("mlp", "interleaved", sx.Mesh(pp=2, dp=2, mb=sx.Loop(5)), zero(2)),
    "offload": ("mlp", "dualpipev", sx.Mesh(pp=2, dp=2, mb=sx.Loop(5)), {"offload": "activations"}),
}


@pytest.mark.long
@pytest.mark.parametrize("what", TOGETHER)
def test_stages_with_other_axes_and_features_equal_one_device(what: str) -> None:
    """Stages are the outermost axis, or the innermost."""
    name, schedule, mesh, hints = TOGETHER[what]
    if "offload" in hints:
        hints = {"offload": (sx.Offload(("activations",), min_numel=1),)}
    check_stages(name, schedule, mesh, **hints)


@pytest.mark.long
def test_stages_without_micro_batches_equal_one_device() -> None:
    mesh, specs = sx.Mesh(pp=2, dp=2), {"args.0": "dp, -", "targets.0": "dp"}
    pipeline = sx.Pipeline(microbatches="", schedule="gpipe")
    assert train_beside("mlp3", mesh, specs=specs, steps=2, pipeline=pipeline).worst < 1e-9


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


# ---- memory


@pytest.mark.long
@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
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
