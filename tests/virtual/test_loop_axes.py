"""Loop axes over any dim: logits a chunk at a time, chunks within micro-batches, interleaved iterations."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.loops.loop_regions import ActionOrder, action_order
from tests.damage_loops import reordered
from tests.models import Language, next_tokens
from tests.plans import plan, specs_of
from tests.reference import check_step, rel_err, single_device
from tests.zoo import make

T = sx.Loop


def language() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randint(300, (4, 15))
    y = torch.randint(300, (4, 15))
    y[0, :11] = -100  # iterations and ranks count otherwise
    return Language(300, 16).double(), x, y


@pytest.mark.long
def test_logits_exist_a_chunk_at_a_time() -> None:
    model, x, y = language()

    def planned(mesh: sx.Mesh, specs: dict[str, str]) -> sx.ParallelModule:
        hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs)
        return sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)

    chunked = {"args.0": "dp, -", "head": "dp, chunk, -"}
    pm, whole = planned(sx.Mesh(dp=2, chunk=T(5)), chunked), planned(sx.Mesh(dp=2), {"args.0": "dp, -"})
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)
    assert pm.memory(0).footprint.peak.of("activations") < whole.memory(0).footprint.peak.of("activations") / 2


@pytest.mark.parametrize("sizes", [(2, 5), (4, 3)])
def test_iterations_within_iterations_end_first(sizes: tuple[int, int]) -> None:
    """Whichever of the axes has more iterations, and in whatever order a set of their names is."""
    model, x, y = language()
    mesh = sx.Mesh(dp=1, mb=sx.Loop(sizes[0]), chunk=sx.Loop(sizes[1]))
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "mb, -", "head": "mb, chunk, -"})
    graph = sx.parallelize(model, mesh, hints, virtual=True).planned
    over = [node.kwargs["axes"][0] for node in graph.nodes if str(node.op) == "comm.all_reduce"]
    assert {"mb", "chunk"} == set(over)
    for node in graph.nodes:
        if str(node.op) == "comm.all_reduce" and node.kwargs["axes"] == ["mb"]:
            assert all(v.spec is not None and "chunk" not in v.spec.partial_axes for v in node.operands)


class NestedLanguage(nn.Module):
    """Logits that a buffer scales, and positions shift, so that chunks take rows of constants."""

    def __init__(self, vocabulary: int = 30, width: int = 8) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(vocabulary, width), nn.ModuleList()
        self.layers.extend(nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer("scale", torch.rand(7, vocabulary))

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return self.head(y) * self.scale + torch.arange(x.shape[1], dtype=y.dtype)[None, :, None]


def planned(mesh: sx.Mesh) -> tuple[nn.Module, Tensor, Tensor, sx.ParallelModule]:
    torch.manual_seed(0)
    model, x, y = NestedLanguage().double(), torch.randint(30, (5, 7)), torch.randint(30, (5, 7))
    y[0, :4] = -100
    specs = {"args.0": "mb, -", "head": "mb, chunk, -"}
    pipeline = sx.Pipeline() if "pp" in mesh.names else None
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs, pipeline=pipeline)
    return model, x, y, sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)


@pytest.mark.long
def test_uneven_chunks_within_uneven_iterations_equal_one_device() -> None:
    model, x, y, pm = planned(sx.Mesh(pp=2, mb=T(2), chunk=T(3)))
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)


@pytest.mark.long
def test_loop_axes_in_the_wrong_order_are_an_error() -> None:
    with pytest.raises(sx.Error, match=re.escape("iterations of 'mb' are within those of 'chunk'")) as error:
        planned(sx.Mesh(chunk=T(2), mb=T(2)))
    assert "let 'mb' stand in front of 'chunk' in the mesh" in str(error.value)


class Normed(nn.Module):
    """Group norms, whose output a hint shardings over ranks otherwise than it comes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.head = nn.Linear(6, 12), nn.GroupNorm(2, 6), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.norm(self.up(x))))


@pytest.mark.long
@pytest.mark.parametrize(
    "specs",
    [
        {"args.0": "mb, a, -", "head": "-, chunk, -"},
        {"args.0": "mb a, -, -", "norm": "-, a, -", "head": "-, chunk, -", "targets.0": "-, a"},
    ],
    ids=["ranks-give-way-to-chunks", "ranks-of-targets"],
)
def test_ranks_and_chunks_that_want_one_dim_equal_one_device(specs: dict[str, str]) -> None:
    """Who wins the other axes: a value stays in the iterations in which it is made, and what chunks sharded is sharded
    by both."""
    torch.manual_seed(0)
    model, x, y = Normed().double(), torch.randn(8, 6, 6).double(), torch.randn(8, 6).double()

    def loss_of(out: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(out.sum(-1), targets)

    hints = sx.Hints(args=(x,), loss=loss_of, targets=(y,), specs=specs)
    pm = sx.parallelize(model, sx.Mesh(a=2, mb=T(4), chunk=T(2)), hints, virtual=True)
    check_step(pm, model, loss_of, (x,), (y,), proven=False)


class Attending(nn.Module):
    """A small GPT whose head is tied: what chunks of the logits must not come back into are attentions."""

    def __init__(self, vocabulary: int = 64, width: int = 16, blocks: int = 2) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocabulary, width)
        self.qkv = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(blocks))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tok.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.tok(x)
        for qkv in self.qkv:
            q, k, v = qkv(y).unsqueeze(1).chunk(3, -1)
            y = y + F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        return self.head(y)


