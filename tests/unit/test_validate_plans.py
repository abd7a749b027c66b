"""The verifier on planned graphs: what the docs promise of every op, placement and output is refused where it fails."""

from __future__ import annotations

import pytest

from shardfx.ir.errors import Error
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph

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
        ("f32[8{dp}, 12{tp}]  shards m", "f32[8{dp}, 13{tp}]  shards m", "result 0 is not what", "[8, 12]", "[8, 13]"),
        ("%4 = comm", "%9, %10 = aten.relu(%2) : f32[], f32[]\n  %4 = comm", "another number of results", "1", "2 res"),
        ("aten.mm(%x, %0)", "aten.mm(%0, %0)", "does not take these arguments", "aten::mm(Tensor self", "RuntimeError"),
        # keywords
        ("dim=0) : f32[16, 12", "dim=0, way=1) : f32[16, 12", "does not take the keyword way", "axes, dim", "way"),
        # shardings of factors that the rule lacks, or needs whole
        ("shards m{dp} n{tp}", "shards m{dp} q{tp}", "sharded by a factor that its rule lacks", "one of m, k, n", "q"),
        # placements that do not follow from the shardings
        ("shards m{dp} n{tp}", "shards m{dp}", "operand 1 of aten.mm", "[., .], with shardings m{dp}", "[., .{tp}]"),
        ("shards m{dp} n{tp}", "shards m{tp} n{dp}", "is not placed as its strategy says", "", ""),
        ("f32[16, 12{tp}] +{dp}  shards", "f32[16, 12{tp}]  shards", "is not placed", "[., .{tp}] +{dp}", "[., .{tp}]"),
        # an output that leaves otherwise than it must
        ("gradient w = %7", "gradient w = %6", "otherwise than it must as a partial sum", "[16{dp}, 12{tp}]", "+{dp}"),
        ("loss loss = %4 : []", "loss loss = %3", "loss 'loss' leaves", "[]", "[] +{dp,tp}"),
        ("results.0 = %2", "results.0 = %2 : [8{dp}, 12]", "result 'results.0' leaves", "[8{dp}, 12]", "12{tp}]"),
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


def test_an_op_is_not_sharded_where_its_rule_needs_the_whole() -> None:
    text = """
        mesh tp=2
        established SHARDED
        argument %x : f32[8, 4{tp}]
        forward:
          %0 = aten._softmax(%x, 1, False) : f32[8, 4{tp}]  shards SOFT{tp}
    """
    node = parse_graph(text).nodes[0]
    entry = default_rules().entry(node.op)
    rule = entry.make(node) if entry is not None else None
    assert rule is not None
    (whole,) = rule.replicated
    with pytest.raises(Error, match="is sharded where its rule needs replication"):
        validate_graph(parse_graph(text.replace("SOFT", whole)), rules=default_rules())


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
