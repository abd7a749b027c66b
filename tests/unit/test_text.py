"""The text of a graph: parse of print is the identity, the form is as documented, mistakes are named by line."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Guard, Input, InputKind, Node, Output, OutputKind, Phase, Strategy, Value, Where
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.text.printer import print_graph

aten = torch.ops.aten

EXAMPLE = """\
mesh dp=2, tp=2, mb=Loop(4)
link tp bandwidth=300000000000.0, latency=2e-06
established COMM_EXPLICIT, SHARDED
note "a \\"block\\" was traced once"
source model.py "/models/gpt/model.py"
source losses/model.py "/models/losses/model.py"
parameter %layers.0.w1.weight : bf16[(3 64{tp}), 16] hint [(3 64{tp}), 16] "layers.*" also lm_head.weight, "0.w"
parameter %"0" : f32[]
buffer %norm.running_mean : f32[16]
argument %args.0 : bf16[8{mb,dp}, 16]
target %targets.0 : i64[8{dp}]
constant %constant.5 : i64[2] = [0, 1]
constant %constant.6 : f64[64, 64]
seed %seed : i64[]
forward:
  %0 = aten.t(%layers.0.w1.weight) : bf16[16, (3 64{tp})]
  %1 = aten.mm(%args.0, %0) : bf16[8{dp}, (3 64{tp})] hint [8, 192] ""  shards m{dp} n{tp}  @ layers.0  model.py:42
  %2, _, %4 = aten.native_layer_norm_backward(%1, %1, [192], %1, %1, None, None, [True, False, True]) : \
bf16[8{dp}, 192] +{tp}, _, bf16[192] +{dp,tp}  shards -  \
needs [8{dp}, 192], [8, (3 64{tp})], [8, 192], [8, 192]  {lane=1, "a b"="x", half=0.5, on=True}  at{1}  @ model.py:7
  %5 = comm.all_reduce(%2, axes=[tp], reduce=sum) : bf16[8{dp}, 192]  @ layers.0  losses/model.py:1  # 1.5 kB
backward:
  %6 = aten.add.Tensor(%5, %5, alpha=-0.5) : bf16[8{dp}, 192]
forward:
  %7 = aten.cat([%5, %6], 1) : bf16[8{dp}, 384] max{tp}
outputs:
  loss loss = %7 : [8{dp}, 384]
  result results.0 = %6
  gradient layers.0.w1.weight = %4
  buffer "a name" = %norm.running_mean
