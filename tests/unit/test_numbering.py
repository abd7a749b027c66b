"""Shares are added where one sum is true of all ranks that meet, and are the sum of these alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from shardfx.ir.graph import Where
from shardfx.ir.mesh import Mesh
from shardfx.ir.spec import Spec, TensorType
from shardfx.runtime.verify.proof.deduction import Fact
from shardfx.runtime.verify.proof.numbering import Numbering, Wrong
from shardfx.runtime.verify.proof.terms import Terms, Universe

ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
MESH = Mesh(a=3, b=2)
SHAPE = (4,)


def share(made: int) -> Fact:
    """A share of a sum over all ranks; ``made`` says of which sum, by which shard."""
    return Fact(0, Spec(Spec.replicated(1).dims, (("a", "sum"), ("b", "sum"))), (("a", made), ("b", made)))


AB, BA, WHOLE = share(0), share(1), Fact(0, Spec.replicated(1))


def met(op: object, *known: Sequence[Fact]) -> list[Fact]:
    """What the first of the ranks knows behind a collective over all of them, of which each knew something."""
    universe = Universe(Terms([TensorType(SHAPE, torch.float64)], [Where()], ["sum"]), {}, {})
    universe.specs[0] = [Spec.replicated(1)]
    numbering = Numbering(universe, MESH)
    given = [numbering.codes(facts, rank) for rank, facts in enumerate(known)]
    got = numbering.collective(op, [("sum",)] * len(given), given, ["a", "b"])
    return numbering.read(got[0], (), 0)


def test_the_sum_that_is_true_of_all_ranks_is_added() -> None:
    assert met(ALL_REDUCE, [BA, AB], [AB], [AB, BA], [AB], [AB], [AB]) == [WHOLE]


@pytest.mark.parametrize(
    "known",
    [
        ([AB, BA], [AB], [AB], [BA], [AB], [AB]),
        ([AB, BA], [AB], [AB], [share(2)], [AB], [AB]),
        ([WHOLE], [AB], [AB], [AB], [AB], [AB]),
    ],
)
def test_shares_of_different_sums_are_not_added(known: Sequence[Sequence[Fact]]) -> None:
    """Each two of the first's ranks agree on something, and not all of them."""
    with pytest.raises(Wrong):
        met(ALL_REDUCE, *known)


def test_what_may_be_a_share_is_gathered_where_it_is_a_whole_too() -> None:
    assert met(ALL_REDUCE, *[[AB, WHOLE]] * 6) == [WHOLE]
    with pytest.raises(Wrong, match="exchanged without being added"):
        met(GATHER, *[[AB]] * 6)


def test_copies_that_are_added_are_another_value() -> None:
    with pytest.raises(Wrong, match="is no sum over it"):
        met(ALL_REDUCE, [WHOLE, BA], *[[WHOLE]] * 5)
