"""Modules that do little each (a convolution, an activation) are recomputed several together, by hand and chosen."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import shardfx as sx

IMAGES, LABELS = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.randint(10, (8,))


def convolutions(count: int, width: int = 8) -> list[nn.Module]:
    ahead = [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(count)]
    return [each for conv in ahead for each in (conv, nn.ReLU())]


def head() -> list[tuple[str, nn.Module]]:
    return [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("fc", nn.Linear(8, 10))]


def listed() -> nn.Module:
    return nn.Sequential(OrderedDict([("features", nn.Sequential(*convolutions(10))), *head()]))


def nested() -> nn.Module:
    """Lists of lists: the outer ones are the blocks."""
    return nn.Sequential(nn.Sequential(*convolutions(10)), nn.Sequential(OrderedDict(head())))


class Functional(nn.Module):
    """Modules of the root, and between them what the model does itself."""

    def __init__(self) -> None:
        super().__init__()
        for i in range(8):
            self.add_module(f"conv{i}", nn.Conv2d(8 if i else 3, 8, 3, padding=1))
            self.add_module(f"norm{i}", nn.BatchNorm2d(8))
        self.fc = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(8):
            x = F.relu(self.get_submodule(f"norm{i}")(self.get_submodule(f"conv{i}")(x)))
        out: Tensor = self.fc(x.mean((2, 3)))
        return out


class InSegments(nn.Module):
    """``checkpoint_sequential``, which makes the last segment again not."""

    def __init__(self, features: list[nn.Module]) -> None:
        super().__init__()
        self.features, self.head = nn.Sequential(*features), nn.Sequential(OrderedDict(head()))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(checkpoint_sequential(self.features, 4, x, use_reentrant=False))
        return out


def planned(model: nn.Module, mesh: sx.Mesh | None = None, **hints: Any) -> sx.ParallelModule:
    told = sx.Hints(
        args=(IMAGES,), loss=F.cross_entropy, targets=(LABELS,), specs={"args.0": "dp, -, -, -", "targets.0": "dp"},
        **hints,
    )  # fmt: skip
    return sx.parallelize(copy.deepcopy(model), mesh or sx.Mesh(dp=2), told, virtual=True)


def check_equal(pm: sx.ParallelModule, plain: sx.ParallelModule) -> None:
    """Bit for bit: all gradients, and what the model counts."""
    made, alike = (each(IMAGES, LABELS) for each in (pm, plain))
    made.backward()
    alike.backward()
    assert torch.equal(made, alike)
    for ours, theirs in ((pm.full_grads(), plain.full_grads()), (pm.full_state_dict(), plain.full_state_dict())):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert pm.verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make", [listed, *(pytest.param(each, marks=pytest.mark.slow) for each in (nested, Functional))]
)
def test_a_chain_is_made_to_fit(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().double()
    plain = planned(model)
    peaks = [plain.memory().peak]
    for part in (0.8, 0.6):
        pm = planned(model, recompute="auto", memory=int(peaks[0] * part))
        peaks.append(pm.memory().peak)
        assert peaks[-1] <= peaks[0] * part and "recomputed to fit" in pm.planned.notes[-1]
    assert peaks == sorted(peaks, reverse=True)
    check_equal(pm, plain)


@pytest.mark.slow
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("make", "pattern"), [(listed, "features.*"), (Functional, "*")])
def test_modules_are_recomputed_together_by_hand(make: Callable[[], nn.Module], pattern: str) -> None:
    torch.manual_seed(0)
    model = make().double()
    plain, alone = planned(model), planned(model, recompute=pattern)
    pm = planned(model, recompute=sx.Recompute(pattern, segment=6))
    assert pm.memory().peak < 0.75 * min(plain.memory().peak, alone.memory().peak)
    check_equal(pm, plain)


@pytest.mark.slow
def test_what_a_model_checkpoints_in_segments_is_recomputed_together() -> None:
    torch.manual_seed(0)
    model = InSegments(convolutions(10)).double()
    plain, pm = planned(model, recompute=()), planned(model)
    by_hand = [sx.Recompute(tuple(f"features.{i}" for i in range(at, at + 5)), segment=5) for at in (0, 5, 10)]
    assert [str(each) for each in pm._compiled.passes if each.name == "recompute"] == [str(each) for each in by_hand]
    assert any("features.0 to features.4, features.5 to features.9" in note for note in pm.planned.notes)
    assert pm.memory().peak < 0.75 * plain.memory().peak
    check_equal(pm, plain)


class Pairs(nn.Module):
    """Equal layers, of which two at a time are recomputed."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 8, 1), nn.Sequential(OrderedDict(head()))
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in zip(self.layers[::2], self.layers[1::2], strict=True):
            x = checkpoint(lambda x, a, b: b(torch.sin(a(x))), x, first, second, use_reentrant=False)
        out: Tensor = self.head(x)
        return out


@pytest.mark.slow
def test_equal_layers_two_at_a_time() -> None:
    """What a function does between modules is recomputed, too."""
    torch.manual_seed(0)
    model = Pairs(24).double()
    plain, pm = planned(model, recompute=()), planned(model)
    again = [each for each in pm._compiled.passes if each.name == "recompute"]
    assert len(again) == 12 and str(again[1]) == str(sx.Recompute(("layers.2", "layers.3"), segment=2))
    assert pm.memory().peak < 0.5 * plain.memory().peak
    check_equal(pm, plain)


@pytest.mark.slow
def test_stages_part_what_is_recomputed_together() -> None:
    """What a stage is sent stays there: nothing of the stage before is recomputed in it."""
    torch.manual_seed(0)
    model, pipeline = listed().double(), sx.Pipeline(stages=("features.9",))
    mesh = sx.Mesh(pp=2, dp=2, mb=sx.Loop(2))
    plain, pm = (
        planned(model, mesh, pipeline=pipeline, recompute=recompute)
        for recompute in (None, sx.Recompute("features.*", segment=6))
    )
    check_equal(pm, plain)
    again = [node for node in pm.planned.nodes if node.why.startswith("recomputed")]
    assert again and all(value.node is None or value.node.at == node.at for node in again for value in node.operands)
