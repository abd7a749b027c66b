"""Rows that overlap: what a rank needs of an image through a window, parts of what it has, refused sums."""

from __future__ import annotations

import random

import pytest
import torch

from shardfx.ir.dim_sharding import DimSharding, Window
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.comm import halo
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.soundness import Execution, shard_operands
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.strategy import strategy
from shardfx.ir.shards import rows_for
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.text.parser import parse_spec
from tests.op_calls import f
from tests.window_cases import KINDS, Draw

aten = torch.ops.aten
BOOK = default_rules()
TWO = Mesh(h=2)


# ---- the placement -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window", "text"),
    [
        (Window(64, 1, 1, -1, 1), "64 for 64{h} by o-1 to o+1"),
        (Window(32, 2, 1, 0, 2), "64 for 32{h} by 2o to 2o+2"),
        (Window(128, 1, 2, 1, 1), "64 for 128{h} by (o+1)/2 to (o+1)/2"),
        (Window(64, -1, 1, 63, 63), "64 for 64{h} by -o+63 to -o+63"),
    ],
)
def test_the_text_of_rows_is_read_back(window: Window, text: str) -> None:
    spec = Spec((DimSharding(("h",), rows=window), DimSharding()))
    assert spec.text((64, 3)) == f"[{text}, 3]"
    assert parse_spec(f"[{text}, 3]", TWO) == ((64, 3), spec)


def test_a_rank_holds_what_there_is_of_its_rows() -> None:
    sharding = rows_for(("h",), Window(32, 2, 1, -1, 1), 64, TWO)
    assert [sharding.span(64, TWO, {"h": rank}) for rank in range(2)] == [(0, 32), (31, 33)]
    assert Spec((sharding,)).local_numel((64,), TWO) == 33
    assert not sharding.is_even(64, TWO)


def test_rows_that_are_a_ranks_own_are_a_plain_sharding() -> None:
    assert rows_for(("h",), Window(64, 1, 1, 0, 0), 64, TWO) == DimSharding(("h",))
    assert rows_for(("h",), Window(32, 2, 1, 0, 1), 64, TWO) == DimSharding(("h",))
    assert rows_for(("h",), Window(7, 2, 1, 0, 1), 14, TWO).text(14) == "(7{h} 2)"


def test_a_rank_that_makes_something_of_padding_alone_holds_a_row() -> None:
    assert Window(9, 1, 1, -4, -4).rows(0, 2, 5) == (0, 1)
    assert Window(9, 1, 1, 4, 4).rows(8, 1, 5) == (4, 1)
    assert Window(9, 1, 1, 0, 0).rows(0, 0, 5) == (0, 0)


# ---- rules -------------------------------------------------------------------------------------------------


def drawn(kind: str, seed: int) -> Instance | None:
    try:
        op, args = KINDS[kind](Draw(seed))
        return instance(op, args)
    except (RuntimeError, ValueError):  # no such op on one device either
        return None


def difference(kind: str, seed: int) -> str | None:
    """How a case differs from the whole op, or ""; None if there is nothing to be sharded."""
    of = drawn(kind, seed)
    entry = None if of is None else BOOK.entry(of.node.op)
    if of is None or entry is None:
        return None
    rule = entry.make(of.node)
    assert rule is not None
    leaders = [factor for factor in rule.leaders if rule.sizes[factor] > 1]
    if not leaders:
        return None
    ranks = Draw(seed).randint(2, 5)  # of which some have nothing of a small image
    mesh = Mesh(a=ranks)
    made = strategy(rule, {leaders[0]: DimSharding(("a",))}, mesh)
    return Execution(
        entry, made, of, mesh, shard_operands(made, of, mesh, torch.Generator().manual_seed(seed))
    ).difference()


@pytest.mark.parametrize("kind", KINDS)
def test_tiles_are_those_of_the_whole(kind: str) -> None:
    torch.manual_seed(0)
    found = {seed: difference(kind, seed) for seed in range(60)}
    assert not {seed: why for seed, why in found.items() if why}
    assert sum(why is not None for why in found.values()) >= 30


def test_a_factor_that_sees_others_is_sharded_into_chunks_alone() -> None:
    node = instance(aten.convolution.default, (f(1, 2, 12), f(2, 2, 3), None, [1], [1], [1], False, [0], 1)).node
    entry = BOOK.entry(node.op)
    assert entry is not None
    rule = entry.make(node)
    assert rule is not None and rule.kin("h0") == rule.kin("p0") == {"h0", "p0"}
    segments = parse_spec("[(6 2{h})]", TWO)[1].dims[0]
    with pytest.raises(Error, match="sees others through windows"):
        strategy(rule, {"p0": segments}, TWO)


