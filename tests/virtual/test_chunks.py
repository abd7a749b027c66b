"""Any dim cut over time: logits a chunk at a time, whole steps in turns, results put together again."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx


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
    y[0, :11] = -100  # turns and ranks count otherwise
    return Language().double(), x, y


CHUNKS = {
    "chunk": (sx.Mesh(dp=2, chunk=sx.Time(5)), {"args.0": "dp, -", "head": "dp, chunk, -"}),
    "uneven": (sx.Mesh(dp=2, chunk=sx.Time(4)), {"args.0": "dp, -", "head": "dp, chunk, -"}),
    "turns and chunks": (
        sx.Mesh(dp=2, mb=sx.Time(2), chunk=sx.Time(5)),
        {"args.0": "mb dp, -", "head": "mb dp, chunk, -"},
    ),
}


@pytest.mark.parametrize("how", CHUNKS)
def test_logits_exist_a_chunk_at_a_time(how: str) -> None:
    model, x, y = language()
    mesh, specs = CHUNKS[how]

    def planned(mesh: sx.Mesh, specs: dict[str, str]) -> sx.ParallelModule:
        hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs)
        return sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)

    pm, whole = planned(mesh, specs), planned(sx.Mesh(dp=2), {"args.0": "dp, -"})
    loss = next_tokens(model(x), y)
    loss.backward()
    made = pm(x, y)
    made.backward()
    grads = pm.full_grads()
    assert abs(made.item() - loss.item()) < 1e-12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (grads[name] - parameter.grad).abs().max() < 1e-12
    assert pm.verify()
    assert pm.memory(0).footprint.peak.of("activations") < whole.memory(0).footprint.peak.of("activations") / 2


@pytest.mark.parametrize("zero", [0, 1])
def test_a_whole_step_in_turns(zero: int) -> None:
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
            accumulate=2,
            zero=zero,
            zero_min=0,
            clip=0.1,
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
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, accumulate=2)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    with torch.no_grad():
        assert (pm(x) - model(x)).abs().max() < 1e-12