@pytest.mark.long
def test_chunks_of_a_tied_head_stay_behind_the_attentions() -> None:
    """In the last stage of a pipeline too: forward and backward of the chunks stand in its backward."""
    torch.manual_seed(0)
    model, x, y = Attending().double(), torch.randint(64, (8, 9)), torch.randint(64, (8, 9))
    y[0, :5] = -100
    pipeline, mesh = sx.Pipeline(), sx.Mesh(pp=2, mb=sx.Loop(4), chunk=sx.Loop(3))
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"head": "-, chunk, -"}, pipeline=pipeline)
    pm = sx.parallelize(model, mesh, hints, virtual=True)
    sharding = [node for node in pm.planned.nodes if any(v.spec and "chunk" in v.spec.axes for v in node.outs)]
    assert {node.where.module for node in sharding if not str(node.op).startswith("comm.")} == {"head", "loss"}
    check_step(pm, model, next_tokens, (x,), (y,))


# ---- interleaved iterations: one's collectives travel while another one computes


def interleaved_plan(
    name: str, sequence: bool = False, iterations: int = 2, interleave: bool = True, axes: Any = (), **hints: Any
) -> sx.ParallelModule:
    """The plan of a case whose batch is split into iterations, before ranks shard it."""
    case = make(name)
    mesh = sx.Mesh(mb=T(iterations, interleave=interleave), **dict(axes))
    rows = "mb dp" if "dp" in axes else "mb"
    inputs = [(f"args.{i}", t) for i, t in enumerate(case.args)] + [(f"kwargs.{k}", t) for k, t in case.kwargs.items()]
    specs = specs_of(case, mesh, sequence)
    if sequence:
        specs |= {key: rows + specs[key][specs[key].index(",") :] for key in case.sequence_specs or {}}
    specs |= {name: ", ".join([rows, *["-"] * (t.dim() - 1)]) for name, t in inputs}
    specs |= {f"targets.{i}": ", ".join([rows, *["-"] * (t.dim() - 1)]) for i, t in enumerate(case.targets)}
    return plan(case, mesh, specs=specs, **hints)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", {"axes": {"dp": 2, "tp": 2}, "sequence": True, "recompute": "layers.*"}),
        ("gpt_fused", {"axes": {"dp": 2}, "iterations": 3, "zero": 3, "zero_min_numel": 0}),
        ("gpt_fused", {"axes": {"pp": 2, "tp": 2}, "iterations": 4, "pipeline": sx.Pipeline()}),
    ],
    ids=["tokens over tp", "zero 3", "in stages"],
)
def test_interleaved_iterations_equal_the_whole_batch_on_one_device(name: str, how: dict[str, Any]) -> None:
    case, reference, pm = make(name), single_device(make(name), 1), interleaved_plan(name, **how)
    loss = pm(*case.args, *case.targets, **case.kwargs)
    loss.backward()
    grads = pm.full_grads()
    assert rel_err(loss, reference.losses[0]) < 1e-9
    assert max(rel_err(grads[key], each) for key, each in reference.grads.items()) < 1e-9
    assert "loop.action" in str(pm.rank_program(0))
    verdict = pm.verify()
    assert verdict.status == "proven", verdict


@cache
def beside(interleave: bool) -> sx.ParallelModule:
    return interleaved_plan("gpt_fused", sequence=True, interleave=interleave, axes={"tp": 2})


@pytest.mark.long
def test_interleaving_exposes_less_communication() -> None:
    fast = sx.Machine.load("accelerator")
    slow = replace(fast, flops={name: rate / 1e4 for name, rate in fast.flops.items()}, bandwidth=fast.bandwidth / 1e4)
    behind, interleaved = (beside(each).timeline(slow) for each in (False, True))
    assert interleaved.exposed < 0.5 * behind.exposed
    assert interleaved.step < behind.step
    for timeline in (behind, interleaved):
        assert 0 <= timeline.bubble < 1e-9
    first, second = (interleaved.segments(sx.schedules.Action("F", 0, iteration)) for iteration in range(2))
    assert len(first) > 1
    assert len(second) > 1
    assert first[0].end <= second[0].start < first[1].start
    assert sum(each.length for row in (first, second) for each in row) <= interleaved.step


@pytest.mark.long
def test_interleave_pass_sets_the_iterations_in_flight() -> None:
    case = make("mlp3")
    specs = {"args.0": "mb, -", "targets.0": "mb", "fc1.weight": "tp, -", "fc2.weight": "-, tp"}
    mesh = sx.Mesh(mb=sx.Loop(4, interleave=True), tp=2)
    for copies in (1, 2, 3):
        hints = {"specs": specs, "rank_passes": [f"interleave{{copies={copies}}}"]}
        program = plan(case, mesh, **hints).rank_program(0)
        begin = next(node for node in reversed(program.graph.nodes) if node.target is loop_ops.begin)
        assert ActionOrder.of(action_order(begin).split()).in_flight == copies
    with pytest.raises(sx.Error, match="1 or more"):
        plan(case, mesh, specs=specs, rank_passes=["interleave{copies=0}"])


@pytest.mark.long
def test_ranks_that_run_iterations_in_another_order_are_refused() -> None:
    pm, other = beside(True), {"0": "1", "1": "0"}
    program = pm.rank_program(1)
    reordered(lambda words: [word[:-1] + other[word[-1]] for word in words])(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.fault is not None and verdict.fault.rank is not None
