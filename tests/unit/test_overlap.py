"""Values that are made in rows that overlap: windows behind one another, parts of what a rank has, refused sums."""

from __future__ import annotations

import random

import pytest
import torch

from shardfx.ir.dim_sharding import DimSharding, Window
from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.soundness import Execution, shard_operands
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.strategy import strategy

from .test_windows import KINDS, drawn

aten = torch.ops.aten
BOOK = default_rules()
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
