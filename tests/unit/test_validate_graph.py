"""The verifier: every kind of wrong graph is refused, by the pass, the node and its source."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Strategy, Value, Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rulebook import default_rules
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph

aten = torch.ops.aten
MESH = Mesh(dp=2, tp=2)

RIGHT = """
mesh dp=2, tp=2
established COMM_EXPLICIT, SHARDED
parameter %w : f32[16{dp}, (3 4{tp})]
parameter %v : f32[(3 4{tp}), 12]
argument %x : f32[8{dp}, 16]
forward:
  %0 = comm.all_gather(%w, axes=[dp], dim=0) : f32[16, (3 4{tp})]
  %1 = aten.mm(%x, %0) : f32[8{dp}, (3 4{tp})]  shards m{dp} n{tp}
  %2 = aten.mm(%1, %v) : f32[8{dp}, 12] +{tp}  shards m{dp} k{tp}
  %4 = aten.sum.dim_IntList(%2, [0]) : f32[12] +{dp,tp}  shards k0{dp}
  %5 = comm.reduce_scatter(%2, axes=[tp], dim=1, reduce=sum) : f32[8{dp}, 12{tp}]
  %6 = comm.all_to_all(%5, axes=[tp], dim=1, to=0) : f32[8{dp,tp}, 12]
  %7 = comm.all_gather(%1, axes=[tp], dim=2, view=[8, 3, 4]) : f32[8{dp}, 12]
  %8 = comm.slice(%7, axes=[tp], dim=1) : f32[8{dp}, 12{tp}]
  %9, %10 = comm.all_reduce(%2, %4, axes=[tp]) : f32[8{dp}, 12], f32[12] +{dp}
outputs:
  result results.0 = %6
