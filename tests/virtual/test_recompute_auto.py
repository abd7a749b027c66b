"""What is recomputed to fit a budget: the cheapest choice; nothing else changes by it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import shardfx as sx
from shardfx.memory.recompute_search import ModelSegment, OpGroup, RecomputeChoice, SegmentKind, cheapest, least_peak
from tests.plans import MESHES, plan
from tests.virtual.test_memory import blocks
from tests.zoo import make


@pytest.mark.long
def test_what_costs_less_is_offloaded() -> None:
    """Where the link is fast, a smaller budget costs less than by recomputing alone; and all is proven."""
    mesh, budget = MESHES["dp2tp2"], int(plan(make("gpt_fused"), MESHES["dp2tp2"]).memory().peak * 0.75)
    fast = replace(sx.Machine.load("accelerator"), pools={"host": sx.Link(1e12, 0.0)})
    hints: dict[str, Any] = {"recompute": "auto", "memory": budget, "machine": fast}
    again, both = (
        plan(make("gpt_fused"), mesh, offload=offload, **hints)
        for offload in ((), (sx.Offload("activations", min_numel=0), "parameters"))
    )
    assert max(again.memory().peak, both.memory().peak) <= budget
    times = [pm.memory().footprint.cost.seconds(fast, mesh) for pm in (again, both)]
    assert times[1] < times[0] and both.memory().host > 0 and "recomputed or offloaded" in both.planned.notes[-1]
    case = make("gpt_fused")
    assert torch.equal(*(pm(*case.args, *case.targets, **case.kwargs) for pm in (again, both)))
    assert both.verify(), both.verify().why


@pytest.mark.long
def test_what_fits_is_left_alone() -> None:
    pm = plan(make("gpt_fused"), MESHES["dp2"], recompute="auto", memory="1GiB")
    assert str(pm.planned) == str(plan(make("gpt_fused"), MESHES["dp2"]).planned)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hints", "what"),
    [({}, "Hints(memory=...)"), ({"memory": "200 kB"}, "a budget of at least about")],
    ids=str,
)
def test_mistakes_are_errors(hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error) as raised:
        blocks(recompute="auto", **hints)
    assert what in str(raised.value) and raised.value.remedy


# ---- the choice


def kind(count: int, *groups: OpGroup) -> SegmentKind:
    """So many segments that are alike."""
    return SegmentKind([ModelSegment(f"layers.{i}") for i in range(count)], list(groups))


def chosen(kinds: list[SegmentKind], held: dict[tuple[int, ...], int], budget: int) -> RecomputeChoice:
    found = cheapest(kinds, held, budget)
    assert isinstance(found, RecomputeChoice)
    return found


def test_what_is_dear_is_offloaded() -> None:
    """The first segments make it again, the next ones put it away, whichever costs less for each group."""
    dear, cheap = OpGroup("", "aten.mm", 10, 2.0, away=1.0), OpGroup("", "aten.gelu", 10, 0.5, away=1.0)
    found = chosen([kind(8, dear, cheap)], {(8,): 200}, 80)
    assert found.again == {dear: 0, cheap: 8} and found.away == {dear: 4, cheap: 0} and found.seconds == 8.0
    both = chosen([kind(4, dear)], {(4,): 100}, 60)
    assert both.away == {dear: 4} and both.seconds == 4.0
    assert cheapest([kind(4, dear)], {(4,): 100}, 50) is None


def test_what_is_made_of_something_needs_it() -> None:
    """The gelu is recomputed from the product, which the backward itself does not need: that is kept, or recomputed
    too."""
    gelu = OpGroup("", "aten.gelu", 10, 1.0)
    product = OpGroup("", "aten.mm", 0, 50.0, 4, [gelu])
    found = chosen([kind(4, gelu, product)], {(4,): 100}, 76)
    assert found.again == {gelu: 4, product: 0} and found.kept[product] == 4
    found = chosen([kind(4, gelu, product)], {(4,): 100}, 60)
    assert found.again == {gelu: 4, product: 4} and found.seconds == 204.0
    statistics = OpGroup("", "aten.native_layer_norm", 1, 50.0, 4, [gelu])  # the backward needs but a part of it
    found = chosen([kind(4, gelu, statistics)], {(4,): 104}, 80)
    assert found.again == {gelu: 4, statistics: 0} and found.kept[statistics] == 4


def test_the_last_blocks_keep_what_a_later_moment_has_room_for() -> None:
    """Half way back, when gradients have come, the first half waits alone: that recomputes, the last blocks keep."""
    group = OpGroup("", "aten.mm", 10, 1.0)
    found = chosen([kind(8, group)], {(8,): 100, (4,): 120}, 90)
    assert found.again == {group: 3}
    assert cheapest([kind(8, group)], {(8,): 100, (4,): 120}, 70) is None
    assert least_peak([kind(8, group)], {(8,): 100, (4,): 120}) == 80


@pytest.mark.long
def test_a_pattern_that_fits_is_found_where_no_segment_keeps_anything() -> None:
    torch.manual_seed(0)
    towers = nn.ModuleDict({name: nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 4)) for name in "ab"})

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = towers["a"], towers["b"]

        def forward(self, x: Tensor) -> Tensor:
            return F.normalize(self.a(x), dim=-1) @ F.normalize(self.b(x), dim=-1).T

    x = torch.randn(8, 6)
    hints: dict[str, Any] = {"args": (x,), "loss": lambda out, y: out.sum() + y.sum() * 0, "targets": (x,)}
    hints["specs"] = {"args.0": "dp, -", "targets.0": "dp, -"}
    most, least = (
        sx.parallelize(Pair(), MESHES["dp2"], sx.Hints(**hints, recompute=again), virtual=True).memory().peak
        for again in (None, "*")
    )
    assert least < most
    pm = sx.parallelize(Pair(), MESHES["dp2"], sx.Hints(**hints, recompute="auto", memory=least), virtual=True)
    assert pm.memory().peak <= least


PICTURES, LABELS = torch.randn(8, 3, 32, 32, dtype=torch.float64), torch.randint(10, (8,))


def convolutions(count: int, width: int = 8) -> list[nn.Module]:
    ahead = [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1) for i in range(count)]
    return [each for conv in ahead for each in (conv, nn.ReLU())]


def head() -> list[tuple[str, nn.Module]]:
    return [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("fc", nn.Linear(8, 10))]


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
        args=(PICTURES,), loss=F.cross_entropy, targets=(LABELS,), specs={"args.0": "dp, -, -, -", "targets.0": "dp"},
        **hints,
    )  # fmt: skip
    return sx.parallelize(copy.deepcopy(model), mesh or sx.Mesh(dp=2), told, virtual=True)


def check_equal(pm: sx.ParallelModule, plain: sx.ParallelModule) -> None:
    """Bit for bit: all gradients, and what the model counts."""
    made, alike = (each(PICTURES, LABELS) for each in (pm, plain))
    made.backward()
    alike.backward()
    assert torch.equal(made, alike)
    for ours, theirs in ((pm.full_grads(), plain.full_grads()), (pm.full_state_dict(), plain.full_state_dict())):
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert pm.verify()


@pytest.mark.long
def test_a_chain_is_made_to_fit() -> None:
    torch.manual_seed(0)
    model = Functional().double()
    plain = planned(model)
    budget = int(plain.memory().peak * 0.6)
    pm = planned(model, recompute="auto", memory=budget)
    assert pm.memory().peak <= budget and "recomputed to fit" in pm.planned.notes[-1]
    check_equal(pm, plain)


@pytest.mark.long
def test_what_a_model_checkpoints_in_segments_is_recomputed_together() -> None:
    torch.manual_seed(0)
    model = InSegments(convolutions(10)).double()
    plain, pm = planned(model, recompute=()), planned(model)
    by_hand = [sx.Recompute(tuple(f"features.{i}" for i in range(at, at + 5)), segment=5) for at in (0, 5, 10)]
    assert pm.planned.nodes and len(pm.planned.nodes) == len(planned(model, recompute=by_hand).planned.nodes)
    assert any("features.0 to features.4, features.5 to features.9" in note for note in pm.planned.notes)
    assert pm.memory().peak < 0.75 * plain.memory().peak
    check_equal(pm, plain)
