"""Hints on ops: how a node is sharded is said on the node itself, and its backward follows."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.graph import OutputKind, Value
from tests.captures import captured_once
from tests.reference import check_step

BATCH = 8
LOSS = F.cross_entropy


class Convolutions(nn.Module):
    """An AlexNet in small: convolutions, then fully connected layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.fc1, self.fc2, self.fc3 = nn.Linear(8 * 4, 24), nn.Linear(24, 24), nn.Linear(24, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv in (self.conv1, self.conv2):
            x = F.max_pool2d(F.relu(conv(x)), 2)
        x = F.relu(self.fc1(x.flatten(1)))
        return self.fc3(F.relu(self.fc2(x)))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(BATCH, 3, 8, 8, dtype=torch.float64), torch.randint(0, 12, (BATCH,))


@captured_once("convolutions")
def convolutions(shardings: Any, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    specs = {"args.0": "x, -, -, -", "targets.0": "x"}
    given = sx.Hints(args=(x,), loss=LOSS, targets=(y,), specs=specs, strategies=shardings, **hints)
    return sx.parallelize(Convolutions().double(), sx.Mesh(x=4), given)


def spec_text(value: Value) -> str:
    assert value.spec is not None
    return value.spec.text(value.shape)


def sent(pm: sx.ParallelModule) -> list[str]:
    """What is sent, without losses and counts: op, and the module that it belongs to."""
    found = []
    for node in pm.planned.nodes:
        if str(node.op).startswith("comm.") and node.outs[0].type.ndim > 1 and node.outs[0].shape[-1] > 1:
            found.append(f"{str(node.op)[5:]} {[list(value.shape) for value in node.outs]}")
    return found


@pytest.mark.long
def test_one_weird_trick() -> None:
    """The batch of the convolutions and the features of the fully connected layers are sharded over one axis."""
    pm = convolutions({"fc1": "n{x}", "fc2": "k{x}", "fc3": "n{x}"})
    specs = {given.name: spec_text(given.value) for given in pm.planned.inputs}
    assert [specs[f"fc{i}.weight"] for i in (1, 2, 3)] == ["[24{x}, 32]", "[24, 24{x}]", "[12{x}, 24]"]
    weights = {given.value for given in pm.planned.inputs if given.name.endswith("weight")}
    moved = {value for node in pm.planned.nodes if str(node.op).startswith("comm.") for value in node.operands}
    assert not weights & moved
    gradients = {o.name: o.value.node for o in pm.planned.outputs if o.kind is OutputKind.GRADIENT}
    reduced = {name for name, node in gradients.items() if node is not None and str(node.op).startswith("comm.")}
    assert reduced == {f"conv{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")}
    activations = [text for text in sent(pm) if ", [" not in text]
    assert activations == [
        "all_gather [[8, 32]]",
        "all_reduce [[8, 24]]",
        "all_to_all [[8, 12]]",
        "all_to_all [[8, 12]]",
        "all_reduce [[8, 24]]",
        "reduce_scatter [[8, 8, 2, 2]]",
    ]
    assert pm.verify()


def loss(out: torch.Tensor) -> torch.Tensor:
    return (out * out.cos()).sum()


@captured_once("equal")
def equal(model: nn.Module, mesh: sx.Mesh, shardings: Any, x: torch.Tensor, specs: Any = None) -> sx.ParallelModule:
    """The model in parallel gives the results and gradients of one device."""
    alone = copy.deepcopy(model)
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x,), loss=loss, specs=specs or {}, strategies=shardings))
    check_step(pm, alone, loss, (x,))
    return pm


class Product(nn.Module):
    """One product of matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


@pytest.mark.parametrize("where", ["mkn", "kkm", "n-m", "knn"])
def test_strategies_of_a_product(where: str) -> None:
    """By the factors over which the axes a, b and c are."""
    torch.manual_seed(0)
    strategy = {factor: tuple(axis for axis, at in zip("abc", where, strict=True) if at == factor) for factor in "mkn"}
    text = " ".join(f"{factor}{{{' '.join(axes)}}}" for factor, axes in strategy.items())
    x = torch.randn(8, 8, dtype=torch.float64)
    pm = equal(Product(), sx.Mesh(a=2, b=2, c=2), {":aten.mm": text}, x)
    product = next(node for node in pm.planned.nodes if node.pin is not None)
    assert product.strategy is not None
    assert dict(product.strategy.shardings) == {factor: axes for factor, axes in strategy.items() if axes}


def test_a_pin_wins_over_a_parameter_and_keeps_factors_replicated() -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 8, dtype=torch.float64)
    pm = equal(Product(), sx.Mesh(x=2), {":mm": "m{x} n{} k{}"}, x, {"weight": "-, x"})
    product = next(node for node in pm.planned.nodes if node.pin is not None)
    assert product.strategy is not None and dict(product.strategy.shardings) == {"m": ("x",)}
    assert "; the hint ':mm' says m{x} n{} k{}" in str(pm.explain(product.name))


@pytest.mark.parametrize(
    ("shardings", "what"),
    [
        ({"fc1": "q{x}"}, r"names no op with q among its factors(.|\n)*n, m k!, k! n -> m n"),
        ({"fc1:mm": "k{x}", "fc*:mm": "n{x}"}, "two hints disagree on aten.mm"),
        ({"fc1:mm": "q{x}"}, r"cannot be sharded so(.|\n)*m k, k n -> m n"),
        ({"fc9": "n{x}"}, "did you mean 'fc3'"),
        ({"conv2:convolution_backward": "n{x}"}, r"names no op(.|\n)*hint the op of the forward"),
        ({"conv1": "ci{x}"}, r"some ranks would get nothing(.|\n)*n ci! h0~p0"),
        ({"fc1": "n{y}"}, "mesh axis 'y' is unknown"),
        ({"fc1": "n{x} m{x}"}, "names axis 'x' twice"),
        ({"fc1": "n x"}, "cannot be read"),
        ({"conv1": "h0{x}"}, "what the chunks of 'p0' are made of"),
        (["fc1"], "is not valid"),
    ],
)
def test_what_cannot_be(shardings: Any, what: str) -> None:
    with pytest.raises(sx.Error, match=what):
        convolutions(shardings)