"""


def argument(name: str, *shape: int) -> Input:
    return Input(InputKind.ARGUMENT, name, Value(TensorType(shape, torch.float32), name=name))


def relu(value: Value) -> Node:
    node = Rewriter.make(aten.relu.default, (value,), value.type)
    node.where = Where("layers.0.act", "/models/model.py", 42)
    return node


def chain(count: int) -> Graph:
    """``count`` relus, one after the other, on one input."""
    graph = Graph(MESH, [argument("x", 8, 4)])
    value = graph.inputs[0].value
    for _ in range(count):
        graph.nodes.append(relu(value))
        value = graph.nodes[-1].outs[0]
    graph.outputs.append(Output(OutputKind.RESULT, "results.0", value))
    graph.rename()
    return graph


def refused(graph: Graph, after: str | None = "a-pass") -> Error:
    with pytest.raises(Error, match="the graph is wrong") as caught:
        validate_graph(graph, after)
    return caught.value


def changed(old: str, new: str) -> Graph:
    """The right graph with something else in its text."""
    assert old in RIGHT
    return parse_graph(RIGHT.replace(old, new, 1))


def test_right_graphs_pass() -> None:
    validate_graph(chain(3))
    validate_graph(parse_graph(RIGHT))
    validate_graph(parse_graph(RIGHT), rules=default_rules())


def test_the_error_names_the_pass_the_node_and_the_source() -> None:
    graph = chain(3)
    graph.nodes[1:] = graph.nodes[:0:-1]
    error = refused(graph)
    assert error.what == "the graph is wrong after pass 'a-pass': %1 is used before it is defined"
    assert str(error.where).startswith("%2 = aten.relu(%1) : f32[8, 4] ")
    assert str(error.where).endswith("@ layers.0.act  model.py:42")
    assert error.got == "%1, which a later node defines"
    assert "'a-pass'" in str(error.remedy)
    assert refused(graph, None).what == "the graph is wrong: %1 is used before it is defined"


# ---- definitions -------------------------------------------------------------------------------------------


def ghost() -> Value:
    return Value(TensorType((8, 4), torch.float32), name="ghost")


def also_input(graph: Graph, name: str, value: Value) -> None:
    graph.inputs.append(Input(InputKind.ARGUMENT, name, value))


DEFINITIONS: dict[str, tuple[Callable[[Graph], object], str, str]] = {
    "a value": (
        lambda g: g.nodes.insert(1, relu(ghost())),
        "%<ghost> is used but never defined",
        "nothing in the graph",
    ),
    "an output": (lambda g: g.nodes.pop(), "%<1> is used but never defined", ""),
    "points to another node": (lambda g: setattr(g.nodes[1].outs[0], "node", g.nodes[0]), "%1 does not point back", ""),
    "one name": (lambda g: also_input(g, "x", argument("x", 2).value), "two inputs have one name", ""),
    "one input": (lambda g: also_input(g, "y", g.inputs[0].value), "two inputs share one value", ""),
    "a result": (lambda g: also_input(g, "y", g.nodes[0].outs[0]), "an input is the result of a node", ""),
}


@pytest.mark.parametrize("name", DEFINITIONS)
def test_each_value_has_one_definition(name: str) -> None:
    graph = chain(2)
    damage, what, got = DEFINITIONS[name]
    damage(graph)
    error = refused(graph)
    assert what in error.what and got in str(error.got)
    assert name != "an output" or error.where == "output result results.0"


# ---- placements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "what", "expected", "got"),
    [
        (Spec((REPLICATED,)), "another number of dims", "2 dims, for shape (8, 4)", "1 dims, [.]"),
        (Spec((DimSharding(("pp",)), REPLICATED)), "an unknown mesh axis", "one of dp, tp", "pp"),
        (
            Spec((DimSharding(("tp",), (Part(3), Part(2, ("tp",)))), REPLICATED)),
            "does not fit dim 0",
            "parts whose product is 8, sharded over {tp}",
            "(3 2{tp})",
        ),
    ],
)
def test_a_placement_fits_its_tensor(spec: Spec, what: str, expected: str, got: str) -> None:
    graph = chain(2)
    graph.nodes[1].outs[0].spec = spec
    error = refused(graph)
    assert f"the placement of %1 {'names' if 'axis' in what else 'does' if 'fit' in what else 'has'}" in error.what
    assert what in error.what
    assert (error.expected, error.got) == (expected, got)
    graph = chain(2)
    graph.inputs[0].value.spec = spec
    assert what in refused(graph).what


def test_a_strategy_fits_its_node() -> None:
    graph, whole, sharding = chain(1), Spec.replicated(2), Spec((DimSharding(("dp",)), REPLICATED))
    (node,) = graph.nodes
    node.strategy = Strategy((), (whole,))
    assert refused(graph).got == "placements of 0 operands and 1 results"
    node.strategy = Strategy((whole,), (sharding,))
    validate_graph(graph)
    node.outs[0].spec = whole
    error = refused(graph)
    assert "%0 is placed otherwise than its node's strategy gives it" in error.what
    assert (error.expected, error.got) == (sharding, whole)


def test_operands_are_as_needed_once_communication_is_explicit() -> None:
    graph, whole, sharding = chain(1), Spec.replicated(2), Spec((DimSharding(("dp",)), REPLICATED))
    (node,) = graph.nodes
    graph.inputs[0].value.spec, node.outs[0].spec = sharding, whole
    node.strategy = Strategy((whole,), (whole,))
    validate_graph(graph)
    graph.established = frozenset({"COMM_EXPLICIT"})
    error = refused(graph)
    assert "operand %x is placed otherwise than the node needs it" in error.what
    assert (error.expected, error.got) == (whole, sharding)
    graph.inputs[0].value.spec = None
    assert refused(graph).got == "no placement"


# ---- communication -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "what", "expected"),
    [
        ("dim=0) : f32[16, (3", "dim=0) : f32[16{dp}, (3", "does not lead to %0", "[16, (3 4{tp})]"),
        ("axes=[dp], dim=0", "axes=[tp], dim=0", "cannot start from %w", "a dim 0 whose minor axes are axes {tp}"),
        ("axes=[dp], dim=0", "axes=[dp], dim=0, how=7", "does not take the keyword how", "axes, dim; perhaps view"),
        ("axes=[dp], dim=0", "axes=[dp]", "needs the keyword dim", "axes, dim; perhaps view"),
        ("reduce=sum", "reduce=max", "cannot start from %2", "a value that is partial (max) over axes {tp}"),
        ("view=[8, 3, 4]", "view=[8, 4, 3]", "cannot start from %1", "plain shardings of the view (8, 4, 3)"),
        ("dim=1) : f32[8{dp}, 12{tp}]", "dim=0) : f32[8{dp}, 12{tp}]", "does not lead to %8", "[8{dp,tp}, 12]"),
        ("dim=1) : f32[8{dp}, 12{tp}]", "dim=1) : f32[8{dp}, 24{tp}]", "changes the type of %7", ""),
        ("f32[12] +{dp}\n", "f32[12]\n", "does not lead to %10", "[12] +{dp}"),
        ("%2, %4, axes", "%2, axes", "does not have a result for each operand", ""),
    ],
)
def test_a_comm_op_leads_to_its_result(old: str, new: str, what: str, expected: str) -> None:
    error = refused(changed(old, new))
    assert what in error.what
    assert expected in str(error.expected)


# ---- planned graphs

PLANNED = """
mesh dp=2, tp=2
established COMM_EXPLICIT, SHARDED
parameter %w : f32[16{dp}, 12{tp}]
argument %x : f32[8{dp}, 16]
forward:
  %0 = comm.all_gather(%w, axes=[dp], dim=0) : f32[16, 12{tp}]
  %1 = aten.mm(%x, %0) : f32[8{dp}, 12{tp}]  shards m{dp} n{tp}  @ layers.0  model.py:42
  %2 = aten.relu(%1) : f32[8{dp}, 12{tp}]  shards d0{dp} d1{tp}
  %3 = aten.sum(%2) : f32[] +{dp,tp}  shards k0{dp} k1{tp}
  %4 = comm.all_reduce(%3, axes=[dp, tp], reduce=sum) : f32[]
