"""Forward and backward as one graph: written in one run where the program is functional, and as AOTAutograd has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.capture import export_program, trace
from shardfx.ir.capture.convert import ProgramNames, convert
from shardfx.ir.capture.graph_interpreter import interpret
from shardfx.ir.capture.joint_graph import NotFunctional, joint_graph
from shardfx.ir.graph import OutputKind, Where
from shardfx.ir.text import print_graph
from tests.zoo import make


class Model(nn.Module):
    """Two layers and what a function makes between them."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.between = between

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))


class Tied(Model):
    """Its layers have one weight."""

    def __init__(self) -> None:
        super().__init__(torch.tanh)
        self.last.weight = self.first.weight


class Followed(nn.Module):
    """Divides by a mean that follows its inputs'; ``how`` it is followed."""

    seen: Tensor
    count: Tensor

    def __init__(self, how: Callable[[Followed, Tensor], object] | None = None) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(6))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.how = how or Followed.anew

    def anew(self, x: Tensor) -> None:
        """In steps, each of which reads what the one before wrote."""
        with torch.no_grad():
            self.count.add_(1)
            self.seen.mul_(0.9).add_(x.abs().mean(0), alpha=0.1)
            self.seen.div_(self.count)

    def forward(self, x: Tensor) -> Tensor:
        before = x.detach() * self.seen
        self.how(self, x)
        return before + x / self.seen


def of_a_view(model: Followed, x: Tensor) -> None:
    with torch.no_grad():
        model.seen[:2].add_(x.detach()[0, :2])


def in_one_place(model: Followed, x: Tensor) -> None:
    with torch.no_grad():
        model.seen.add_(1)


def beside_itself() -> Followed:
    made = Followed(in_one_place)
    made.register_buffer("other", made.seen.view(2, 3))
    return made


class Doubled(torch.autograd.Function):
    """Twice its input, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def without_gradients(x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = x.abs().mean()
    return x / scale


def in_place(x: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made.add_(x.relu_()).mul_(2.0)
    return made + x


def part_in_place(x: Tensor) -> Tensor:
    made = x + 1
    made[:, 0].mul_(2.0)
    return made


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ x.t()).float() @ x


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Of each trace, why it was left to AOTAutograd, or that it was not."""
    said: list[str] = []

    def noted(exported: fx.GraphModule, tensors: Sequence[Tensor], *known: Any) -> fx.GraphModule:
        try:
            made = joint_graph(exported, tensors, *known)
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")
            raise
        said.append("here")
        return made

    monkeypatch.setattr(export_program, "joint_graph", noted)
    return said


def texts(monkeypatch: pytest.MonkeyPatch, model: nn.Module, *args: Any, loss: Any, targets: Any = ()) -> list[str]:
    """The captured graph, and the one that AOTAutograd alone writes."""

    def captured() -> str:
        return print_graph(trace.capture(model, sx.Mesh(dp=2), args=args, loss=loss, targets=targets).graph)

    found = [captured()]

    def left(*_: Any) -> fx.GraphModule:
        raise NotFunctional("everything")

    monkeypatch.setattr(export_program, "joint_graph", left)
    return [*found, captured()]


FUNCTIONAL: dict[str, Callable[[], nn.Module]] = {
    "views": lambda: Model(lambda x: x.t().reshape(2, -1).unflatten(1, (3, -1)).flatten().view(-1, 6)),
    "in place": lambda: Model(in_place),
    "without gradients": lambda: Model(without_gradients),
    "dropout": lambda: Model(lambda x: F.dropout(x, 0.3) + torch.rand_like(x)),
    "of its own": lambda: Model(Doubled.apply),
    "autocast": lambda: Model(cast),
    "followed": lambda: Model(Followed()),
    "tied": Tied,
}


@pytest.mark.long
@pytest.mark.parametrize("of", FUNCTIONAL)
def test_functional_program_equals_aotautograd(of: str, written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.rand(4, 6, requires_grad=True)
    found, expected = texts(monkeypatch, FUNCTIONAL[of](), x, loss=F.mse_loss, targets=(torch.rand(4, 6),))
    assert written == ["here"]
    assert "backward:" in found and found == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("between", "why"),
    [
        (part_in_place, "aten.mul_.Tensor"),
        (lambda x: torch.view_as_real(torch.fft.fft(x).conj() * 2)[..., 0], "complex"),
        (lambda x: x @ torch.linalg.inv(x.t() @ x + torch.eye(6)), "effect"),
        (Followed(of_a_view), "seen elsewhere"),
    ],
    ids=["a part in place", "conjugated", "raises", "viewed"],
)
def test_program_that_is_not_functional_is_left_to_aotautograd(
    between: Any, why: str, written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found, expected = texts(monkeypatch, Model(between), torch.rand(4, 6), loss=lambda y: y.square().mean())
    assert len(written) == 1 and written[0].startswith("NotFunctional: ") and why in written[0]
    assert found == expected


def test_written_buffer_that_shares_memory_is_refused(written: list[str]) -> None:
    with pytest.raises(sx.Error, match=r"lies where another of its tensors lies[\s\S]*other"):
        trace.capture(Model(beside_itself()), sx.Mesh(dp=2), args=(torch.rand(4, 6),), loss=lambda y: y.square().mean())
    assert written[0].startswith("NotFunctional: ") and "lies where another" in written[0]


class Keeps(nn.Module):
    """Writes a value with a gradient to its buffer, and gives another."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(6))
        self.register_buffer("kept", torch.zeros(4, 6))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        self.kept.mul_(0.9).add_(y)
        return y.square().sum()


def test_tangent_of_a_buffer_written_in_place_is_zero() -> None:
    model, x = Keeps(), torch.rand(4, 6)
    exported = torch.export.export(model, (x,), strict=False).module(check_guards=False)
    names = ProgramNames(("args.0",), {"weight": "weight", "kept": "kept"}, Where("loss"))
    graph = convert(joint_graph(exported, (x,), {}), sx.Mesh(dp=2), names)
    env = interpret(graph, {"weight": model.weight.detach(), "kept": model.kept, "args.0": x})
    model(x).backward()
    (gradient,) = (env[output.value] for output in graph.outputs if output.kind is OutputKind.GRADIENT)
    torch.testing.assert_close(gradient, model.weight.grad)


def test_loss_without_gradients_has_no_backward(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(torch.relu).requires_grad_(False)
    found, expected = texts(monkeypatch, model, torch.rand(4, 6), loss=lambda y: y.mean())
    assert written == ["here"] and "backward:" not in found and found == expected


@pytest.mark.long
def test_models_of_others_are_functional(written: list[str]) -> None:
    case = make("hf_t5")
    trace.capture(case.model, sx.Mesh(dp=2), args=case.args, kwargs=case.kwargs, loss=case.loss, targets=case.targets)
    assert written == ["here"]
