"""Which stage does what, and what cannot be split into stages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Node, Phase
from shardfx.ir.names import block_of
from shardfx.ir.ops import comm
from shardfx.ir.ops.loop import loop_ops, stage_transfer
from shardfx.ir.program.loops import schedule_actions as of_stages
from shardfx.ir.program.rank_program import RankProgram
from shardfx.passes.stages.balance import balanced_split
from shardfx.passes.stages.stage_blocks import ModelBlocks
from tests.captures import captured_once

X, Y = torch.randn(12, 6), torch.randint(0, 4, (12,))
T = sx.Loop


class Net(nn.Module):
    """An embedding, four blocks, a norm and a head."""

    def __init__(self, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.emb, self.head, self.norm = nn.Linear(6, 8), nn.Linear(8, 4), norm(8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)) for _ in range(4))

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
def test_most_expensive_stage_costs_least(costs: list[float], count: int, firsts: list[int]) -> None:
    assert balanced_split(costs, count) == firsts


@pytest.mark.parametrize(
    ("given", "first"),
    [
        ((3, 1), 3),
        (("layers.0", "layers.3"), 3),
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
def test_a_weight_is_updated_in_its_own_stage() -> None:
    """Its states lie there, and the update sends nothing: rates and counts of steps are reckoned in each stage."""
    stored = sx.Hints(zero=2, zero_axis="dp", zero_min_numel=0, optimizer=torch.optim.Adafactor)
    hints = replace(stored, args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(stages=(2, 2)))
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
def test_batch_is_sharded_over_micro_batches_where_no_hint_says_so() -> None:
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


def test_a_batch_norm_over_iterations_is_none_of_a_pipeline() -> None:
    with pytest.raises(sx.Error, match="all micro-batches of 'mb' must have come to this place") as caught:
        planned(Net(norm=nn.BatchNorm1d))
    assert str(caught.value.where).startswith("norm  ")
    assert 'Hints(batch_stats="microbatch")' in str(caught.value.remedy)


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


# ---- what users may say of a pipeline and cannot be

TEXT = str(sx.schedules.make_schedule("1f1b", stages=2, microbatches=4))


@captured_once("four blocks")
def in_four_blocks(mesh: sx.Mesh | None = None, hints: dict[str, Any] | None = None, **pipeline: Any) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
    given = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(**pipeline), **(hints or {}))
    sx.parallelize(model, mesh or sx.Mesh(pp=2, mb=T(4)), given, virtual=True)


def raises(stages: int, microbatches: int, ranks: int, costs: object) -> sx.schedules.Schedule:
    raise ZeroDivisionError("no micro-batches")


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"axis": ""}, "the mesh has no axis '' of ranks"),
        ({"stages_per_rank": 0}, "Pipeline(stages_per_rank=...) is not valid"),
        ({"stages_per_rank": 2}, "1f1b has 1 stage on each rank"),
        ({"stages_per_rank": 3, "schedule": "interleaved"}, "there are more stages than blocks: 6 and 4"),
        ({"stages": 2}, "Pipeline(stages=...) is not valid"),
        ({"stages": (1, 2)}, "another number of blocks than there are"),
        ({"stages": (1, 2, 1)}, "3 stages are described, where there are 2"),
        ({"stages": ("3", "2")}, "do not begin one behind the other"),
        ({"stages": ("9",)}, "no stage can begin at '9'"),
        ({"stages": ((), ("**",))}, "stage 0 has nothing to do"),
        ({"stages": (("0", "1"), ("1", "2", "3"))}, "is in two stages"),
        ({"stages": (("0", "1"), ("2",))}, "is in no stage"),
        ({"max_in_flight": 1, "schedule": TEXT}, "the schedule has more micro-batches in flight than may be"),
        ({"schedule": TEXT + "\nF2.0"}, "a schedule has a row for each rank"),
        ({"schedule": lambda *_, **__: TEXT}, "a function makes no schedule"),
        ({"schedule": "auto", "hints": {"memory": 100}}, "no schedule fits into what a rank may hold"),
        ({"hints": {"specs": {"3.0.weight": "pp, -"}}}, "a value is sharded over 'pp', the axis of stages"),
        ({"hints": {"specs": {"3.0.weight": "mb, -"}}}, "a parameter is sharded over 'mb', a loop axis"),
        (
            {"hints": {"zero": 3, "zero_min_numel": 0, "zero_axis": "pp"}},
            "a value is sharded over 'pp', the axis of stages",
        ),
        ({"hints": {"zero": 3, "zero_min_numel": 0, "zero_axis": "mb"}}, "cannot be stored sharded over 'mb'"),
        ({"mesh": sx.Mesh(pp=2, mb=4)}, "the mesh has no axis 'mb' of micro-batches"),
        ({"mesh": sx.Mesh(pp=sx.Loop(2), mb=sx.Loop(4))}, "the mesh has no axis 'pp' of ranks"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_no_pipeline_can_be(pipeline: dict[str, Any], words: str) -> None:
    with pytest.raises(sx.Error) as caught:
        in_four_blocks(**pipeline)
    error = caught.value
    assert words in str(error), error
    assert all(part is not None for part in (error.where, error.expected, error.got, error.remedy)), error


def test_a_function_that_makes_no_schedule_is_named() -> None:
    with pytest.raises(sx.Error, match="pass 'pipeline' failed: ZeroDivisionError: no micro-batches"):
        planned(schedule=raises)


# ---- what other stages wait for is done first, as far as memory allows


def programs(width: int, schedule: str = "1f1b") -> list[RankProgram]:
    """Those of three stages."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(6)]
    x = torch.randn(32, width)
    hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(x,), pipeline=sx.Pipeline(schedule=schedule))
    pm = sx.parallelize(nn.Sequential(*layers), sx.Mesh(pp=3, mb=sx.Loop(4)), hints, virtual=True)
    assert pm.verify()
    return [pm.rank_program(rank) for rank in range(3)]


def behind(program: RankProgram, unit: str) -> int:
    """How many products for weights stand behind what a unit sends."""
    nodes = list(program.graph.nodes)
    begin = next(i for i, node in enumerate(nodes) if node.target is loop_ops.action and node.args[1] == unit)
    end = next(
        (i for i in range(begin + 1, len(nodes)) if nodes[i].target in (loop_ops.action, loop_ops.end)), len(nodes)
    )
    sends = [i for i in range(begin, end) if nodes[i].target is stage_transfer.send]
    return sum(node.target is loop_ops.addmm for node in nodes[max(sends, default=end) : end])


@pytest.mark.long
def test_products_for_weights_stand_behind_the_send_and_nothing_more_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    made = programs(16)
    monkeypatch.setattr(of_stages, "send_early", lambda steps, *_: list(steps))
    plain = programs(16)
    before, found = ([behind(each, f"B{rank}") for rank, each in enumerate(some)] for some in (plain, made))
    assert before == [0, 1, 1] and found == [0, 2, 2]
    for mine, other in zip(made, plain, strict=True):
        assert replay(mine).peak.nbytes <= 1.01 * replay(other).peak.nbytes