def test_rows_that_a_rank_has_none_of_are_not_made_of_others() -> None:
    """Of six rows the last rank has the sixth, which is none of the slice: it would need the fifth, as one row at
    least is made."""
    node = instance(aten.slice.Tensor, (f(2, 6, 3), 1, 0, -1)).node
    entry, four = BOOK.entry(node.op), Mesh(a=2, b=2)
    rule = entry.make(node) if entry is not None else None
    assert rule is not None
    rows = DimSharding(("a", "b"), rows=Window(6, 1, 1, 0, 0))
    with pytest.raises(Error, match="a rank has no rows"):
        strategy(rule, {"o": rows}, four)
    made = strategy(rule, {"o": DimSharding(("a",), rows=Window(6, 1, 1, 0, 0))}, four)
    assert made.operands[0].text((2, 6, 3)) == "[2, 6{a}, 3]"


# ---- the exchange ------------------------------------------------------------------------------------------


def test_an_exchange_sends_the_rows_that_others_need() -> None:
    mesh = Mesh(h=3, w=2)
    _, tiles = parse_spec("[1, 2, 12{h}, 10{w}]", mesh)
    rows = ((2, Window(12, 1, 1, -1, 1)), (3, Window(10, 1, 1, -1, 1)))
    needed = halo.place(tiles, (1, 2, 12, 10), mesh, axes=["h", "w"], rows=rows)
    value = Value(TensorType((1, 2, 12, 10), torch.float32), spec=tiles)
    node = Node(halo, (value,), {"axes": ["h", "w"], "rows": rows})
    node.results = [Value(value.type, node, spec=needed)]
    inner = 2 * 5 + 4 + 2  # a row above and one below, a column beside, two corners
    assert halo.sends(node, mesh).nbytes == 4 * 2 * inner


@pytest.mark.parametrize("text", ["[64 for 32{h} by 2o to 3o]", "[64 for 32{h} by (o)/0 to (o)/0]", "[64 for 32{h}]"])
def test_what_is_no_window_is_refused(text: str) -> None:
    with pytest.raises(Error):
        parse_spec(text, TWO)


THREE = Mesh(h=3)
WIDE = DimSharding(("h",), rows=Window(12, 1, 1, -1, 1))


def test_a_sum_over_rows_that_overlap_is_refused() -> None:
    entry = BOOK.entry(aten.sum.dim_IntList)
    assert entry is not None
    of = instance(aten.sum.dim_IntList, (torch.randn(2, 12), [1]))
    rule = entry.make(of.node)
    assert rule is not None
    (factor,) = rule.operands[0][1]
    assert strategy(rule, {factor: DimSharding(("h",))}, THREE).results[0].partial == (("h", "sum"),)
    with pytest.raises(Error, match="counts rows twice"):
        strategy(rule, {factor: WIDE}, THREE)


@pytest.mark.parametrize("kind", KINDS)
def test_ops_on_windows_are_right_in_rows_that_overlap(kind: str) -> None:
    """All ranks make more than their tiles, from the rows that this needs: what they have in common is the same."""
    torch.manual_seed(0)
    executed, refused = 0, 0
    for seed in range(60):
        of, draw = drawn(kind, seed), random.Random(seed)
        entry = None if of is None else BOOK.entry(of.node.op)
        rule = None if of is None or entry is None else entry.make(of.node)
        if of is None or entry is None or rule is None or not rule.leaders:
            continue
        leader, mesh = draw.choice(sorted(rule.leaders)), Mesh(a=draw.randint(2, 3))
        rows = DimSharding(("a",), rows=Window(rule.sizes[leader], 1, 1, -draw.randint(0, 2), draw.randint(0, 2)))
        if rule.sizes[leader] < 2 * mesh.size:
            continue
        if any(leader not in factors for factors in rule.result_factors):
            refused += 1
            with pytest.raises(Error, match="counts rows twice"):
                strategy(rule, {leader: rows}, mesh)
            continue
        executed += 1
        made = strategy(rule, {leader: rows}, mesh)
        assert not Execution(
            entry, made, of, mesh, shard_operands(made, of, mesh, torch.Generator().manual_seed(seed))
        ).difference(), seed
    assert executed + refused >= 10
