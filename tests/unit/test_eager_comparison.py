"""A captured graph is compared with eager PyTorch: loss, results, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfx as sx
from shardfx.ir.capture import export_program
from shardfx.ir.capture.canonical import canonical_ops
from shardfx.ir.capture.trace import capture
from shardfx.ir.ops.dropout import draw

MESH = sx.Mesh(dp=2)
aten = torch.ops.aten


class Layers(nn.Module):
    """Two layers, and what a function makes between them."""

    def __init__(self, between: Callable[[Tensor], Tensor] = torch.tanh, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.between = between
        self.first, self.last = nn.Linear(4, 8, dtype=dtype), nn.Linear(8, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


def captured(model: nn.Module, dtype: torch.dtype = torch.float32, **hints: Any) -> Any:
    x, y = torch.randn(6, 4, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    return capture(model, MESH, args=(x,), loss=F.huber_loss, targets=(y,), **hints).graph


def in_table(op: Any, form: Callable[..., Any]) -> Callable[[], dict[Any, Any]]:
    found = export_program.decompositions() | {op: form}
    return lambda: found


def twice(grad: Tensor, *given: Any) -> Tensor:
    return 2 * torch._decomp.decomposition_table[aten.huber_loss_backward.default](grad, *given)


def squared(x: Tensor, y: Tensor, *how: Any) -> Tensor:
    return (x - y).square().mean()


WRONG = {
    "forward": (aten.huber_loss.default, squared, r"something else when it is traced(.|\n)*where: +loss"),
    "backward": (
        aten.huber_loss_backward.default,
        twice,
        r"something else when it is traced(.|\n)*where: +gradient first",
    ),
}


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("of", WRONG)
def test_wrong_decomposition_of_torch_is_an_error(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    op, form, said = WRONG[of]
    monkeypatch.setattr(export_program, "decompositions", in_table(op, form))
    with pytest.raises(sx.Error, match=said):
        captured(Layers())


@pytest.mark.long
def test_wrong_canonical_op_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(canonical_ops.CANONICAL, aten.relu.default, lambda builder, op, args, kwargs, types: args[0])
    with pytest.raises(sx.Error, match=r"something else when it is traced(.|\n)*where: +loss"):
        captured(Layers(torch.relu))


@pytest.mark.long
def test_wrong_gradient_alone_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    backward = aten.tanh_backward.default
    monkeypatch.setitem(canonical_ops.CANONICAL, backward, lambda builder, op, args, kwargs, types: args[0])
    with pytest.raises(sx.Error, match=r"where: +gradient first.weight(.|\n)*made in first"):
        captured(Layers())


@pytest.mark.long
def test_wrong_content_of_buffers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = canonical_ops._batch_norm

    def forgets(builder: Any, op: Any, args: Any, kwargs: Any, types: Any) -> Any:
        made = whole(builder, op, args, kwargs, types)
        return [*made[:3], args[3], made[4]]

    monkeypatch.setitem(canonical_ops.CANONICAL, aten._native_batch_norm_legit_functional, forgets)
    with pytest.raises(sx.Error, match=r"buffer between.running_mean(.|\n)*made in"):
        captured(Layers(nn.BatchNorm1d(8)))


@pytest.mark.long
def test_random_numbers_are_equal_in_both_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is made of them is compared."""
    model, whole = Layers(lambda x: F.dropout(x, 0.3) * torch.rand_like(x).exp()), canonical_ops._dropout
    assert not captured(model).notes

    def drops_more(builder: Any, op: Any, args: Any, kwargs: Any, types: Any) -> Any:
        return whole(builder, op, (args[0], 0.4, True), kwargs, types)

    with monkeypatch.context() as patch:
        patch.setitem(canonical_ops.CANONICAL, aten.native_dropout, drops_more)
        with pytest.raises(sx.Error, match=r"something else when it is traced(.|\n)*where: +loss"):
            captured(model)
    monkeypatch.setitem(canonical_ops.CANONICAL, aten.exp.default, lambda builder, op, args, kwargs, types: args[0])
    with pytest.raises(sx.Error, match=r"something else when it is traced(.|\n)*where: +loss"):
        captured(model)


