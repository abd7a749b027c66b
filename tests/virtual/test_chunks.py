"""Any dim sharded over time: logits a chunk at a time, chunks within iterations, what cannot lie within."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.models import Language, next_tokens
from tests.reference import check_step


def language() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randint(300, (4, 15))
    y = torch.randint(300, (4, 15))
    y[0, :11] = -100  # iterations and ranks count otherwise
    return Language(300, 16).double(), x, y


CHUNKS = {
    "chunk": (sx.Mesh(dp=2, chunk=sx.Loop(5)), {"args.0": "dp, -", "head": "dp, chunk, -"}),
    "uneven": (sx.Mesh(dp=2, chunk=sx.Loop(4)), {"args.0": "dp, -", "head": "dp, chunk, -"}),
    "iterations and chunks": (
        sx.Mesh(dp=2, mb=sx.Loop(2), chunk=sx.Loop(5)),
        {"args.0": "mb dp, -", "head": "mb dp, chunk, -"},
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("how", CHUNKS)
@pytest.mark.one_in(3)
def test_logits_exist_a_chunk_at_a_time(how: str) -> None:
    model, x, y = language()
    mesh, specs = CHUNKS[how]

    def planned(mesh: sx.Mesh, specs: dict[str, str]) -> sx.ParallelModule:
        hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs)
        return sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)

    pm, whole = planned(mesh, specs), planned(sx.Mesh(dp=2), {"args.0": "dp, -"})
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


T = sx.Loop


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


def planned(mesh: sx.Mesh, staged: bool, **options: Any) -> tuple[nn.Module, Tensor, Tensor, sx.ParallelModule]:
    torch.manual_seed(0)
    model, x, y = NestedLanguage().double(), torch.randint(30, (5, 7)), torch.randint(30, (5, 7))
    y[0, :4] = -100
    specs = {"args.0": "mb, -", "head": "mb, chunk, -"}
    pipeline = sx.Pipeline() if staged else None
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs, pipeline=pipeline, **options)
    return model, x, y, sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("iterations", "chunks"), [(1, 2), (2, 3), (3, 1), pytest.param(4, 5, marks=pytest.mark.slow)])
@pytest.mark.one_in(6)
def test_chunks_of_uneven_iterations(iterations: int, chunks: int, staged: bool) -> None:
    axes = {"pp": 2} if staged else {}
    model, x, y, pm = planned(sx.Mesh(**axes, mb=T(iterations), chunk=T(chunks)), staged)
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)


@pytest.mark.long
def test_iterations_that_lie_the_wrong_way_round_are_an_error() -> None:
    with pytest.raises(sx.Error, match=re.escape("iterations of 'mb' are within those of 'chunk'")) as error:
        planned(sx.Mesh(chunk=T(2), mb=T(2)), False)
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
        {"args.0": "mb a, -, -", "norm": "-, a, -", "head": "-, chunk, -"},
        {"args.0": "mb a, -, -", "norm": "-, a, -", "head": "-, chunk, -", "targets.0": "-, a"},
    ],
    ids=["ranks-give-way-to-chunks", "ranks-move", "ranks-of-targets"],
)
def test_iterations_go_on_where_ranks_and_chunks_want_one_dim(specs: dict[str, str]) -> None:
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


@pytest.mark.slow
def test_chunks_of_the_head_stay_behind_the_attentions() -> None:
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
