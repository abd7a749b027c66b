"""Values that are made in rows that overlap: windows behind one another, parts of what a rank has, refused sums."""

from __future__ import annotations

import random

import pytest
import torch

from shardfx.ir.dim_sharding import DimSharding, Window
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.soundness import Execution, shard_operands
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.strategy import strategy
from shardfx.ir.shards import RowExchange, has_rows
from shardfx.ir.spec import Spec, TensorType

from .test_windows import KINDS, drawn

aten = torch.ops.aten
BOOK = default_rules()
THREE = Mesh(h=3)
WIDE = DimSharding(("h",), rows=Window(12, 1, 1, -1, 1))


def test_a_window_of_a_window_has_the_rows_of_both() -> None:
    draw = random.Random(0)
    exact = 0
    for _ in range(3000):
        inner, outer = (
            Window(20, draw.randint(1, 3), draw.randint(1, 3), low := draw.randint(-4, 3), low + draw.randint(0, 6))
            for _ in range(2)
        )
        both, start, length = inner.within(outer), draw.randint(0, 10), draw.randint(1, 9)
        first, last = outer.reach(start, length)
        low, high = inner.reach(first, last - first + 1)
        found = both.reach(start, length)
        assert found[0] <= low and high <= found[1]
        if inner.step == 1 or outer.per == 1:
            assert found == (low, high)
            exact += 1
    assert exact > 500


def test_who_has_more_rows_has_fewer() -> None:
    tiles, wide = Spec((DimSharding(("h",)),)), Spec((WIDE,))
    assert has_rows(wide, tiles, (12,), THREE) and not has_rows(tiles, wide, (12,), THREE)
    assert not has_rows(wide, Spec((DimSharding(),)), (12,), THREE)
    steps = Redistribution(THREE).steps(TensorType((12,), torch.float32), wide, tiles)
    assert [str(step.op) for step in steps] == ["comm.halo"]
    moved = RowExchange(wide, tiles, (12,), THREE, {"h": 0}, (0,))
    assert moved.most == 0 and not any(any(moved.sends(rank)) for rank in range(3))
    whole = Redistribution(THREE).steps(TensorType((12,), torch.float32), wide, Spec((DimSharding(),)))
    assert [str(step.op) for step in whole] == ["comm.halo", "comm.all_gather"]


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
