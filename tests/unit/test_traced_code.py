"""Code that does something else while it is traced is an error, and so is hidden state; is_compiling is answered."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.compiler import is_compiling

import shardfx as sx
from shardfx.ir.capture.frontend.forward_probes import is_compiling_answered

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
@pytest.mark.parametrize("guard", [False, True])
def test_model_that_detects_tracing_is_refused(watched: str, guard: bool) -> None:
    model = Doubles(WATCHED[watched])
    hints = sx.Hints(args=(torch.rand(4, 4),), loss=torch.mean, guard=guard)
    with pytest.raises(sx.Error, match="something else when it is traced"):
        sx.parallelize(model, MESH, hints)
    assert model.calls == 0, "the model was run, but is as it was"


ASKED = {
    "torch.compiler.is_compiling": lambda: torch.compiler.is_compiling(),
    "torch.compiler.is_exporting": lambda: torch.compiler.is_exporting(),
    "as imported": is_compiling,
    "as imported from dynamo": torch._dynamo.is_compiling,  # type: ignore[attr-defined]
}


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("fails", [False, True])
def test_is_compiling_is_answered_as_in_eager_where_the_traces_differ(asked: str, fails: bool) -> None:
    def watched(x: Tensor) -> bool:
        assert torch.compiler.is_compiling is is_compiling, "torch.compile knows it by identity"
        compiled = bool(ASKED[asked]())
        return compiled and (None if fails else x).shape[0] > 0  # type: ignore[union-attr]

    model, x = Doubles(watched).double(), torch.rand(4, 4, dtype=torch.float64)
    pm = sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean))
    assert torch.allclose(pm(x), model(x).mean(), rtol=0, atol=1e-12)


def test_is_compiling_answers_are_per_thread_and_nested() -> None:
    """One within another, and others in threads of their own; afterwards torch's functions are as they were."""
    code, said, inner = is_compiling.__code__, [], threading.Event()

    def other() -> None:
        said.append(is_compiling())
        with is_compiling_answered(lambda _: True):
            said.append(is_compiling())
            inner.set()
        said.append(is_compiling())

    with is_compiling_answered(lambda _: True), is_compiling_answered(lambda _: False):
        assert not is_compiling()
        thread = threading.Thread(target=other)
        thread.start()
        assert inner.wait(10)
        with is_compiling_answered(lambda _: True):
            assert is_compiling() and torch.compiler.is_exporting()
        assert not is_compiling()
        thread.join()
    assert said == [False, True, False] and not is_compiling() and is_compiling.__code__ is code


class Shows(nn.Module):
    """Keeps for others what it computed."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last, self.length = nn.Linear(4, 4), None, 0

    def forward(self, x: Tensor) -> Tensor:
        self.last, self.length = self.fc(x), max(self.length, len(x))
        return self.last * self.length


def test_attribute_that_forward_sets_raises_where_it_is_read() -> None:
    x, model = torch.rand(4, 4), Shows()
    pm = sx.parallelize(model, MESH, sx.Hints(args=(x,), loss=torch.mean))
    assert torch.allclose(pm(x), model(x).mean())
    for name in ("last", "length"):
        with pytest.raises(sx.Error, match=f"{name}' is set by the model's forward(.|\n)*return it"):
            getattr(pm, name)


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
