"""The pass that ``pm.compile()`` gives to Inductor: what is stored once."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.runtime.inductor_passes import STORED, WholeStep

aten = torch.ops.aten
W = torch.rand(4, 4)


def traced(function: object, *given: Tensor) -> fx.GraphModule:
    return make_fx(function)(*(each.clone() for each in given))  # type: ignore[arg-type]


def test_operands_of_products_and_casts_are_not_marked() -> None:
    def residual(x: Tensor, w: Tensor) -> Tensor:
        out = x + x @ w
        wide = out.double()
        return (out @ w) + out + (wide * wide).sum() + (out.t() @ x).sum() + wide.sum()

    module = traced(residual, torch.rand(64, 4), W)
    WholeStep()(module.graph)
    assert not [node for node in module.graph.nodes if STORED in node.meta]  # `out`, which a product reads, is stored


def test_sum_between_products_is_stored_once() -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(x) @ w
        return x

    module = traced(normed, torch.rand(64, 4), W)
    WholeStep()(module.graph)
    stored = [node.name for node in module.graph.nodes if STORED in node.meta]
    assert stored == ["add"]