"""


def make(op: Any, args: tuple[Any, ...], *shape: int, **kwargs: Any) -> Node:
    return Rewriter.make(op, args, TensorType(shape, torch.float32), kwargs=kwargs)


def argument(name: str, *shape: int, spec: Spec | None = None) -> Input:
    return Input(InputKind.ARGUMENT, name, Value(TensorType(shape, torch.float32), name=name, spec=spec))


def one_op(op: Any, *args: Any, **kwargs: Any) -> Graph:
    """A graph of one node, whose first operand is ``%x``."""
    x = argument("x", 4, 4)
    return Graph(Mesh(tp=2), [x], [make(op, (x.value, *args), 4, 4, **kwargs)])


def there_and_back(graph: Graph, **ops: Any) -> Graph:
    text = print_graph(graph)
    back = parse_graph(text, ops=ops)
    assert print_graph(back) == text
    return back


# ---- there and back ----------------------------------------------------------------------------------------


def squeezed(text: str) -> str:
    return re.sub(r" {2,}(?=\S)", "  ", text)


def test_the_documented_form_reads_back() -> None:
    graph = parse_graph(EXAMPLE)
    assert (
        parse_graph(print_graph(graph)).mesh
        == graph.mesh
        == Mesh(dp=2, tp=2, mb=Loop(4), links={"tp": Link(3e11, 2e-6)})
    )
    assert graph.established == {"COMM_EXPLICIT", "SHARDED"}
    assert graph.notes == ['a "block" was traced once']
    weight, bare = graph.inputs[:2]
    assert weight.aliases == ("lm_head.weight", "0.w")
    assert (weight.value.hint, weight.value.hinted_by) == (weight.value.spec, "layers.*")
    assert weight.value.type == TensorType((192, 16), torch.bfloat16)
    assert weight.value.spec == Spec((DimSharding(("tp",), (Part(3), Part(64, ("tp",)))), REPLICATED))
    assert bare.name == bare.value.name == "0"
    small, large = graph.of_kind(InputKind.CONSTANT)
    assert small.constant is not None and small.constant.tolist() == [0, 1] and large.constant is None
    _, mm, norm, reduced, added, cat = graph.nodes
    assert mm.op is aten.mm.default
    assert (mm.outs[0].hint, mm.outs[0].hinted_by) == (Spec.replicated(2), "")
    assert norm.attrs == {"lane": 1, "a b": "x", "half": 0.5, "on": True}
    assert [output.spec for output in graph.outputs] == [Spec((DimSharding(("dp",)), REPLICATED)), None, None, None]
    assert mm.where == Where("layers.0", "/models/gpt/model.py", 42)
    assert mm.strategy == Strategy(
        (
            Spec((DimSharding(("mb", "dp")), REPLICATED)),
            Spec((REPLICATED, DimSharding(("tp",), (Part(3), Part(64, ("tp",)))))),
        ),
        (mm.outs[0].spec,),  # type: ignore[arg-type]
        (("m", ("dp",)), ("n", ("tp",))),
    )
    assert [value and value.index for value in norm.results] == [0, None, 2]
    assert norm.args[2:] == ([192], mm.outs[0], mm.outs[0], None, None, [True, False, True])
    assert norm.outs[1].spec == Spec((REPLICATED,), (("dp", "sum"), ("tp", "sum")))
    assert (norm.at, norm.where) == ((1,), Where("", "/models/gpt/model.py", 7))
    assert (reduced.op, reduced.kwargs) == (comm.all_reduce, {"axes": ["tp"], "reduce": "sum"})
    assert (added.phase, added.kwargs) == (Phase.BACKWARD, {"alpha": -0.5})
    assert (cat.phase, cat.args) == (Phase.FORWARD, ([reduced.outs[0], added.outs[0]], 1))
    assert [output.value for output in graph.outputs][::3] == [cat.outs[0], graph.inputs[2].value]
    again = there_and_back(graph)
    assert squeezed(print_graph(again)) == squeezed(EXAMPLE).rstrip("\n")


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.complex_numbers(),
    st.text(),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex64]),
    st.sampled_from([torch.strided, torch.sparse_coo, torch.preserve_format, torch.channels_last]),
    st.sampled_from([torch.device("cpu"), torch.device("cuda:1"), torch.device("meta")]),
)
ARGUMENTS = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple))


def alike(a: Any, b: Any) -> bool:
    """Equal, of the same types, nan being equal to itself."""
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(alike, a, b))
    return repr(a) == repr(b)


@pytest.mark.long
@given(st.lists(ARGUMENTS, max_size=4), st.dictionaries(st.sampled_from(["alpha", "dim", "axes"]), ARGUMENTS))
def test_any_argument_comes_back(args: list[Any], kwargs: dict[str, Any]) -> None:
    (node,) = there_and_back(one_op(aten.add.Tensor, *args, **kwargs)).nodes
    assert alike(node.args[1:], tuple(args))
    assert alike(node.kwargs, kwargs) or all(alike(node.kwargs[key], kwargs[key]) for key in kwargs)
    assert isinstance(node.args[0], Value)


@pytest.mark.long
@given(st.lists(st.text(min_size=1), min_size=1, max_size=4, unique=True), st.text(), st.text(), st.text())
def test_any_name_comes_back(names: list[str], module: str, file: str, output: str) -> None:
    inputs = [argument(name, 2) for name in names]
    node = make(aten.cat.default, ([given.value for given in inputs],), 2)
    node.where = Where(module, file, 3 if file else 0)
    graph = Graph(Mesh(tp=2), inputs, [node], [Output(OutputKind.RESULT, output, node.outs[0])])
    back = there_and_back(graph)
    assert [given.name for given in back.inputs] == names
    assert back.nodes[0].where == node.where
    assert back.outputs[0].name == output


def test_unplaced_is_not_replicated() -> None:
    x, y = argument("x", 2), argument("y", 2)
    graph = Graph(Mesh(tp=2), [x, y])
    assert print_graph(graph) == "mesh tp=2\nunplaced\nargument %x : f32[2]\nargument %y : f32[2]"
    assert [given.value.spec for given in there_and_back(graph).inputs] == [None, None]
    x.value.spec = Spec.replicated(1)
    assert print_graph(graph) == "mesh tp=2\nargument %x : f32[2]\nargument %y : f32[2]?"
    assert [given.value.spec for given in there_and_back(graph).inputs] == [Spec.replicated(1), None]


@pytest.mark.parametrize(
    "constant",
    [
        torch.tensor([math.inf, -math.inf, math.nan, 0.1]),
        torch.tensor([1 + 2j]),
        torch.zeros(0, 3),
        torch.tensor([0.1, 1e-30], dtype=torch.bfloat16),
        torch.tensor([2**63 - 1, -(2**63)]),
    ],
    ids=str,
)
def test_a_small_constant_comes_back(constant: torch.Tensor) -> None:
    value = Value(TensorType(tuple(constant.shape), constant.dtype), name="c")
    back = there_and_back(Graph(Mesh(tp=2), [Input(InputKind.CONSTANT, "c", value, constant)])).inputs[0].constant
    assert back is not None
    assert back.dtype == constant.dtype
    assert torch.equal(back, constant) or (constant.isnan() == back.isnan()).all()


# ---- ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", comm.OPS, ids=str)
def test_a_comm_op_comes_back(op: OwnOp) -> None:
    kwargs: dict[str, Any] = {"axes": ["tp"], "dim": 0, "to": 1, "reduce": "max", "view": [2, 2, 4], "note": None}
    graph = one_op(op, **kwargs)
    assert f"{op}(%x, axes=[tp], dim=0, to=1, reduce=max, view=[2, 2, 4], note=None)" in str(graph)
    (node,) = there_and_back(graph).nodes
    assert (node.op, node.kwargs) == (op, kwargs)


def test_a_strategy_comes_back() -> None:
    """Of a comm op without a word; of another op by what it shardings, and what it needs where that is not there
    yet."""
    sharding, whole = Spec((DimSharding(("tp",)), REPLICATED)), Spec.replicated(2)
    x = argument("x", 4, 4, spec=sharding)
    gather, relu = (
        make(comm.all_gather, (x.value,), 4, 4, axes=["tp"], dim=0),
        make(aten.relu.default, (x.value,), 4, 4),
    )
    gather.outs[0].spec, gather.strategy = whole, Strategy((sharding,), (whole,))
    graph = Graph(Mesh(tp=2), [x], [gather, relu])
    relu.outs[0].spec, relu.strategy = whole, Strategy((whole,), (whole,))
    assert "shardings" not in str(graph).splitlines()[-2]
    assert str(graph).endswith("f32[4, 4]  shards -  needs [4, 4]")
    assert [node.strategy for node in there_and_back(graph).nodes] == [gather.strategy, relu.strategy]
    relu.strategy = Strategy((sharding,), (sharding,), (("d0", ("tp",)), ("a factor", ())))
    assert str(graph).endswith('f32[4, 4]  shards d0{tp} "a factor"{}  gives [4{tp}, 4]')
    assert [node.strategy for node in there_and_back(graph).nodes] == [gather.strategy, relu.strategy]


ATTRS = st.one_of(st.integers(), st.floats(), st.booleans(), st.text())


@given(st.dictionaries(st.text(), ATTRS, max_size=3), st.text(), st.text(), st.lists(st.text(min_size=1), unique=True))
def test_any_attribute_comes_back(attrs: dict[str, Any], made_by: str, why: str, names: list[str]) -> None:
    """Also next to one another, also of a factor that is called as an attribute begins."""
    graph = one_op(aten.relu.default)
    (node,) = graph.nodes
    node.attrs, node.made_by, node.why = attrs, made_by, why
    node.outs[0].spec = graph.inputs[0].value.spec = Spec.replicated(2)
    node.outs[0].hint, node.outs[0].hinted_by = Spec((DimSharding(("tp",)), REPLICATED)), why
    node.strategy = Strategy(
        (Spec.replicated(2),), (Spec.replicated(2),), (("by", ()), ("needs", ("tp",)), ("stage", ()))
    )
    graph.inputs[0].aliases = tuple(names)
    graph.outputs = [Output(OutputKind.LOSS, made_by, node.outs[0], Spec((REPLICATED, DimSharding(("tp",)))))]
    graph.notes = [made_by, why]
    text = print_graph(graph, reasons=True)
    for back in (parse_graph(text), graph.copy()):
        assert print_graph(back, reasons=True) == text
        (found,) = back.nodes
        assert alike(dict(found.attrs), attrs) or all(alike(found.attrs[key], attrs[key]) for key in attrs)
        assert (found.made_by, found.why, found.strategy) == (made_by, why, node.strategy)
        assert (found.outs[0].hint, found.outs[0].hinted_by) == (node.outs[0].hint, why)
        assert (back.inputs[0].aliases, back.outputs[0].spec) == (tuple(names), graph.outputs[0].spec)
        assert back.notes == graph.notes
    (silent,) = parse_graph(print_graph(graph)).nodes
    assert (silent.made_by, silent.why) == ("", "")


@pytest.mark.parametrize("where", [Where(), Where("a", "/m/a b.py", 3)])
@pytest.mark.parametrize("expected", [True, float("inf"), [1, [2, 3]], []])
def test_a_guard_comes_back(expected: Any, where: Where) -> None:
    graph = one_op(aten.relu.default)
    for of_loss in (False, True):
        guard = Guard(expected, where, of_loss)
        graph.outputs = [Output(OutputKind.GUARD, "guards.0", graph.nodes[0].outs[0], guard=guard)]
        for back in (there_and_back(graph), graph.copy()):
            assert back.outputs[0].guard == guard


def test_an_attribute_without_a_text_is_an_error() -> None:
    graph = one_op(aten.relu.default)
    graph.nodes[0].attrs = {"lanes": [1, 2]}  # type: ignore[dict-item]
    with pytest.raises(Error, match="attribute 'lanes' of a node has no text"):
        print_graph(graph)


# ---- mistakes ----------------------------------------------------------------------------------------------

HEAD = "mesh dp=2, tp=2\nargument %x : f32[8{dp}, 4]\nforward:\n"


@pytest.mark.parametrize(
    ("text", "line", "expected", "got"),
    [
        ("argument %x : f32[8]", 1, "", ""),
        ("mesh dp=two", 1, "a number of ranks, or Loop(iterations)", "two"),
        ("mesh dp=0", 1, "an int of at least 1, or Loop(iterations)", 0),
        ("mesh dp=2\nlink tp bandwidth=1.0, latency=0.0", 2, "among ['dp']", ["tp"]),
        (
            "mesh dp=2\nnonsense",
            2,
            "mesh, link, unplaced, established, note, repeat, pipeline, row, source, parameter, ",
            "nonsense",
        ),
        ("mesh dp=2\nargument %x f32[8]", 2, "':'", "f32"),
        ("mesh dp=2\nargument %x : f33[8]", 2, "a dtype such as f16, ", "f33"),
        ("mesh dp=2\nargument %x : f32[8{tq}]", 2, "a mesh axis: dp", "tq"),
        ("mesh dp=2\nargument %x : f32[8{dp}, 4{dp}]", 2, "each axis at most once", "[.{dp}, .{dp}]"),
        ("mesh dp=2\nargument %x : f32[]\nargument %x : f32[]", 3, "a name that is new", "%x, which is"),
        ("mesh dp=2\nconstant %x : f32[2] = [1, 2, 3]", 2, "2 numbers for shape (2,)", ""),
        (HEAD + "  %0 = aten.relu(%y) : f32[8{dp}, 4]", 4, "a value that is defined above", "%y"),
        (HEAD + "  %0 = aten.rleu(%x) : f32[8{dp}, 4]", 4, "perhaps aten.relu", "aten.rleu"),
        (HEAD + "  %0 = aten.relu(%x : f32[8{dp}, 4]", 4, "')'", ":"),
        (HEAD + "  %0, %1 = aten.relu(%x) : f32[8{dp}, 4]", 4, "a type for each of 2 results", "1 types"),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] {lane=[1]}", 4, "an int, float, bool or string", "["),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] hint [8{dp}, 4]", 4, "in quotes who hints so", "the end"),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] at{x}", 4, "a stage's number", "x"),
        (HEAD + 'reasons:\n  1: %x 0 [8{dp}] "by x"', 5, "number 0", "1"),
        (HEAD + "outputs:\n  outcome y = %x", 5, "one of result, loss, gradient, buffer", "outcome"),
    ],
)
def test_a_mistake_is_named(text: str, line: int, expected: str, got: object) -> None:
    with pytest.raises(Error) as caught:
        parse_graph(text)
    assert str(caught.value.where).startswith(f"line {line}")
    if expected:
        assert expected in str(caught.value.expected)
        assert str(got) in str(caught.value.got)
