"""What a rank holds: predicted and measured, stored in shards, recomputed; and that nothing else changes by it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Phase
from shardfx.ir.ops import memory_ops
from tests.captures import captured_once
from tests.plans import MESHES, plan
from tests.zoo import make


@pytest.mark.long
def test_recomputed_and_offloaded_dropout_draws_the_same_masks() -> None:
    """Loss and gradients of a model with dropout are those without, to the bit."""
    found = []
    for hints in ({}, {"recompute": "**"}, {"offload": (sx.Offload("activations", min_numel=0),)}):
        case = make("dropout_mlp")
        pm = plan(case, MESHES["dp2tp2"], **hints)
        torch.manual_seed(0)
        loss = pm(*case.args, *case.targets)
        loss.backward()
        found.append([loss.detach(), *pm.full_grads().values()])
        assert pm.verify(), pm.verify().why
    assert all(torch.equal(*pair) for other in found[1:] for pair in zip(found[0], other, strict=True))


# ---- the figure


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


BATCH = {"args.0": "dp, -", "targets.0": "dp, -"}


def blocks(mesh: sx.Mesh | None = None, specs: dict[str, str] | None = None, **hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x = torch.randn(256, 16)
    given = sx.Hints(args=(x,), loss=F.mse_loss, targets=(x,), specs=BATCH if specs is None else specs, **hints)
    with captured_once("blocks"):
        return sx.parallelize(Blocks(), mesh or sx.Mesh(dp=2), given)


@pytest.mark.long
def test_peak_memory_names_what_holds_it(tmp_path: Path) -> None:
    pm = blocks()
    memory = pm.memory()
    assert memory.peak == pm.report().memory.peak == sum(memory.by_category.values())
    assert memory.peak == sum(held.nbytes for held in memory.at_peak)
    assert 1.03 * memory.peak <= memory.reserved < 1.03 * memory.peak + (2 << 20)
    assert memory.by_category["parameters"] == sum(p.numel() * 4 for p in Blocks().parameters())
    largest = next(held for held in memory.at_peak if held.category == "activations")
    assert (largest.category, largest.nbytes, largest.where.module) == ("activations", 128 * 64 * 4, "layers.0.up")
    assert "test_memory.py" in str(largest) and "activations" in str(memory)
    assert max(sum(moment.values()) for moment in memory.course) <= memory.peak
    assert len(memory.course) == len(memory.footprint.calls)
    sizes = {"batch": 256, "dp": 2}
    assert {str(each) for each in memory.formula.free_symbols} == set(sizes)
    assert memory.formula.subs(sizes) == memory.peak
    drawn = memory.draw(tmp_path / "memory.svg").read_text()
    assert all(word in drawn for word in ("forward", "backward", "activations", "layers.0.up", "peak"))
    assert pm.memory(rank=1).peak == memory.peak and pm.memory(training=False).peak < memory.peak


@pytest.mark.long
def test_recompute_keeps_what_goes_into_a_block() -> None:
    plain, again = blocks().memory(), blocks(recompute="layers.*").memory()
    block = 128 * (16 + 64 + 64) * 4  # the product, its gelu, what goes in
    assert plain.by_category["activations"] > 5 * block
    assert again.by_category.get("activations", 0) <= 6 * 128 * 16 * 4
    assert again.peak < 0.6 * plain.peak
    half = blocks(recompute=sx.Recompute("layers.*", count=3)).memory()
    kept = blocks(recompute=sx.Recompute("layers.*", save="aten.addmm")).memory()
    assert again.peak < half.peak < plain.peak and again.peak < kept.peak < plain.peak


@pytest.mark.long
def test_zero_stores_shards_and_gathers_them_again() -> None:
    whole = sum(p.numel() for p in Blocks().parameters())
    held = {level: blocks(zero=level, zero_min_numel=0) for level in (0, 1, 2, 3)}
    for level, pm in held.items():
        mine = pm.memory().by_category["parameters"] / 4
        assert mine == (whole / 2 if level else whole)
        assert sum(p.numel() for p in pm.parameters()) == whole
    names = {
        level: [node.op.name for node in pm.planned.nodes if hasattr(node.op, "kind")] for level, pm in held.items()
    }
    assert "comm.reduce_scatter" in names[1] and "comm.reduce_scatter" not in names[0]
    twice = [node for node in held[3].planned.nodes if getattr(node.op, "name", "") == "comm.all_gather"]
    assert {node.phase for node in twice} == {Phase.FORWARD, Phase.BACKWARD}
    assert all(each.phase is Phase.FORWARD for each in held[1].planned.nodes if each.op == twice[0].op)
    small = blocks(zero=3, zero_min_numel=100).planned
    sharding = {given.name for given in small.inputs if given.value.spec.axes and given.name.startswith("layers")}
    assert sharding == {f"layers.{i}.{side}.weight" for i in range(6) for side in ("up", "down")}


@pytest.mark.long
def test_zero_3_gathers_at_most_two_segments_at_a_time() -> None:
    """One is used, and one under way."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(8)))
    x = torch.zeros(4, 512)
    hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(x,), specs=BATCH, zero=3)
    found = replay(sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True).rank_program(0))
    gathers = [call for call in found.calls if call.target is memory_ops.all_gather_into]
    assert len(gathers) == 8 + 7  # nobody asks for the gradient of the input
    whole = [each for each in found.storages if each.category == "gathered parameters" and each.kept]
    alive = [sum(each.nbytes for each in whole if each.born <= call <= each.last) for call in range(len(found.calls))]
    assert max(alive) <= 2 * 4 * 512 * 513


