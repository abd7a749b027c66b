"""Which stage does what, and what cannot be split into stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Node, Phase
from shardfx.ir.names import block_of
from shardfx.ir.ops import comm
from shardfx.passes.stages.balance import balanced_split
from shardfx.passes.stages.stage_blocks import ModelBlocks

X, Y = torch.randn(12, 6), torch.randint(0, 4, (12,))
T = sx.Loop


class Net(nn.Module):
    """An embedding, four blocks, a norm and a head."""

    def __init__(self, wide: int = 8, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.emb, self.head, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), norm(8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, wide if i == 3 else 8), nn.ReLU(), nn.Linear(wide if i == 3 else 8, 8))
            for i in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.emb(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(self.norm(x))


def planned(model: nn.Module | None = None, mesh: sx.Mesh | None = None, **pipeline: Any) -> sx.ParallelModule:
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(**pipeline))
    return sx.parallelize(model or Net(), mesh or sx.Mesh(pp=2, mb=T(4)), hints, virtual=True)


def stages(pm: sx.ParallelModule) -> dict[str, tuple[int, ...]]:
    """The stages of weights, the blocks' by the first of each."""
    at = {given.name.removesuffix(".weight"): given.at for given in pm.planned.inputs if given.name.endswith(".weight")}
    return {name: each for name, each in at.items() if not name.endswith(".2")}


def halves(first: int) -> dict[str, tuple[int, ...]]:
    return {
        "emb": (0,),
        "head": (1,),
        "norm": (1,),
        **{f"layers.{i}.0": (0,) if i < first else (1,) for i in range(4)},
    }


# ---- where stages begin


def test_blocks_are_the_members_of_lists() -> None:
    assert [block_of(path) for path in ("encoder.block.3.layer.0", "head", "0", "")] == ["encoder.block.3", "", "0", ""]
    assert block_of("head.parametrizations.weight.0") == ""
    graph = sx.api.trace(Net(), sx.Hints(args=(X,)))
    assert ModelBlocks(graph).names == ("layers.0", "layers.1", "layers.2", "layers.3")


def test_a_model_without_lists_has_blocks_by_its_own_modules() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out, self.up = nn.Linear(8, 4), nn.Linear(6, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.relu(self.up(x)))

    pm = planned(Plain())
    assert ModelBlocks(pm.planned).names == ("up", "out")
    assert stages(pm) == {"up": (0,), "out": (1,)}


@pytest.mark.parametrize(
    ("costs", "count", "firsts"),
    [([1, 1, 1, 3], 2, [0, 3]), ([3, 1, 1, 1], 2, [0, 1]), ([1, 2, 3, 4, 5], 3, [0, 3, 4]), ([1, 1], 2, [0, 1])],
)
def test_the_dearest_stage_costs_least(costs: list[float], count: int, firsts: list[int]) -> None:
    assert balanced_split(costs, count) == firsts


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("given", "first"),
    [
        (None, 2),
        ((1, 3), 1),
        ((3, 1), 3),
        (("layers.1",), 1),
        (("layers.0", "layers.3"), 3),
        ((("emb", "layers.0"), ("layers.1", "layers.2", "layers.3", "head", "norm")), 1),
        ((("emb", "layers.0", "layers.1.**"), ("layers.2.*", "layers.3", "head", "norm")), 2),
    ],
)
def test_stages_are_counts_first_modules_or_patterns(given: Any, first: int) -> None:
    assert stages(planned(stages=given)) == halves(first)


def test_what_a_stage_needs_of_itself_alone_is_not_sent() -> None:
    """Activations go forward and their gradients back; weights' gradients are made where the weights are."""
    graph = planned().planned
    sends = [node for node in graph.nodes if node.op is comm.send and node.at]
    assert [(node.kwargs["origin"], node.kwargs["places"], node.phase) for node in sends] == [
        (0, [1], Phase.FORWARD),
        (1, [0], Phase.BACKWARD),
    ]
    assert all(given.at for given in graph.inputs)


@pytest.mark.long
@pytest.mark.one_in(6)
@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("made", [torch.optim.AdamW, torch.optim.Adafactor])
def test_a_weight_is_updated_in_its_own_stage(made: Callable[[Any], torch.optim.Optimizer], zero: int) -> None:
    """Its states lie there, and the update sends nothing: rates and counts of steps are reckoned in each stage."""
    pipeline, more = sx.Pipeline(stages=(2, 2)), sx.Hints(zero=zero, zero_axis="dp", zero_min_numel=0, optimizer=made)
    hints = replace(more, args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=pipeline)
    graph = sx.parallelize(Net(), sx.Mesh(pp=2, dp=2, mb=T(2)), hints, virtual=True).planned
    for each in graph.inputs:
        first = ("emb", "layers.0", "layers.1")
        if not (each.kind.is_of_optimizer and each.value.type.numel == 1) and each.name not in ("args.0", "targets.0"):
            assert each.at == (0 if each.name.startswith(first) else 1,), each.name
    assert not [node for node in graph.nodes if node.op is comm.send and node.phase is Phase.UPDATE]


