"""The order of passes as data, slots, and who is to blame."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

import shardfx as sx
from shardfx.ir.graph import Graph
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.strategy import factor_shardings, partial_operands, strategy
from shardfx.ir.text import parse_graph
from shardfx.passes import BUILT_IN, ON_REQUEST, Order, PassContext, Propagate, hint_value
from tests.golden import FOLDER

aten = torch.ops.aten
X = torch.randn(8, 6)


def hints(*passes: sx.Pass | str, **more: object) -> sx.Hints:
    return sx.Hints(args=(X,), specs={"args.0": "dp, -"}, passes=passes, **more)  # type: ignore[arg-type]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def planned(*passes: sx.Pass | str) -> sx.ParallelModule:
    return sx.parallelize(model(), sx.Mesh(dp=2, tp=2), hints(*passes), virtual=True)


def names(*passes: sx.Pass | str, **more: object) -> list[str]:
    return [each.name for each in sx.passes.default_passes(hints(*passes, **more))]


@dataclass(frozen=True)
class Nothing(sx.Pass):
    """Changes nothing."""

    name: ClassVar[str] = "nothing"

    def run(self, graph: Graph, context: PassContext) -> bool:
        return False


@dataclass(frozen=True)
class AutoTp(Nothing):
    """Shardings the first weight over tp, as somebody's own search might."""

    name: ClassVar[str] = "auto-tp"
    before: ClassVar[str] = "propagate"

    def run(self, graph: Graph, context: PassContext) -> bool:
        return hint_value(graph, graph.input("0.weight").value, "tp, -", self, context)


@dataclass(frozen=True)
class Behind(Nothing):
    name: ClassVar[str] = "behind"
    after: ClassVar[str] = "partition"


@dataclass(frozen=True)
class BehindToo(Behind):
    name: ClassVar[str] = "behind-too"


@dataclass(frozen=True)
class Lost(Nothing):
    name: ClassVar[str] = "lost"
    before: ClassVar[str] = "propagates"


@dataclass(frozen=True)
class ToGelu(sx.Pass):
    """Makes another program: a gelu for each relu."""

    name: ClassVar[str] = "to-gelu"
    before: ClassVar[str] = "propagate"

    def run(self, graph: Graph, context: PassContext) -> bool:
        rewriter = Rewriter(graph)
        for node in graph.nodes:
            if node.op is aten.relu.default:
                new = rewriter.before(node, Rewriter.make(aten.gelu.default, node.args, node.outs[0].type, like=node))
                rewriter.replace(node.outs[0], new.outs[0])
                rewriter.erase(node)
        return rewriter.apply()


@dataclass(frozen=True)
class Fails(sx.Pass):
    name: ClassVar[str] = "fails"
    how: str = "key"

    def run(self, graph: Graph, context: PassContext) -> bool:
        if self.how == "key":
            raise KeyError("oops")
        raise sx.Error("nothing to do", expected="a loss", got="none")


# ---- the order


def test_the_built_in_order() -> None:
    assert names() == [name for name in BUILT_IN if name not in ON_REQUEST]
    assert sx.passes.default_passes(hints(strict=True, bucket_mb=1))[1] == Propagate(strict=True)


def test_passes_that_stand_there_on_request() -> None:
    asked = sx.passes.default_passes(hints(zero=3, zero_axis=("dp",), recompute=("0", sx.Recompute("2", comm=False))))
    line = [each.name for each in asked if each.name in ON_REQUEST]
    assert line == ["zero", "recompute", "recompute", "rematerialize-gathers"]
    assert "loops{fetch=True,strict=False}" in map(str, asked)
    assert [each.name for each in sx.passes.default_passes(hints(zero=1)) if each.name in ON_REQUEST] == ["zero"]
    given = sx.passes.default_passes(hints("zero{level=1}", "recompute{modules='0'}", sx.Recompute("2")))
    places = {each.name: i for i, each in enumerate(given)}
    assert places["propagate"] + 3 == places["zero"] and places["unfold-repeats"] + 2 == places["recompute"]
    with pytest.raises(sx.Error, match="'zero' is given twice"):
        sx.passes.default_passes(hints("zero{level=1}", "zero{level=3}"))


def test_slots() -> None:
    made = names(Nothing(), BehindToo(), AutoTp(), Behind())
    at = {name: i for i, name in enumerate(made)}
    assert made[at["propagate"] - 1] == "auto-tp"
    assert made[at["partition"] + 1 :][:2] == ["behind-too", "behind"]
    assert made[-2:] == ["nothing", "order"]


def test_a_built_in_pass_that_is_given_takes_its_place() -> None:
    passes = sx.passes.default_passes(hints("order{ahead=2}", "bucket-comm{mb=1}"))
    assert [each.name for each in passes] == names()
    assert passes[-1] == Order(ahead=2) and str(passes[-3]) == "bucket-comm{mb=1.0}"


def test_with_propagate_it_is_the_whole_pipeline() -> None:
    whole = ["bind-hints", "propagate", Nothing(), "partition"]
    assert names(*whole) == ["bind-hints", "propagate", "nothing", "partition"]
    assert planned(*whole)(X).shape == (8, 4)


