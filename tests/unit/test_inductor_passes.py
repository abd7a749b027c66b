"""The pass that ``pm.compile()`` gives to Inductor: what is stored once, and where updates stand."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.runtime.inductor_passes import STORED, WRITE, WholeStep

aten = torch.ops.aten
W, V, X = torch.rand(4, 4), torch.rand(4, 4), torch.rand(8, 4)


def step(x: Tensor, w: Tensor, v: Tensor, momentum: Tensor, count: Tensor) -> Tensor:
    """Two layers, their gradients, and updates with a rate that counts: writes at the end, as from AOTAutograd."""
    hidden = x @ w
    out = hidden @ v
    grad_v = hidden.t() @ out
    grad_hidden = out @ v.t()
    grad_w = x.t() @ grad_hidden
    counted = count + 1
    new_momentum = momentum * 0.9 + grad_v
    new_v = v - new_momentum / counted
    new_w = w - grad_w / counted
    momentum.copy_(new_momentum)
    w.copy_(new_w)
    v.copy_(new_v)
    count.copy_(counted)
    return out.sum()


def traced(function: object, *given: Tensor) -> fx.GraphModule:
    return make_fx(function)(*(each.clone() for each in given))  # type: ignore[arg-type]


def names(graph: fx.Graph) -> list[str]:
    """Products, and the inputs that are written, in order."""
    return [
        f"write {node.args[0].name}" if node.target is WRITE else "mm"  # type: ignore[union-attr]
        for node in graph.nodes
        if node.target in (WRITE, aten.mm.default)
    ]


def ran(module: fx.GraphModule, given: Sequence[Tensor]) -> list[Tensor]:
    inputs = [each.clone() for each in given]
    return [module(*inputs), *inputs]


def test_updates_follow_their_gradients_and_the_last_read_of_their_parameter() -> None:
    given = [X, W, V, torch.rand(4, 4), torch.ones(())]
    module = traced(step, *given)
    wanted = ran(module, given)
    WholeStep()(module.graph)
    module.recompile()
    assert names(module.graph) == [
        *("mm", "mm", "mm", "mm", "write momentum_1", "write v_1"),  # the second layer's gradient behind its product
        *("mm", "write w_1", "write count_1"),
    ]
    for got, expected in zip(ran(module, given), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_gradient_that_a_norm_reads_stays_in_front_of_all_updates() -> None:
    def clipped(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        out = x @ w @ v
        grad_v, grad_w = (x @ w).t() @ out, x.t() @ (out @ v.t())
        scale = 1 / (grad_v.pow(2).sum() + grad_w.pow(2).sum()).sqrt()
        v.copy_(v - grad_v * scale)
        w.copy_(w - grad_w * scale)
        return out.sum()

    given = [X, W, V]
    module = traced(clipped, *given)
    wanted = ran(module, given)
    WholeStep()(module.graph)
    module.recompile()
    assert names(module.graph)[-2:] == ["write v_1", "write w_1"]
    for got, expected in zip(ran(module, given), wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


def test_gradient_that_ranks_reduce_is_waited_for_behind_the_backward() -> None:
    given = [X, W, V, torch.rand(4, 4), torch.ones(())]
    module = traced(step, *given)
    gradient = [node for node in module.graph.nodes if node.target is aten.mm.default][2]
    with module.graph.inserting_after(gradient):
        reduced = module.graph.call_function(torch.ops._c10d_functional.all_reduce.default, (gradient, "sum", "0"))
    with module.graph.inserting_after(reduced):
        waited = module.graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (reduced,))
    gradient.replace_all_uses_with(waited, delete_user_cb=lambda user: user is not reduced)
    for node in (reduced, waited):
        node.meta["val"] = gradient.meta["val"]
    WholeStep()(module.graph)
    assert names(module.graph)[-5:] == ["mm", "write w_1", "write momentum_1", "write v_1", "write count_1"]


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
