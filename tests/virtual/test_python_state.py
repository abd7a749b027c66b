"""Python state that a model reads or keeps from call to call is that of eager code, with few plans, or an error."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

from .test_calls import batch, near, parallel

X, Y = batch()


COUNTED: list[int] = []


@pytest.mark.long
def test_hidden_state_outside_of_the_model() -> None:
    """A list of the script that each call makes longer, once; a generator that is no tensor's is an error."""
    generator = np.random.default_rng(0)

    class Counts(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            COUNTED.append(len(COUNTED))
            return super().forward(x)

    class Draws(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x if generator.random() < 2 else -x)

    pm = parallel(model := Counts(nn.Linear(8, 4)).double())
    begun = len(COUNTED)
    assert begun <= 2
    for calls in (1, 2):
        assert near(pm(X, Y), F.cross_entropy(nn.Sequential.forward(model, X), Y))
        assert COUNTED[begun:] == [*range(begun, begun + calls)]
    with pytest.raises(sx.Error, match="Dynamo cannot trace"):
        parallel(Draws(nn.Linear(8, 4)).double())


# ---- what a model keeps from call to call

X6, Y4 = torch.randn(8, 6).double(), torch.randn(8, 4).double()
SPECS = {"args.0": "dp, -", "targets.0": "dp, -"}


class Stateful(nn.Module):
    """A counter, an annealed factor, a kept tensor, and a replaced buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls, self.beta, self.kept = nn.Linear(6, 4), 0, 1.0, None
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1
        h = self.linear(x) * self.beta
        self.mean = self.mean * 0.9 + h.detach().mean(0)
        self.kept = h.detach()
        return {"h": h, "calls": self.calls}


def mse(out: dict[str, Any], y: Tensor) -> Tensor:
    return F.mse_loss(out["h"], y)


def annealed() -> tuple[sx.ParallelModule, Stateful]:
    torch.manual_seed(0)
    model = Stateful().double()
    return sx.parallelize(
        copy.deepcopy(model), sx.Mesh(dp=2), sx.Hints(args=(X6,), loss=mse, targets=(Y4,), specs=SPECS)
    ), model


def same_grads(pm: sx.ParallelModule, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_grads()[name], parameter.grad)


def test_state_is_that_of_eager_code(caplog: pytest.LogCaptureFixture) -> None:
    """In training steps, in a call without the loss, and in the backward of its results; a counter is planned twice."""
    pm, model = annealed()
    for _ in range(6):
        loss, expected = pm(X6, Y4), mse(model(X6), Y4)
        loss.backward(), expected.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(pm.kept, model.kept)
        torch.testing.assert_close(pm.full_state_dict()["mean"], model.mean)
        assert pm.calls == model.calls
    same_grads(pm, model)
    assert [record.getMessage().partition("signature: ")[2] for record in caplog.records] == [
        "guard L['model'].calls == 0 fails"
    ]
    assert "planned for another call: guard L['model'].calls == 0 fails" in pm.report().notes
    ours, theirs = pm(X6), model(X6)
    assert ours["calls"] == theirs["calls"] == 7
    ours["h"].square().sum().backward(), theirs["h"].square().sum().backward()
    same_grads(pm, model)
    loss, out = pm(X6, Y4, with_results=True)
    expected = model(X6)
    torch.testing.assert_close(loss, mse(expected, Y4))
    torch.testing.assert_close(out["h"], expected["h"])
    assert out["calls"] == 8 and pm.verify()


class Annealed(nn.Module):
    """A counter and a factor that forward changes, as Python numbers."""

    def __init__(self, scale: Callable[[Annealed], float]) -> None:
        super().__init__()
        self.linear, self.calls, self.beta, self.scale = nn.Linear(4, 4), 0, 0.5, scale

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.beta *= 0.9
        return self.linear(x) * self.scale(self)


@pytest.mark.long
@pytest.mark.parametrize(
    "scale",
    [
        lambda m: 0.5 * (1 + math.cos(math.pi * m.calls / 10)) * m.beta + m.beta**m.calls + m.calls // 2,
        lambda m: max(0.1, 1 - float(m.calls) / 4) + 1 / (1 + m.calls) + m.calls % 3 + 0.9**m.calls,
    ],
)
def test_numbers_that_forward_changes_are_inputs_of_one_more_plan(
    scale: Callable[[Annealed], float], caplog: pytest.LogCaptureFixture
) -> None:
    """Of three layers, in Python's precision."""
    layers = nn.Sequential(*(Annealed(scale) for _ in range(3))).double()
    x = X6[:, :4]
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -"})
    pm = sx.parallelize(copy.deepcopy(layers), sx.Mesh(dp=2), hints, virtual=True)
    for _ in range(5):
        torch.testing.assert_close(pm(x), layers(x).sum(), rtol=1e-12, atol=1e-12)
        assert [(each.calls, each.beta) for each in pm] == [(each.calls, each.beta) for each in layers]
    assert len(caplog.records) == 1


@pytest.mark.long
def test_mixtral_with_the_loss_of_its_router() -> None:
    """In float32, with its own loss, before any eager call: its list of router logits is filled by hooks."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = MixtralConfig(**sizes, num_hidden_layers=2, vocab_size=64, num_local_experts=4, output_router_logits=True)
    model = MixtralForCausalLM(config)
    ids = torch.randint(0, 64, (4, 16))
    given = {"input_ids": ids, "labels": ids}
    hints = sx.Hints(kwargs=given, loss=lambda out: out.loss, specs={"kwargs.*": "dp, -"})
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints)
    for _ in range(2):
        loss, out = pm(**given), model(**given)
        loss.backward(), out.loss.backward()
        torch.testing.assert_close(loss, out.loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(pm.full_grads()[name], parameter.grad, rtol=1e-4, atol=1e-6)


class Weighted(nn.Module):
    """A loss with a weight that is annealed, and a scale that is learned."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.calls, self.scale = 1.0, 0, nn.Parameter(torch.ones(4).double())

    def forward(self, out: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        return F.mse_loss(out * self.scale, y) * self.weight


@pytest.mark.long
def test_an_annealed_weight_of_the_loss(caplog: pytest.LogCaptureFixture) -> None:
    """On the user's own object, also where the loss has tensors that are the parallel module's."""
    loss = Weighted()
    model = nn.Linear(6, 4).double()
    pm = sx.parallelize(
        copy.deepcopy(model), sx.Mesh(dp=2), sx.Hints(args=(X6,), loss=loss, targets=(Y4,), specs=SPECS)
    )
    for step in range(5):
        loss.weight = 1.0 - step / 8
        made = pm(X6, Y4)
        assert loss.calls == step + 1
        torch.testing.assert_close(made, loss(model(X6), Y4))
        loss.calls = step + 1
    assert len(caplog.records) == 1
