"""Chunks within iterations: of any number of rows, of constants, in stages; and what cannot lie within."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.deep import alone, deep, in_stages, worst
from tests.reference import check_step

T = sx.Loop


class Language(nn.Module):
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


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


def planned(mesh: sx.Mesh, staged: bool, **options: Any) -> tuple[nn.Module, Tensor, Tensor, sx.ParallelModule]:
    torch.manual_seed(0)
    model, x, y = Language().double(), torch.randint(30, (5, 7)), torch.randint(30, (5, 7))
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


@pytest.mark.slow
def test_what_has_another_size_in_each_iteration_has_no_place_in_an_arena() -> None:
    model, x, y, pm = planned(sx.Mesh(pp=2, mb=T(3), chunk=T(2)), True, arena=True)
    assert abs(pm(x, y) - next_tokens(model(x), y)) < 1e-12
    assert pm.verify()


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


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "schedule"), [(7, "1f1b"), pytest.param(8, "zb-h1", marks=pytest.mark.slow)])
def test_iterations_around_those_of_a_pipeline(rows: int, schedule: str) -> None:
    """A message has a number of both iterations; some iterations have fewer rows than others."""
    case = deep("mlp", 2, rows - 2)
    hints = {"pipeline": sx.Pipeline(schedule=schedule), "grad_accumulation": 2}
    pm = in_stages(case, sx.Mesh(pp=2, mb=sx.Loop(2)), **hints)
    assert worst(pm, case, alone(case)) < 1e-12
    pm.zero_grad()
    pm.use({rank: pm.rank_module(rank) for rank in range(2)})
    assert worst(pm, case, alone(case)) < 1e-12
    assert pm.verify()
