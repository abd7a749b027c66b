"""explain: from what one asks for back to the hints, and on to the communication that follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import shardfx as sx
from shardfx.explain import Entry, Trail, explain
from shardfx.ir.graph import Graph
from shardfx.ir.text import parse_graph, print_graph
from shardfx.passes import Pass, PassContext, hint_value
from tests.plans import MESHES, plan
from tests.zoo import make


@pytest.fixture(scope="module")
def pm() -> sx.ParallelModule:
    """Two blocks of a GPT with Megatron's hints and sequence parallelism, on dp=2 x tp=2."""
    return plan(make("gpt_separate"), MESHES["dp2tp2"], sequence=True)


def only(pm: sx.ParallelModule, name: str) -> Entry:
    (entry,) = pm.explain(name).entries
    return entry


def trail(entry: Entry, axis: str) -> Trail:
    return next(trail for trail in entry.trails if trail.axis == axis)


def op_of(pm: sx.ParallelModule, module: str, op: str) -> str:
    """The name of the first value that an op of a module makes."""
    found = (n for n in pm.planned.nodes if n.where.module == module and str(n.op).startswith(op))
    return f"%{next(found).name}"


@pytest.mark.long
def test_a_parameter_and_its_gradient(pm: sx.ParallelModule) -> None:
    weight, gradient = pm.explain("layers.0.proj.weight").entries
    assert weight.title == "parameter %layers.0.proj.weight : f64[48, 48{tp}]"
    (link,) = trail(weight, "tp").because
    assert link.text.startswith("the hint 'layers.*.proj.weight' (step ") and link.step > 0
    assert gradient.title.startswith("its gradient: backward %") and "aten.mm(" in gradient.title
    # Each rank of dp has the sum over its part of the batch; the all-reduce brings the whole.
    assert "partial sum" in trail(gradient, "dp").role
    assert any("all_reduce over dp" in line for line in gradient.communication)
    assert gradient.communication[-1].endswith("by gradient layers.0.proj.weight")


@pytest.mark.long
def test_an_op_its_strategy_and_its_trail(pm: sx.ParallelModule) -> None:
    """The projection adds up over its sharded input; that shard comes from the heads, and they from q, k and v."""
    entry = only(pm, op_of(pm, "layers.0.proj", "aten.mm"))
    assert "k over tp" in entry.shardings and entry.shardings.endswith("of the rule m k, k n -> m n")
    found = trail(entry, "tp")
    assert found.role == "the result is a partial sum, for the op adds up over the factor k"
    assert len(found.because) > 3
    assert found.because[-1].text.startswith("the hint 'layers.*.q.")
    steps = [link.step for link in found.because if link.step]
    assert steps == sorted(steps, reverse=True), "each reason was decided before what it is the reason for"
    assert any("reduce_scatter over tp sends 12.3 kB per rank" in line for line in entry.communication)
    lines = found.lines(brief=False)
    assert len(lines) <= 7 and any("links: %" in line for line in lines), "shortened in the middle"


@pytest.mark.long
def test_rejected_shardings_are_said(pm: sx.ParallelModule) -> None:
    """Both the tokens (a sequence hint) and the heads (a weight) want tp at the first matrix product."""
    text = str(pm.explain(op_of(pm, "layers.0.q", "aten.addmm")))
    assert "rejected: axis tp on factor m" in text


def test_a_module_is_brief_and_says_what_is_inside(pm: sx.ParallelModule) -> None:
    whole = pm.explain("layers.0.fc1")
    titles = [entry.title.split()[0] for entry in whole.entries]
    assert titles == sorted(titles, key=["parameter", "forward", "backward"].index)
    assert "links away" in str(whole) and "ask for one value" in str(whole)
    block = pm.explain("layers.0")
    assert {"layers.0.ln1", "layers.0.fc1"} <= set(block.submodules)
    assert "modules inside: layers.0." in str(block)


@pytest.mark.long
def test_the_reasons_of_a_text_are_those_of_its_graph(pm: sx.ParallelModule) -> None:
    read = parse_graph(print_graph(pm.planned, reasons=True))
    names = [*(given.name for given in read.inputs), *(f"%{node.name}" for node in read.nodes), "layers.1"]
    for name in names:
        assert str(explain(read, pm._compiled.context.rules, name)) == str(pm.explain(name))
    assert "the hint" not in str(explain(parse_graph(str(pm.planned)), pm._compiled.context.rules, names[0]))


@pytest.mark.long
def test_every_op_ends_at_a_hint(pm: sx.ParallelModule) -> None:
    """No trail breaks off, for any value of the program."""
    for node in pm.planned.nodes:
        if str(node.op) in ("comm.slice", "comm.all_to_all"):
            continue  # these are sharded where they stand, for their users
        for found in only(pm, f"%{node.name}").trails:
            assert "the hint" in found.because[-1].text, (node, found)


@pytest.mark.long
def test_batch_norm_decomposed_says_so() -> None:
    pm = plan(make("resnet"), MESHES["dp2"])
    text = str(pm.explain("bn"))
    assert "decomposed because it cannot be sharded" in text
    content = [entry.title for entry in pm.explain("bn.running_mean").entries]
    assert content[1].startswith("its new content: ")


def test_unknown_names_are_errors_with_what_comes_near(pm: sx.ParallelModule) -> None:
    with pytest.raises(sx.Error, match=r"nothing is called 'layers\.0\.prj\.weight'") as caught:
        pm.explain("layers.0.prj.weight")
    assert caught.value.remedy is not None and "'layers.0.proj.weight'" in caught.value.remedy
    with pytest.raises(sx.Error, match="nothing is called '%9999'"):
        pm.explain("%9999")


@dataclass(frozen=True)
class Search(Pass):
    """Hints a weight, as somebody's own search might: over an axis of data, too."""

    name: ClassVar[str] = "search"
    before: ClassVar[str] = "propagate"

    def run(self, graph: Graph, context: PassContext) -> bool:
        return hint_value(graph, graph.input("2.weight").value, "dp, tp", self, context)


BOTH = {"specs": {"2.weight": "-, dp"}, "zero": 3}
STORED: dict[str, tuple[dict[str, Any], str, str, list[str]]] = {
    "a hint beside zero": ({"zero": 3}, "0.weight", "tp", ["hint '0.w*'"]),
    "a hint and zero": (BOTH, "2.weight", "dp", ["hint '2.weight'", "zero=3"]),
    "a pass": ({"passes": (Search(),)}, "2.weight", "dp", ["pass search"]),
    "a state": ({"zero": 1, "optimizer": torch.optim.AdamW}, "0.weight.exp_avg", "dp", ["zero=1"]),
}


@pytest.mark.long
@pytest.mark.parametrize("by", STORED)
def test_who_decided_how_a_parameter_is_stored(by: str) -> None:
    """A hint, ``zero``, a pass, or two of them; of no input it is an op."""
    hints, name, axis, expected = STORED[by]
    specs = {"args.0": "dp, -", "0.w*": "tp, -", **hints.get("specs", {})}
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    given = {"args": (torch.randn(8, 8),), "loss": lambda out: out.sum(), "zero_min_numel": 1, **hints, "specs": specs}
    pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), sx.Hints(**given))
    text = trail(pm.explain(name).entries[0], axis).because[-1].text
    said = ["hint '0.w*'", "hint '2.weight'", "zero=1", "zero=3", "pass search"]
    assert [each for each in said if each in text] == expected, text
    for each in pm.planned.inputs:
        assert all(
            "its op" not in link.text for found in pm.explain(each.name).entries[0].trails for link in found.because
        )