# ---- a budget


@pytest.mark.long
def test_budget_that_does_not_hold_is_an_error_with_remedies() -> None:
    peak = blocks().memory().peak
    assert blocks(memory=peak).memory().peak == peak
    with pytest.raises(sx.Error, match="more than Hints") as raised:
        blocks(memory=peak - 1000)
    error = raised.value
    assert "1.0 kB" in error.what and "activations" in str(error.got) and "layers." in str(error.where)
    assert "Hints(recompute='layers.*') holds" in str(error.remedy) and "layers.0.up" in str(error.where)
    blocks(memory=f"{peak // 1024}KiB", recompute="layers.*")
    with pytest.raises(sx.Error, match="too much"):
        blocks(memory="10 kB")


@pytest.mark.long
def test_offload_is_a_remedy_where_recompute_and_zero_are_on() -> None:
    """A copy holds its source until it is waited for."""
    hints: dict[str, Any] = {"recompute": "layers.0", "zero": 3, "zero_min_numel": 0}
    with pytest.raises(sx.Error, match="more than Hints") as raised:
        blocks(memory="350 kB", **hints)
    assert "Hints(offload=('activations',)) holds" in str(raised.value.remedy)
    assert blocks(memory="350 kB", offload=("activations",), **hints).memory().peak <= 350 * 1000
    with pytest.raises(sx.Error, match="more than Hints") as raised:
        blocks(memory="100 kB", offload=("activations",), **hints)
    assert "Hints(offload=('activations', 'parameters')) needs" in str(raised.value.remedy)


# ---- mistakes


@pytest.mark.long
@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ({"zero": 4}, "0 | 1 | 2 | 3"),
        ({"zero": 3, "zero_axis": "pd"}, "unknown mesh axis 'pd'"),
        ({"zero_min_numel": -1}, "int, 0 or more"),
        ({"memory": "16 bytes of ram"}, "16GiB"),
        ({"recompute": "layer.*"}, "matches none of the modules"),
        ({"recompute": sx.Recompute("layers.*", save="aten.mn")}, "matches none of the ops"),
        ({"recompute": sx.Recompute("layers.*", shard_saved="sp")}, "unknown mesh axis 'sp'"),
        ({"recompute": sx.Recompute("layers.*", save="layers.*.up:aten.mn")}, "did you mean"),
        ({"recompute": 3}, "Recompute"),
        ({"recompute": sx.Recompute("layers.*", skip=6)}, "skip= less than 6"),
        ({"zero": 3, "zero_axis": ("dp", "dp")}, "cannot be stored sharded over 'dp'"),
    ],
    ids=str,
)
def test_wrong_memory_hints_are_errors(hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error) as raised:
        blocks(**hints)
    assert what in str(raised.value)


@pytest.mark.parametrize(
    ("told", "what"),
    [
        ({"modules": 5}, "str | Sequence[str]"),
        ({"modules": "layers.*", "save": ("aten.mm", 1)}, "str | Sequence[str]"),
        ({"modules": "layers.*", "segment": 0}, "1 or more"),
    ],
    ids=str,
)
def test_wrong_arguments_of_recompute_are_errors(told: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error, match="is not valid") as raised:
        sx.Recompute(**told)
    assert what in str(raised.value) and raised.value.remedy