def test_a_weight_of_two_stages_has_one_gradient() -> None:
    model = Net()
    model.layers[3][0].weight = model.layers[0][0].weight
    graph = planned(model).planned
    assert graph.input("layers.0.0.weight").at == (0, 1)
    (gradient,) = (o for o in graph.outputs if o.kind.value == "gradient" and o.name == "layers.0.0.weight")
    node = gradient.value.node
    assert node is not None
    assert node.op is comm.send
    assert node.at == (0, 1)


@pytest.mark.long
def test_a_buffer_that_only_counts_is_beside_its_module() -> None:
    pm = planned(Net(norm=nn.BatchNorm1d), sx.Mesh(pp=2), microbatches="", schedule="gpipe")
    assert pm.planned.input("norm.num_batches_tracked").at == (1,)
    assert pm.verify()


# ---- iterations of a pipeline


@pytest.mark.long
def test_iterations_sharded_the_batch_where_no_hint_says_so() -> None:
    pm = planned()
    assert [str(pm.planned.input(name).value.spec) for name in ("args.0", "targets.0")] == ["[.{mb}, .]", "[.{mb}]"]
    said = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), specs={"args.0": "dp mb, -"}, pipeline=sx.Pipeline())
    pm = sx.parallelize(Net(), sx.Mesh(pp=2, dp=2, mb=T(2)), said, virtual=True)
    assert str(pm.planned.input("args.0").value.spec) == "[.{dp,mb}, .]"


@pytest.mark.long
def test_a_schedule_is_a_name_a_text_or_a_function() -> None:
    text = "F0.0 F0.1 B0.0 B0.1\nF1.0 B1.0 F1.1 B1.1"
    mesh = sx.Mesh(pp=2, mb=T(2))

    def made(stages: int, iterations: int, ranks: int, costs: Any) -> sx.schedules.Schedule:
        assert (stages, iterations, ranks) == (2, 2, 2)
        assert len(costs["F"]) == len(costs["B"]) == 2
        return sx.schedules.Schedule.parse(text)

    for schedule in (text, sx.schedules.Schedule.parse(text), made):
        pipeline = planned(mesh=mesh, schedule=schedule).planned.pipeline
        assert pipeline is not None
        assert str(pipeline.schedule) == text


# ---- what is refused


def test_stages_that_need_one_another_are_named_with_two_nodes() -> None:
    stages = ("emb", "layers.1", "layers.2"), ("layers.0", "layers.3", "norm", "head")
    with pytest.raises(sx.Error, match="stages need one another in a circle") as caught:
        planned(stages=stages)
    error = caught.value
    assert str(error.where).startswith("layers.1.0  ")
    assert "aten.addmm" in str(error.where)
    assert "of stage 1" in str(error.got)
    assert "aten.add.Tensor" in str(error.got)
    assert error.remedy == "give both modules to one stage, or this one to a later stage"


@pytest.mark.slow
def test_a_batch_norm_over_iterations_is_none_of_a_pipeline() -> None:
    model = Net(norm=nn.BatchNorm1d)
    with pytest.raises(sx.Error, match="all micro-batches of 'mb' must have come to this place") as caught:
        planned(model)
    assert str(caught.value.where).startswith("norm  ")
    assert 'Hints(batch_stats="microbatch")' in str(caught.value.remedy)
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), batch_stats="microbatch", pipeline=sx.Pipeline())
    assert sx.parallelize(model, sx.Mesh(pp=2, mb=T(4)), hints, virtual=True).verify()


def test_a_value_that_is_sharded_over_stages_is_named() -> None:
    hints = sx.Hints(
        args=(X,), specs={"head.weight": "pp, -"}, pipeline=sx.Pipeline(microbatches="", schedule="F0.0\nF1.0")
    )
    with pytest.raises(sx.Error, match="a value is sharded over 'pp'") as caught:
        sx.parallelize(Net(), sx.Mesh(pp=2), hints, virtual=True)
    assert "'pp'" in str(caught.value.remedy)


def test_validation_names_what_is_used_where_it_is_not() -> None:
    class Misplace(sx.Pass):
        name = "misplace"
        after = "pipeline"

        def run(self, graph: Any, context: Any) -> bool:
            node: Node = next(node for node in graph.nodes if node.at == (1,) and node.op is not comm.send)
            node.at = (0,)
            return True

    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(), passes=[Misplace()])
    with pytest.raises(sx.Error, match=r"after pass 'misplace'.*is used where it is not") as caught:
        sx.parallelize(Net(), sx.Mesh(pp=2, mb=T(4)), hints, virtual=True)
    assert "pp = " in str(caught.value.expected)


@pytest.mark.long
def test_pictures_say_which_stage_a_module_is_of(tmp_path: Path) -> None:
    _, after = planned().draw(tmp_path)
    texts = {each.text for each in ElementTree.parse(after).iter("{http://www.w3.org/2000/svg}text")}
    assert {"stage 0", "stage 1"} <= texts
    whole = sx.parallelize(Net(), sx.Mesh(dp=2), sx.Hints(args=(X,), specs={"args.0": "dp, -"}), virtual=True)
    texts = {each.text for each in ElementTree.parse(whole.draw(tmp_path)[1]).iter("{http://www.w3.org/2000/svg}text")}
    assert not any(text.startswith("stage") for text in texts if text)
