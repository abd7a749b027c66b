"""The planner: its steps lead from placement to placement, ranks can make them, and known answers are found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardfx.ir.dim_sharding import REPLICATED, Part, compound
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.redistribute import CommStep, Redistribution
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.spec import Spec, TensorType

MESH = Mesh(a=2, b=3, c=2, one=1)
Case = tuple[tuple[int, ...], Spec, Spec]


def f32(*shape: int) -> TensorType:
    return TensorType(shape, torch.float32)


def spec(mesh: Mesh, text: str, **partial: str) -> Spec:
    """``spec(mesh, "dp, -", tp="sum")``."""
    return Spec(Spec.parse(text, mesh).dims, tuple(partial.items()))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A shape and two placements of it; the second is partial over no more than the first."""
    factors = draw(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=3))
    placements = []
    for _ in range(2):
        places = dict(zip(MESH.names, draw(st.lists(st.integers(-2, 8), min_size=4, max_size=4)), strict=True))
        order = draw(st.permutations(MESH.names))
        dims, at = [], 0
        for dim in factors:
            parts = []
            for size in draw(st.permutations(dim)):
                parts.append(Part(size, tuple(axis for axis in order if places[axis] == at)))
                at += 1
            dims.append(compound(parts, MESH))
        placements.append((tuple(dims), {axis for axis in MESH.names if places[axis] < 0}))
    (start, start_partial), (end, end_partial) = placements
    op = draw(st.sampled_from(["sum", "max"]))
    kept = start_partial & end_partial
    shape = tuple(math.prod(dim) for dim in factors)
    return shape, Spec(start, tuple((x, op) for x in start_partial)), Spec(end, tuple((x, op) for x in kept))


def apply(step: CommStep, source: Spec, shape: Sequence[int], mesh: Mesh) -> Spec:
    keywords = {"dim": step.dim, "to": step.to, "reduce": step.reduce or "sum", "view": step.view}
    return step.op.place(source, shape, mesh, axes=step.axes, **keywords)


def held(placement: Spec, shape: Sequence[int], coords: Mapping[str, int]) -> frozenset[int]:
    """The elements that a rank holds."""
    everything = np.arange(math.prod(shape)).reshape(placement.sub_shape(shape))
    box = placement.box(shape, MESH, coords)
    return frozenset(everything[tuple(slice(s, s + n) for s, n in box)].reshape(-1).tolist())


def can_be_made(step: CommStep, source: Spec, shape: Sequence[int]) -> bool:
    """Whether the ranks of each group have among them what the step gives them."""
    before = [held(source, shape, MESH.coords(rank)) for rank in range(MESH.size)]
    after = [held(step.spec, shape, MESH.coords(rank)) for rank in range(MESH.size)]
    for rank in range(MESH.size):
        group = MESH.group(rank, step.axes)
        had = frozenset().union(*(before[r] for r in group))
        if step.op is comm.all_reduce:
            fits = after[rank] == before[rank] == had
        elif step.op is comm.all_gather:
            fits = after[rank] == had
        elif step.op is comm.all_to_all:
            fits = frozenset().union(*(after[r] for r in group)) == had
        elif step.op is comm.reduce_scatter:
            fits = before[rank] == had == frozenset().union(*(after[r] for r in group))
        else:
            fits = after[rank] <= before[rank]
        if not fits:
            return False
    return True


# ---- laws --------------------------------------------------------------------------------------------------


@pytest.mark.long
@given(cases())
def test_the_steps_lead_to_the_target(case: Case) -> None:
    shape, source, target = case
    at, reduced = source, Counter[str]()
    for step in Redistribution(MESH).steps(f32(*shape), source, target):
        assert apply(step, at, shape, MESH) == step.spec
        assert can_be_made(step, at, shape)
        assert step.seconds > 0
        if step.op in (comm.all_reduce, comm.reduce_scatter):
            reduced.update(step.axes)
            assert {(axis, step.reduce) for axis in step.axes} <= set(source.partial)
        at = step.spec
    assert at == target
    assert all(count == 1 for count in reduced.values())
    assert set(reduced) == set(source.partial_axes) - set(target.partial_axes)


