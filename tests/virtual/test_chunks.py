"""Any dim sharded over time: logits a chunk at a time, whole steps in iterations, results put together again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step


class Language(nn.Module):
    def __init__(self, vocabulary: int = 300, width: int = 16) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(vocabulary, width), nn.Linear(width, width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


def language() -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randint(300, (4, 15))
    y = torch.randint(300, (4, 15))
    y[0, :11] = -100  # iterations and ranks count otherwise
    return Language().double(), x, y


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


@pytest.mark.slow
@pytest.mark.parametrize("zero", [1, 0])
def test_a_whole_step_in_iterations(zero: int) -> None:
    model, x, y = language()
    alone = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    pm = sx.parallelize(
        model,
        sx.Mesh(dp=2),
        sx.Hints(
            args=(x,),
            loss=next_tokens,
            targets=(y,),
            specs={"args.0": "dp, -"},
            grad_accumulation=2,
            zero=zero,
            zero_min_numel=0,
            clip_grad_norm=0.1,
            optimizer=lambda params: torch.optim.AdamW(params, lr=1e-3),
        ),
        virtual=True,
    )
    for _ in range(2):
        loss = next_tokens(alone(x), y)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.1)
        optimizer.step()
        assert abs(pm.step(x, y).item() - loss.item()) < 1e-9
    state = pm.full_state_dict()
    assert all((state[name] - each).abs().max() < 1e-9 for name, each in alone.state_dict().items())
    assert pm.verify()


def test_results_are_put_together_again() -> None:
    model, x, y = language()
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=2)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    with torch.no_grad():
        assert (pm(x) - model(x)).abs().max() < 1e-12


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


STAGED = {
    "tied": (sx.Mesh(dp=2, chunk=sx.Loop(3)), None),
    "1f1b": (sx.Mesh(pp=2, mb=sx.Loop(4), chunk=sx.Loop(3)), sx.Pipeline()),
    "zb-h1": (sx.Mesh(pp=2, mb=sx.Loop(8), chunk=sx.Loop(3)), sx.Pipeline(schedule="zb-h1")),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", [pytest.param(how, marks=() if how == "1f1b" else pytest.mark.slow) for how in STAGED])
def test_chunks_of_the_head_stay_behind_the_attentions(how: str) -> None:
    """In the last stage of a pipeline too: forward and backward of the chunks stand in its backward."""
    torch.manual_seed(0)
    mesh, pipeline = STAGED[how]
    model, x, y = Attending().double(), torch.randint(64, (8, 9)), torch.randint(64, (8, 9))
    y[0, :5] = -100
    specs = {"head": "-, chunk, -"} if pipeline else {"args.0": "dp, -", "head": "dp, chunk, -"}
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs, pipeline=pipeline)
    pm = sx.parallelize(model, mesh, hints, virtual=True)
    sharding = [node for node in pm.planned.nodes if any(v.spec and "chunk" in v.spec.axes for v in node.outs)]
    assert {node.where.module for node in sharding if not str(node.op).startswith("comm.")} == {"head", "loss"}
    check_step(pm, model, next_tokens, (x,), (y,))


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
