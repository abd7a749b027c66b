"""A captured graph is compared with eager PyTorch: loss, results, gradients and buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils.checkpoint import checkpoint

import shardfx as sx
from shardfx.ir.capture import export_program
from shardfx.ir.capture.canonical import canonical_ops
from shardfx.ir.capture.trace import capture
from shardfx.ir.ops.dropout import dropout

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


def squared(x: Tensor, y: Tensor, *how: Any) -> Tensor:
    return (x - y).square().mean()


@pytest.mark.long
def test_wrong_decomposition_of_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = export_program.decompositions() | {aten.huber_loss.default: squared}
    monkeypatch.setattr(export_program, "decompositions", lambda: found)
    with pytest.raises(sx.Error, match=r"something else when it is traced(.|\n)*where: +loss"):
        captured(Layers())


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

    monkeypatch.setitem(canonical_ops.CANONICAL, aten.native_dropout, drops_more)
    with pytest.raises(sx.Error, match=r"something else when it is traced(.|\n)*where: +loss"):
        captured(model)


@pytest.mark.long
def test_recurrent_layers_have_dropout_between_layers() -> None:
    """Torch's Python form of them does not; its kernel does."""
    model, args = nn.LSTM(4, 4, 2, dropout=0.3), (torch.randn(3, 2, 4),)
    graph = capture(model, MESH, args=args, loss=lambda out: out[0].square().mean()).graph
    assert sum(node.op is dropout for node in graph.nodes) == 1 and not graph.notes


@pytest.mark.long
def test_models_with_dropout_are_captured_without_notes() -> None:
    model = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
    assert not capture(model, MESH, args=(torch.randn(2, 5, 4),), loss=torch.sum).graph.notes
    assert not captured(Layers(lambda x: x + torch.rand_like(x.t()).t())).notes
    again = Layers(lambda x: checkpoint(torch.tanh, x, use_reentrant=True))
    assert not any("does not run" in note for note in captured(again).notes)


class Keys(nn.Module):
    """Scores of keys whose bias has no gradient but rounding; in float64, with a norm in float32."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = nn.Linear(4, 4, dtype=dtype), nn.Linear(4, 4, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = F.layer_norm(x.float(), (4,)).to(x.dtype)
        return (self.q(h) @ self.k(h).mT).softmax(-1) @ h


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradients_that_are_rounding_alone_are_equal(dtype: torch.dtype) -> None:
    assert not captured(Keys(dtype), dtype).notes


@pytest.mark.long
def test_capture_leaves_model_gradients_and_generators_unchanged() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    before = {name: each.clone() for name, each in model.state_dict().items()}
    x = torch.randn(6, 4, requires_grad=True)
    state = torch.get_rng_state()
    sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean))
    assert torch.equal(state, torch.get_rng_state())
    assert x.grad is None and all(each.grad is None for each in model.parameters())
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


# ---- code that looks whether it is traced


class Doubles(nn.Module):
    """Doubles its input where it is not watched."""

    def __init__(self, watched: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.watched = watched
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x if self.watched(x) else 2 * x)


@pytest.mark.long
@pytest.mark.parametrize(
    ("watched", "guard"),
    [
        (lambda x: torch.jit.is_tracing() or isinstance(x, FakeTensor), True),
        (lambda x: torch.compiler.is_compiling(), False),
    ],
    ids=["tracing", "compiling"],
)
def test_model_that_detects_tracing_is_refused(watched: Callable[[Tensor], bool], guard: bool) -> None:
    model = Doubles(watched)
    with pytest.raises(sx.Error, match="something else when it is traced"):
        sx.parallelize(model, MESH, sx.Hints(args=(torch.rand(4, 4),), loss=torch.mean, guard=guard))
    assert model.calls == 0, "the model was run, but is as it was"


def test_model_on_meta_is_not_compared() -> None:
    with torch.device("meta"):
        model, x = Doubles(lambda x: isinstance(x, FakeTensor)), torch.rand(4, 4)
    sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean))


def test_example_on_which_the_model_raises_is_noted() -> None:
    ids = torch.full((4, 3), 1000)
    pm = sx.parallelize(nn.Embedding(10, 4), MESH, sx.Hints(args=(ids,), loss=torch.mean))
    assert "does not run on its example" in str(pm.report())


def test_model_that_does_not_run_in_the_compute_dtype_is_refused() -> None:
    """Its buffer stays what it is, and takes what is computed along; a fake product would not have minded."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, dtype=torch.float64)
            self.register_buffer("centre", torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x - self.centre)

    hints = sx.Hints(args=(torch.randn(4, 4, dtype=torch.float64),), mixed_precision=torch.float32)
    with pytest.raises(sx.Error, match="does not run in the dtype in which it is to compute"):
        sx.parallelize(Centred(), MESH, hints)