backward:
  %5 = aten.t(%x) : f32[16, 8{dp}]  shards d0{dp}
  %6 = aten.mm(%5, %2) : f32[16, 12{tp}] +{dp}  shards n{tp} k{dp}
  %7 = comm.reduce_scatter(%6, axes=[dp], dim=0, reduce=sum) : f32[16{dp}, 12{tp}]
outputs:
  loss loss = %4 : []
  result results.0 = %2
  gradient w = %7
"""


def test_a_planned_graph_passes() -> None:
    graph = parse_graph(PLANNED)
    validate_graph(graph, rules=default_rules())
    assert [spec.text(o.value.shape) for o, spec in graph.output_specs().items()] == [
        "[]",
        "[8{dp}, 12{tp}]",
        "[16{dp}, 12{tp}]",
    ]


@pytest.mark.parametrize(
    ("old", "new", "what", "expected", "got"),
    [
        # without strategy, without placement
        ("  shards d0{dp} d1{tp}\n  %3", "\n  %3", "a node has no strategy", "how it is sharded", "none"),
        ("= aten.relu(%1) : f32[8{dp}, 12{tp}]", "= aten.relu(%1) : f32[8, 12]?", "%2 has no placement", "", "none"),
        # another result than the op gives: dtype, shape, number; operands that it does not take
        ("%2 = aten.relu(%1) : f32", "%2 = aten.relu(%1) : bf16", "result 0 is not what", "torch.float32", "bfloat16"),
        ("%4 = comm", "%9, %10 = aten.relu(%2) : f32[], f32[]\n  %4 = comm", "another number of results", "1", "2 res"),
        ("aten.mm(%x, %0)", "aten.mm(%0, %0)", "does not take these arguments", "aten::mm(Tensor self", "RuntimeError"),
        # shardings of factors that the rule lacks, or needs whole
        ("shards m{dp} n{tp}", "shards m{dp} q{tp}", "sharded by a factor that its rule lacks", "one of m, k, n", "q"),
        # placements that do not follow from the shardings
        ("shards m{dp} n{tp}", "shards m{dp}", "operand 1 of aten.mm", "[., .], with shardings m{dp}", "[., .{tp}]"),
        ("shards m{dp} n{tp}", "shards m{tp} n{dp}", "is not placed as its strategy says", "", ""),
        ("f32[16, 12{tp}] +{dp}  shards", "f32[16, 12{tp}]  shards", "is not placed", "[., .{tp}] +{dp}", "[., .{tp}]"),
        # an output that leaves otherwise than it must
        ("gradient w = %7", "gradient w = %6", "otherwise than it must as a partial sum", "[16{dp}, 12{tp}]", "+{dp}"),
        ("loss loss = %4 : []", "loss loss = %3", "loss 'loss' leaves", "[]", "[] +{dp,tp}"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(old: str, new: str, what: str, expected: str, got: str) -> None:
    assert PLANNED.count(old) == 1
    with pytest.raises(Error, match="the graph is wrong after pass 'my-pass'") as caught:
        validate_graph(parse_graph(PLANNED.replace(old, new)), "my-pass", default_rules())
    error = caught.value
    assert what in error.what
    assert expected in str(error.expected)
    assert got in str(error.got)
    if "aten.mm(%x" in str(error.where):
        assert "@ layers.0  model.py:42" in str(error.where)


def test_a_type_that_hangs_on_the_device_is_right_as_any_device_gives_it() -> None:
    """On a CPU the evaluation of a batch norm saves no statistics, elsewhere it does."""
    text = """
        mesh tp=2
        argument %x : f32[2, 4, 6]
        argument %w : f32[4]
        forward:
          %0, %1, %2 = aten._native_batch_norm_legit_no_training(%x, %w, %w, %w, %w, 0.1, 1e-05) : f32[2, 4, 6], N, N
    """
    validate_graph(parse_graph(text.replace("N", "f32[4]")))
    validate_graph(parse_graph(text.replace("N", "f32[0]")))
    with pytest.raises(Error, match="result 1 is not what"):
        validate_graph(parse_graph(text.replace("N", "f32[5]")))


def test_a_partial_operand_where_the_op_is_not_linear() -> None:
    text = """
        mesh tp=2
        established SHARDED
        argument %x : f32[8] +{tp}
        forward:
          %0 = aten.relu(%x) : f32[8] +{tp}  shards -
    """
    with pytest.raises(Error, match="cannot be computed on these partial operands") as caught:
        validate_graph(parse_graph(text), rules=default_rules())
    assert "reduced over tp" in str(caught.value.expected)
    validate_graph(parse_graph(text.replace("relu", "neg")), rules=default_rules())
    with pytest.raises(Error, match="partial operands"):  # a maximum of negatives is no negative of a maximum
        validate_graph(parse_graph(text.replace("relu", "neg").replace("+{tp}", "max{tp}")), rules=default_rules())
