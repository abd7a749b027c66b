"""Capture by Dynamo: the same graph as by export, guards that name what changed, side effects as in eager."""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import shardfx as sx
from benchmarks.capture_front_ends import without_lines
from shardfx.ir.capture.frontend.dynamo import TracedCall, trace_call
from shardfx.ir.capture.frontend.model_preparation import without_weights
from shardfx.ir.capture.trace import Captured, capture
from shardfx.ir.unfolding.unfold import unfolded
from tests.reference import check_step

X, Y = torch.randn(8, 6), torch.randn(8, 4)
IDS = torch.randint(0, 4, (8,))
SCALES = {"loss": {"weight": 1.0}}


class Mean(nn.Module):
    """A module that computes without gradients."""

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(0) * 0.1


class Norms(nn.Module):
    """A replaced buffer, batch norm, dropout, and a module in ``nn.Sequential``."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.GELU(), nn.Linear(8, 4))
        self.mean = Mean()
        self.register_buffer("low", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.low = self.low * 0.9 + self.mean(self.layers[0](x))
        return self.layers(x)


class SingleOps(nn.Module):
    """Functions that stay one op, a tied weight, and a block that the code checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(6, 6), nn.Linear(6, 6)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        h = checkpoint(self.one, x, use_reentrant=False)
        q = F.pad(h, (1, 1), mode="constant").reshape(1, 2, 4, 8)
        a = F.scaled_dot_product_attention(q, q, q, is_causal=True).reshape(8, 8)[:, 1:-1]
        return self.two(F.interpolate(a[None, None], scale_factor=2.0, mode="bilinear")[0, 0, ::2, ::2])[:, :4]


class RangeChecks(nn.Module):
    """Functions that check ranges of their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Linear(4, 4)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(F.one_hot(ids, 4).float())


def bce(out: Tensor, ids: Tensor) -> Tensor:
    return F.binary_cross_entropy(out.sigmoid(), F.one_hot(ids, 4).float())


def by_dynamo(model: nn.Module, loss: Any, args: tuple[Any, ...], targets: tuple[Any, ...] = ()) -> Captured:
    found = trace_call(TracedCall(without_weights(model), loss, args, {}, targets))
    return capture(model, sx.Mesh(dp=2), args=args, loss=loss, targets=targets, found=found)


@pytest.mark.parametrize(
    ("model", "loss", "args", "targets"),
    [
        (Norms, F.mse_loss, (X,), (Y,)),
        (Norms, None, (X,), ()),
        (SingleOps, F.mse_loss, (X,), (Y,)),
        (RangeChecks, F.cross_entropy, (IDS,), (IDS,)),
        (RangeChecks, bce, (IDS,), (IDS,)),
    ],
)
def test_both_captures_give_the_same_text(
    model: Callable[[], nn.Module], loss: Any, args: tuple[Any, ...], targets: tuple[Any, ...]
) -> None:
    made = model()
    exported = unfolded(capture(made, sx.Mesh(dp=2), args=args, loss=loss, targets=targets).graph)
    assert without_lines(by_dynamo(made, loss, args, targets).graph) == without_lines(exported)


@dataclass
class Out:
    """Results in a class that pytree does not know."""

    y: Tensor
    calls: int


class Stateful(nn.Module):
    """A counter, an attribute that keeps a tensor, a replaced buffer, and settings in attributes and globals."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.kept = nn.Linear(6, 4), None
        self.calls, self.options = 0, {"act": ["relu"]}
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Out:
        self.calls += 1
        h = getattr(torch, self.options["act"][0])(self.linear(x)) * SCALES["loss"]["weight"]
        self.mean = self.mean + h.detach().mean(0)
        self.kept = h.detach()
        return Out(h, self.calls)


def test_guards_name_what_changed() -> None:
    model = without_weights(Stateful())
    call = TracedCall(model, None, (X,), {}, ())
    trace = trace_call(call)

    def changed(change: Callable[[], object], back: Callable[[], object]) -> str:
        assert trace.is_valid(call)
        change()
        valid, (reason, *_) = trace.is_valid(call), trace.reasons(call) or ("",)
        back()
        assert not valid and trace.is_valid(call)
        return reason

    assert changed(lambda: setattr(model, "calls", 3), lambda: setattr(model, "calls", 0)) == "L['model'].calls == 0"
    act = model.options["act"]
    assert "options" in changed(lambda: act.__setitem__(0, "tanh"), lambda: act.__setitem__(0, "relu"))
    weight = SCALES["loss"]
    assert "SCALES" in changed(lambda: weight.update(weight=2.0), lambda: weight.update(weight=1.0))
    hooks: list[Any] = []
    hook = lambda: hooks.append(model.linear.register_forward_hook(lambda *_: None))  # noqa: E731
    assert "_forward_hooks" in changed(hook, lambda: hooks.pop().remove())


def test_replay_gives_the_users_objects_and_side_effects() -> None:
    model = without_weights(Stateful())

    def mse(out: Out, y: Tensor) -> Tensor:
        return F.mse_loss(out.y, y)

    call = TracedCall(model, mse, (X,), {}, (Y,))
    trace = trace_call(call)
    assert model.calls == 0 and model.kept is None, "a trace changes nothing"
    assert set(trace.buffers) == {"mean"} and not trace.others
    mean = model.mean
    outputs = [torch.tensor(float(i)) for i in range(len(trace.results) + 1)]
    loss, out = trace.replay(call, lambda others: [outputs[number] for number in trace.results])
    assert isinstance(out, Out) and out.calls == model.calls == 1
    assert [id(each) for each in (loss, out.y, model.kept)] == [id(outputs[number]) for number in trace.results]
    assert model.mean is mean, "which a program writes into"
    again = trace_call(call)
    assert not trace.is_valid(call) and again.is_valid(call)


def test_code_of_a_library_that_dynamo_does_not_trace_is_exported() -> None:
    source = "import gc\nscaled = lambda x: x * len(gc.get_threshold())"
    scope: dict[str, Any] = {"__name__": "a_library"}
    exec(compile(source, f"{sysconfig.get_path('purelib')}/a_library.py", "exec"), scope)

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            made: Tensor = scope["scaled"](super().forward(x))
            return made

    model, x = Net(8, 4).double(), torch.randn(6, 8, dtype=torch.float64)
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=lambda out: out.square().sum()))
    check_step(pm, model, lambda out: out.square().sum(), (x,))
    assert any("Dynamo does not trace the model" in note for note in pm.report().warnings)
