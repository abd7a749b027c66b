"""The text of names, ops and attributes of a graph; mistakes are named by line."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfx.ir.dim_sharding import REPLICATED, DimSharding
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Guard, Node, Output, OutputKind, Strategy, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.spec import Spec
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.text.printer import print_graph
from tests.unit.test_text import alike, argument, make, one_op, there_and_back

aten = torch.ops.aten


# ---- names -------------------------------------------------------------------------------------------------


def test_values_without_names_of_their_own_are_numbered() -> None:
    x = argument("x", 2)
    first, second = make(aten.relu.default, (x.value,), 2), make(aten.relu.default, (x.value,), 2)
    graph = Graph(Mesh(tp=2), [x], [first, second])
    assert [line.split()[0] for line in str(graph).splitlines()[-2:]] == ["%0", "%1"]
    assert (first.name, second.name) == ("", "")
    first.outs[0].name, second.outs[0].name = "7", "hidden"
    assert [line.split()[0] for line in str(graph).splitlines()[-2:]] == ["%7", "%hidden"]
    second.outs[0].name = "x"
    assert [line.split()[0] for line in str(graph).splitlines()[-2:]] == ["%0", "%1"]
    there_and_back(graph)


def test_files_of_one_name_are_told_apart() -> None:
    x = argument("x", 2)
    nodes = [make(aten.relu.default, (x.value,), 2) for _ in range(4)]
    files = ["/a/b/model.py", "/a/c/model.py", "model.py", "/a/b/model.py"]
    for node, file in zip(nodes, files, strict=True):
        node.where = Where("m", file, 1)
    graph = Graph(Mesh(tp=2), [x], nodes)
    assert [node.where.file for node in there_and_back(graph).nodes] == files
    assert [line.rsplit(maxsplit=1)[1] for line in str(graph).splitlines()[-4:]] == [
        "b/model.py:1",
        "c/model.py:1",
        "model.py:1",
        "b/model.py:1",
    ]
    assert "/a/" not in print_graph(graph, sources=False)
    assert parse_graph(print_graph(graph, sources=False)).nodes[0].where.file == "b/model.py"


# ---- ops ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", comm.OPS, ids=str)
def test_a_comm_op_comes_back(op: OwnOp) -> None:
    kwargs: dict[str, Any] = {"axes": ["tp"], "dim": 0, "to": 1, "reduce": "max", "view": [2, 2, 4], "note": None}
    graph = one_op(op, **kwargs)
    assert f"{op}(%x, axes=[tp], dim=0, to=1, reduce=max, view=[2, 2, 4], note=None)" in str(graph)
    (node,) = there_and_back(graph).nodes
    assert (node.op, node.kwargs) == (op, kwargs)


def test_an_op_of_ones_own_comes_back() -> None:
    class Twice:
        name = "twice"

        def __str__(self) -> str:
            return "mine.twice"

    twice = Twice()
    assert there_and_back(one_op(twice), **{"mine.twice": twice}).nodes[0].op is twice
    with pytest.raises(Error, match="cannot be read") as caught:
        parse_graph(print_graph(one_op(twice)))
    assert caught.value.got == "mine.twice"


def test_a_node_without_results() -> None:
    x = argument("x", 2)
    graph = Graph(Mesh(tp=2), [x], [Node(aten.relu.default, (x.value,), {}), Node(aten.t.default, (), {}, [None])])
    assert str(graph).splitlines()[-2:] == ["  aten.relu(%x)", "  _ = aten.t() : _"]
    assert [node.results for node in there_and_back(graph).nodes] == [[], [None]]


def test_the_bytes_of_a_comm_op_are_a_comment() -> None:
    x = argument("x", 1000, 1000, spec=Spec((DimSharding(("tp",)), REPLICATED)))
    node = make(comm.all_gather, (x.value,), 1000, 1000, axes=["tp"], dim=0)
    assert str(Graph(Mesh(tp=2), [x], [node])).endswith("  # 2.0 MB")


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


@pytest.mark.parametrize("where", [Where(), Where("a.b"), Where("", "/m/model.py", 3), Where("a", "/m/a b.py", 3)])
@pytest.mark.parametrize("expected", [True, 3, -0.5, float("inf"), [1, [2, 3]], []])
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


def test_an_argument_without_a_text_is_an_error() -> None:
    with pytest.raises(Error, match="has no text") as caught:
        print_graph(one_op(aten.relu.default, {"a": 1}))
    assert caught.value.got == "{'a': 1} of type dict"


# ---- mistakes ----------------------------------------------------------------------------------------------

HEAD = "mesh dp=2, tp=2\nargument %x : f32[8{dp}, 4]\nforward:\n"


@pytest.mark.parametrize(
    ("text", "line", "expected", "got"),
    [
        ("argument %x : f32[8]", 1, "", ""),
        ("mesh dp=two", 1, "a number of ranks, or Loop(iterations)", "two"),
        ("mesh dp=2.5", 1, "a number of ranks, or Loop(iterations)", "2.5"),
        ("mesh dp=0", 1, "an int of at least 1, or Loop(iterations)", 0),
        ("mesh dp=2\nlink tp bandwidth=1.0, latency=0.0", 2, "among ['dp']", ["tp"]),
        (
            "mesh dp=2\nnonsense",
            2,
            "mesh, link, unplaced, established, note, repeat, pipeline, row, source, parameter, ",
            "nonsense",
        ),
        ("mesh dp=2\nsideways:", 2, "forward, backward, update, outputs, reasons", "sideways"),
        ("mesh dp=2\nargument %x f32[8]", 2, "':'", "f32"),
        ("mesh dp=2\nargument %x : f33[8]", 2, "a dtype such as f16, ", "f33"),
        ("mesh dp=2\nargument %x : f32[8{tq}]", 2, "a mesh axis: dp", "tq"),
        ("mesh dp=2\nargument %x : f32[8{dp}, 4{dp}]", 2, "each axis at most once", "[.{dp}, .{dp}]"),
        ("mesh dp=2\nargument %x : f32[8\n", 2, "']'", "the end of the line"),
        ("mesh dp=2\nargument %x : f32[8] 9", 2, "the end of the line", "9"),
        ("mesh dp=2\nargument %x : f32[]\nargument %x : f32[]", 3, "a name that is new", "%x, which is"),
        ("mesh dp=2\nconstant %x : f32[2] = [1, 2, 3]", 2, "2 numbers for shape (2,)", ""),
        (HEAD + "  %0 = aten.relu(%y) : f32[8{dp}, 4]", 4, "a value that is defined above", "%y"),
        (HEAD + "  %0 = aten.rleu(%x) : f32[8{dp}, 4]", 4, "perhaps aten.relu", "aten.rleu"),
        (HEAD + "  %0 = comm.all_reduced(%x) : f32[8{dp}, 4]", 4, "perhaps comm.all_reduce", "comm.all_reduced"),
        (HEAD + "  %0 = comm.all_gather(%x, axes=[pp]) : f32[8, 4]", 4, "a mesh axis: dp, tp", "pp"),
        (HEAD + "  %0 = aten.relu(%x : f32[8{dp}, 4]", 4, "')'", ":"),
        (HEAD + "  %0 = aten.relu(%x, torch.nn)", 4, "a value, a number", "torch.nn"),
        (HEAD + "  %0, %1 = aten.relu(%x) : f32[8{dp}, 4]", 4, "a type for each of 2 results", "1 types"),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] {lane=[1]}", 4, "an int, float, bool or string", "["),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] hint [8{dp}, 4]", 4, "in quotes who hints so", "the end"),
        (HEAD + "outputs:\n  loss y = %x : [8, 4] x", 5, "the end of the line", "x"),
        (HEAD + "  %0 = aten.relu(%x) : f32[8{dp}, 4] at{x}", 4, "a stage's number", "x"),
        (HEAD + 'reasons:\n  1: %x 0 [8{dp}] "by x"', 5, "number 0", "1"),
        (HEAD + 'reasons:\n  0: %x 2 [8{dp}] "by x"', 5, "a dim of [8, 4]", "2"),
        (HEAD + 'reasons:\n  0: %x 0 [8{dp}] "by x" behind 3', 5, "the number of a decision", "3"),
        (HEAD + 'reasons:\n  0: %x 0 [8{dp}] "by x" from dp %z 0', 5, "a value that is defined above", "%z"),
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


def test_a_text_without_a_mesh() -> None:
    with pytest.raises(Error, match="the text has no mesh"):
        parse_graph("# nothing here\n\n")
