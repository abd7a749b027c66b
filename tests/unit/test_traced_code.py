"""Code that does something else while it is traced is an error, and so is hidden state; is_compiling is answered."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import shardfx as sx

MESH = sx.Mesh(dp=2)


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


WATCHED: dict[str, Callable[[Tensor], bool]] = {
    "tracing": lambda x: torch.jit.is_tracing() or isinstance(x, FakeTensor),
    "fake": lambda x: isinstance(x, FakeTensor),
}


@pytest.mark.parametrize("watched", WATCHED)
def test_model_that_detects_tracing_is_refused_with_guards(watched: str) -> None:
    model = Doubles(WATCHED[watched])
    hints = sx.Hints(args=(torch.rand(4, 4),), loss=torch.mean, guard=True)
    with pytest.raises(sx.Error, match="something else when it is traced"):
        sx.parallelize(model, MESH, hints)
    assert model.calls == 0, "the model was run, but is as it was"


@pytest.mark.parametrize("guard", [False, True])
def test_model_that_asks_whether_it_is_compiled_is_refused(guard: bool) -> None:
    model, x = Doubles(lambda x: torch.compiler.is_compiling()).double(), torch.rand(4, 4, dtype=torch.float64)
    with pytest.raises(sx.Error, match="something else when it is traced"):
        sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean, guard=guard))


def test_model_on_meta_is_not_compared() -> None:
    with torch.device("meta"):
        model = Doubles(WATCHED["fake"])
    sx.parallelize(model, MESH, sx.Hints(args=(torch.rand(4, 4, device="meta"),), loss=torch.mean))


def test_model_with_dropout_is_equal() -> None:
    x = torch.rand(4, 4)
    sx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), MESH, sx.Hints(args=(x,), loss=torch.mean))


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


class ByName(nn.Module):
    """Calls functions that something stands in for while the model is run, by the names of what they take."""

    def __init__(self, takes: str) -> None:
        super().__init__()
        self.fc, self.takes = nn.Linear(4, 4), takes
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("var", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        kept = {"running_mean": self.mean, "running_var": self.var, "training": True, "momentum": 0.1, "eps": 1e-5}
        if self.takes == "attention":
            return torch.nn.functional.scaled_dot_product_attention(query=h[None], key=h[None], value=h[None])
        if self.takes == "norm":
            return torch.nn.functional.batch_norm(input=h, **kept)
        return torch.batch_norm(input=h, weight=None, bias=None, cudnn_enabled=False, **kept)


@pytest.mark.parametrize("takes", ["attention", "norm", "op"])
def test_functions_called_with_keywords_are_compared(takes: str) -> None:
    pm = sx.parallelize(ByName(takes), MESH, sx.Hints(args=(torch.rand(4, 4),), loss=torch.mean))
    assert "was not compared" not in str(pm.report())