@pytest.mark.long
@given(cases())
def test_no_detour_is_cheaper(case: Case) -> None:
    shape, source, target = case
    planner, type = Redistribution(MESH), f32(*shape)
    middle = Spec((REPLICATED,) * len(shape), target.partial)
    detour = planner.seconds(type, source, middle) + planner.seconds(type, middle, target)
    assert planner.seconds(type, source, target) <= detour * (1 + 1e-9)


# ---- known answers -----------------------------------------------------------------------------------------

TP = Mesh(dp=2, tp=4)


def plan(type: TensorType, source: Spec, target: Spec, mesh: Mesh = TP) -> list[tuple[OwnOp, tuple[str, ...]]]:
    return [(step.op, step.axes) for step in Redistribution(mesh).steps(type, source, target)]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        (spec(TP, "-, -", tp="sum"), spec(TP, "-, -"), [(comm.all_reduce, ("tp",))]),
        (spec(TP, "-, -", tp="sum"), spec(TP, "tp, -"), [(comm.reduce_scatter, ("tp",))]),
        (spec(TP, "dp, -", tp="sum"), spec(TP, "dp tp, -"), [(comm.reduce_scatter, ("tp",))]),
        (spec(TP, "-, -", dp="sum", tp="sum"), spec(TP, "-, -"), [(comm.all_reduce, ("dp", "tp"))]),
        (spec(TP, "-, -", dp="sum", tp="sum"), spec(TP, "dp tp, -"), [(comm.reduce_scatter, ("dp", "tp"))]),
        (spec(TP, "-, -", dp="sum", tp="max"), spec(TP, "-, -", dp="sum"), [(comm.all_reduce, ("tp",))]),
        (spec(TP, "tp, -"), spec(TP, "-, -"), [(comm.all_gather, ("tp",))]),
        (spec(TP, "dp tp, -"), spec(TP, "-, -"), [(comm.all_gather, ("dp", "tp"))]),
        (spec(TP, "tp, -"), spec(TP, "-, tp"), [(comm.all_to_all, ("tp",))]),
        (spec(TP, "dp tp, -"), spec(TP, "dp, tp"), [(comm.all_to_all, ("tp",))]),
        (spec(TP, "-, -"), spec(TP, "tp, -"), [(comm.shard, ("tp",))]),
        (spec(TP, "dp, -"), spec(TP, "tp, -"), [(comm.all_gather, ("dp",)), (comm.shard, ("tp",))]),
    ],
)
def test_the_cheapest_steps(source: Spec, target: Spec, expected: list[tuple[OwnOp, tuple[str, ...]]]) -> None:
    assert plan(f32(64, 64), source, target) == expected


def test_a_fused_weight_becomes_plain() -> None:
    """Where the parts nest, sub-dims are exchanged; where they do not, the dim is gathered and shard anew."""
    exchanged, by_three = Redistribution(Mesh(tp=3)), Mesh(tp=3)
    (step,) = exchanged.steps(f32(192), Spec((compound([Part(3), Part(64, ("tp",))], by_three),)), spec(by_three, "tp"))
    assert (step.op, step.dim, step.to, step.view) == (comm.all_to_all, 1, 0, (3, 64))
    by_two = Mesh(tp=2)
    fused = Spec((compound([Part(3), Part(64, ("tp",))], by_two),))
    gather, sharding = Redistribution(by_two).steps(f32(192), fused, spec(by_two, "tp"))
    assert (gather.op, gather.dim, gather.view, gather.spec) == (comm.all_gather, 1, (3, 64), Spec((REPLICATED,)))
    assert (sharding.op, sharding.dim, sharding.view, sharding.spec) == (comm.shard, 0, None, spec(by_two, "tp"))
    back = Redistribution(by_two).steps(f32(192), spec(by_two, "tp"), fused)
    assert [step.op for step in back] == [comm.all_gather, comm.shard]
