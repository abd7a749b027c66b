"""What is written into a step (clip, loss scale, casts, batch norms of parts) is compared with torch, once per plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.capture.canonical.batch_norms import NormByParts
from shardfx.ir.capture.canonical.mixed_precision import MixedPrecision
from shardfx.ir.capture.optimizer import gradient_scaling, training_step
from shardfx.ir.capture.trace import capture
from shardfx.ir.graph import OutputKind

X, Y = torch.rand(8, 6), torch.randint(4, (8,))


class Net(nn.Module):
    """A norm, a layer, and a number by which its result is scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer, self.scale = nn.BatchNorm1d(6), nn.Linear(6, 4), nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(self.norm(x)) * self.scale
        return out


def never_smaller(graph: Any, finite: Any, scale: Any) -> Any:
    return ADAPT(graph, finite, sx.LossScale(scale.init, scale.growth, 0.9, scale.interval))


def never_skips(graph: Any) -> Any:
    before = [(output, output.value) for output in graph.outputs]
    finite = SKIP(graph)
    for output, value in before:
        output.value = value
    return finite


ADAPT, SKIP = gradient_scaling.adapt, gradient_scaling.skip_overflow
ASKED: dict[str, dict[str, Any]] = {
    "clip": {"clip_grad_norm": 1.0},
    "scale": {"mixed_precision": sx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=2.0**10)},
    "adapts": {
        "mixed_precision": sx.MixedPrecision(torch.bfloat16, loss_scale=sx.LossScale()),
        "optimizer": lambda params: torch.optim.SGD(params, lr=0.1),
    },
    "parts": {"batch_stats": "local"},
}
WRONG: list[tuple[str, Any, str, Callable[..., Any], str]] = [
    ("clip", gradient_scaling, "SMALL", 1.0, "gradient w"),  # type: ignore[list-item]
    ("scale", training_step, "unscale_gradients", lambda graph, scale: None, "gradient w"),
    ("scale", MixedPrecision, "results", lambda self, tree: tree, "loss"),
    ("adapts", training_step, "skip_overflow", never_skips, "parameter w"),
    ("adapts", training_step, "adapt", never_smaller, "state optimizer.loss_scale"),
    ("parts", NormByParts, "_kept", lambda self, old, by_part, momentum: by_part[0], "running_mean"),
]


def hints(asked: str) -> sx.Hints:
    return sx.Hints((X,), loss=F.cross_entropy, targets=(Y,), specs={"args.0": "dp, -"}, **ASKED[asked])


@pytest.mark.long
@pytest.mark.parametrize("asked", ASKED)
def test_step_that_is_right_is_no_assumption(asked: str) -> None:
    pm = sx.parallelize(Net(), sx.Mesh(dp=2), hints(asked))
    count = 1 + (asked == "scale") + (asked == "adapts")
    assert pm.verify().checked["parts of the step compared with torch"] == count


@pytest.mark.long
@pytest.mark.parametrize(("asked", "owner", "name", "wrong", "said"), WRONG)
@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.one_in(2)
def test_step_that_is_written_wrong_is_an_error(
    device: str, asked: str, owner: Any, name: str, wrong: Any, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(sx.Error, match="not what torch makes, on small tensors") as caught:
        sx.parallelize(Net().to(device), sx.Mesh(dp=2), hints(asked), virtual=True)
    assert said in str(caught.value.where)


def test_clipped_gradient_of_a_bfloat16_number_keeps_its_dtype() -> None:
    model = Net().bfloat16()
    captured = capture(model, sx.Mesh(dp=2), args=(X.bfloat16(),), loss=F.cross_entropy, targets=(Y,), clip=1e-3)
    (made,) = (o.value for o in captured.graph.outputs if (o.kind, o.name) == (OutputKind.GRADIENT, "scale"))
    assert made.type.dtype is torch.bfloat16 and made.node is not None
    assert {each.type.dtype for each in made.node.operands} == {torch.float32}


def test_gpus_are_not_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning leaves the random numbers of a script as they are, on every device."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    monkeypatch.setattr(torch.cuda, "manual_seed", seeded.append)
    model, x = nn.Linear(4, 4), torch.ones(4, 4)
    before = torch.get_rng_state()
    sx.parallelize(model, sx.Mesh(dp=2), sx.Hints((x,), loss=torch.sum, specs={"args.0": "dp, -"}, clip_grad_norm=1.0))
    assert not seeded and torch.equal(torch.get_rng_state(), before)