@pytest.mark.long
@pytest.mark.one_in(6)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_recurrent_layers_have_dropout_between_layers(kind: type[nn.RNNBase], device: str) -> None:
    """Torch's Python form of them does not; its kernel does."""
    x = torch.randn(3, 2, 4, device=device)
    graph = capture(
        kind(4, 4, 2, dropout=0.3, device=device), MESH, args=(x,), loss=lambda out: out[0].square().mean()
    ).graph
    assert sum(node.op is draw for node in graph.nodes) == 1 and not graph.notes


@pytest.mark.long
def test_models_with_dropout_are_captured_without_notes() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    assert not capture(model, MESH, args=(torch.randn(2, 5, 4),), loss=torch.sum).graph.notes
    assert not captured(Layers(lambda x: x + torch.rand_like(x.t()).t())).notes
    again = Layers(lambda x: checkpoint(torch.tanh, x, use_reentrant=True))
    assert not any("does not run" in note for note in captured(again).notes)


def test_examples_with_a_grad_fn_are_captured() -> None:
    x = torch.randn(6, 4, requires_grad=True) * 2
    assert not capture(Layers(), MESH, args=(x,), loss=torch.mean).graph.notes


class Attends(nn.Module):
    """Attention, of which the gradient of the keys' bias is zero but for rounding, and a norm that cancels another
    bias."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.norm = nn.Linear(8, 24, dtype=dtype), nn.BatchNorm1d(8, dtype=dtype)
        self.out = nn.Linear(8, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        made = F.scaled_dot_product_attention(q[:, None], k[:, None], v[:, None], dropout_p=0.1)[:, 0]
        return self.out(self.norm(made.transpose(1, 2)).amax(2)).relu()


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_rounding_is_no_difference(dtype: torch.dtype) -> None:
    x, y = torch.randn(6, 5, 8, dtype=dtype), torch.randn(6, 4, dtype=dtype)
    capture(Attends(dtype), MESH, args=(x,), loss=F.mse_loss, targets=(y,))


@pytest.mark.long
def test_cancellation_in_a_norm_of_two_rows_is_no_difference() -> None:
    """Its gradient cancels to a hundred-thousandth; in float32 it is added up in float64, and does so exactly."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(F.gelu(self.up(self.norm(x))))

    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(12, 8), *(Block() for _ in range(4)), nn.BatchNorm1d(8), nn.Linear(8, 12))
    x, y = torch.randint(1, 12, (2,)), torch.randint(12, (2,))
    capture(model.double(), MESH, args=(x,), loss=F.cross_entropy, targets=(y,))


class Covaries(nn.Module):
    """What is added to all rows cancels, and in some precision to nothing at all."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.tensor([0.3, 0.1, 0.2, 0.5], dtype=torch.float64)
        return torch.cov(self.layer(x).T, aweights=weights).abs().sin()


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=str)
def test_cancellation_to_zero_in_one_precision_is_no_difference(dtype: torch.dtype) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        capture(Covaries(dtype), MESH, args=(torch.randn(4, 6, dtype=dtype),), loss=torch.sum)


def test_capture_leaves_model_gradients_and_generators_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    x = torch.randn(6, 4, requires_grad=True)
    state = torch.get_rng_state()
    sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean))
    assert torch.equal(state, torch.get_rng_state())
    assert x.grad is None and all(each.grad is None for each in model.parameters())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_hooks_that_a_trace_leaves_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    export = export_program.exported_of

    def leaving(program: Any, tensors: tuple[Tensor, ...]) -> Any:
        made = export(program, tensors)
        program.model.first.register_forward_hook(lambda module, given, out: 2 * out)
        return made

    monkeypatch.setattr(export_program, "exported_of", leaving)
    assert not captured(Layers()).notes