@pytest.mark.parametrize(
    ("passes", "more", "what"),
    [
        ([Lost()], {}, "stands before a pass that is not there"),
        (["order", "order"], {}, "'order' is given twice"),
        (["propagate", "partition"], {}, "'propagate' stands too early"),
        (["bind-hints", "propagate"], {}, "the pipeline is incomplete"),
        (["bind-hints", "propagate", "partition"], {"bucket_mb": 1.0}, "Hints(bucket_mb=...) says nothing"),
        (["bind-hints", "propagate", "partition"], {"strict": True}, "Hints(strict=...) says nothing"),
        (["bind-hints", "propagate", "partition"], {"zero": 3}, "Hints(zero=...) says nothing"),
        ([object()], {}, "is not valid"),
    ],
)
def test_what_is_no_pipeline(passes: list[sx.Pass], more: dict[str, object], what: str) -> None:
    with pytest.raises(sx.Error) as caught:
        sx.passes.default_passes(hints(*passes, **more))
    assert what in caught.value.what


# ---- what a pass does


def test_a_hint_of_a_pass_is_explained_by_its_name() -> None:
    pm = planned(AutoTp())
    assert "shards dim 0\n      by pass auto-tp (step" in str(pm.explain("0.weight"))
    assert str(pm.planned.input("0.weight").value.spec) == "[.{tp}, .]"
    assert pm.verify()


def test_a_users_hint_stays() -> None:
    given = sx.Hints(args=(X,), specs={"0.weight": "-, tp"}, passes=[AutoTp()])
    pm = sx.parallelize(model(), sx.Mesh(dp=2, tp=2), given, virtual=True)
    assert str(pm.planned.input("0.weight").value.spec) == "[., .{tp}]"


def test_a_pass_that_raises_is_named_with_its_line() -> None:
    with pytest.raises(sx.Error, match="pass 'fails' failed: KeyError") as caught:
        planned(Fails())
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(i for i, text in enumerate(lines, 1) if "raise KeyError" in text)
    assert f"test_pass_order.py:{line} in run; after bind-hints, propagate" in str(caught.value.where)
    with pytest.raises(sx.Error, match="pass 'fails': nothing to do") as caught:
        planned(Fails("error"))
    assert f"test_pass_order.py:{line + 1}" in str(caught.value.where) and caught.value.expected == "a loss"


def test_a_diff_of_one_pass() -> None:
    pm = planned(AutoTp())
    text = pm.diff("partition").splitlines()
    assert text[:2] == ["--- before partition", "+++ after partition"]
    assert any(line.startswith("+  %new0 = comm.all_reduce(%") for line in text)
    assert sum(line.startswith(("+  %", "-  %")) for line in text) == 3, "the reduction, and its user"
    assert pm.diff("reassociate") == ""
    with pytest.raises(sx.Error, match="did you mean 'partition'"):
        pm.diff("partitio")


def test_a_pass_that_breaks_the_meaning_is_named() -> None:
    assert planned(AutoTp()).verify(every_pass=True).checked["ranks"] == 4
    verdict = planned(ToGelu(), Nothing()).verify(every_pass=True)
    assert not verdict and "after pass 'to-gelu': the planned graph computes another function" in verdict.why
    assert "result results.0" in verdict.why


# ---- graphs compared

GRAPH = """
mesh dp=2
argument %x : f32[8, 4]
forward:
  %0 = aten.relu(%x) : f32[8, 4]
  %1 = aten.add.Tensor(%0, %x) : f32[8, 4]
outputs:
  result results.0 = %1
"""


def test_graphs_are_proven_the_same_or_not() -> None:
    assert sx.rerun.prove(GRAPH, parse_graph(GRAPH))
    assert str(sx.rerun.prove(GRAPH, GRAPH)).startswith("proven: both graphs compute the same (2 nodes")
    assert sx.rerun.prove(GRAPH, GRAPH.replace("(%0, %x)", "(%x, %0)")), "sums may be reordered"
    wrong = sx.rerun.prove(GRAPH, GRAPH.replace("aten.relu", "aten.neg"))
    assert not wrong and "another function" in wrong.why and "result results.0" in wrong.why
    other = sx.rerun.prove(GRAPH, GRAPH.replace("results.0", "results.1"))
    assert not other and "lacks an output" in other.why


# ---- laws of the built-in passes


@pytest.mark.parametrize("name", ["gpt", "bert", "resnet", "unet"])
def test_strategies_are_recomputed_from_their_text(name: str) -> None:
    """What sum-placement starts from: the shardings of factors, read off placements, give the same placements."""
    graph = parse_graph((FOLDER / "sum-placement" / f"{name}.txt").read_text(encoding="utf-8"))
    context = PassContext(default_rules(), Redistribution(graph.mesh))
    for node in graph.nodes:
        rule = context.cache.rule(node)
        assert node.strategy is not None
        shardings = factor_shardings(rule, node, graph.mesh)
        assert strategy(rule, shardings, graph.mesh, partial_operands(node.strategy)) == node.strategy
