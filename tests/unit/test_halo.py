"""Halos are found by execution: windows of convolutions and pools, differences; and nothing where there is none."""

from __future__ import annotations

import pytest
import torch

from shardfx.ir.cut import Window
from shardfx.ir.oracle.halos import Halo, halos
from shardfx.ir.oracle.instance import instance
from tests.op_calls import f

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "before", "after"),
    [(1, 1, 1, 1, 1), (1, 0, 1, 0, 2), (2, 1, 1, 1, 1), (1, 2, 2, 2, 2), (3, 1, 1, 1, 1)],
)
def test_a_convolution(stride: int, padding: int, dilation: int, before: int, after: int) -> None:
    args = (f(2, 3, 16), f(4, 3, 3), None, [stride], [padding], [dilation], False, [0], 1)
    found = [h for h in halos(instance(aten.convolution.default, args)) if h.operand == 0]
    assert found == ([Halo(0, 2, 0, 2, stride, before, after)])


def test_both_dims_of_an_image() -> None:
    args = (f(1, 2, 9, 8), f(2, 2, 3, 5), None, [1, 1], [1, 2], [1, 1], False, [0, 0], 1)
    found = [h for h in halos(instance(aten.convolution.default, args)) if h.operand == 0]
    assert found == [Halo(0, 2, 0, 2, 1, 1, 1), Halo(0, 3, 0, 3, 1, 2, 2)]


def test_a_pool_that_overlaps_has_a_halo_and_one_side_by_side_has_none() -> None:
    x = f(1, 2, 12, 12)
    assert [
        (h.dim, h.stride, h.before, h.after) for h in halos(instance(aten.avg_pool2d.default, (x, [3, 3], [2, 2])))
    ] == [
        (2, 2, 0, 2),
        (3, 2, 0, 2),
    ]
    assert halos(instance(aten.max_pool2d_with_indices.default, (x, [2, 2], [2, 2]))) == []
    overlapping = halos(instance(aten.max_pool2d_with_indices.default, (x, [3, 3], [1, 1], [1, 1])))
    assert {(h.dim, h.before, h.after) for h in overlapping if h.result == 0} == {(2, 1, 1), (3, 1, 1)}


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (aten.relu.default, (f(4, 6),)),
        (aten.mm.default, (f(5, 6), f(6, 7))),
        (aten.cumsum.default, (f(4, 6), 1)),
        (aten._softmax.default, (f(4, 6), 1, False)),
        (aten.sum.dim_IntList, (f(4, 6), [1])),
    ],
)
def test_no_halo(op: object, args: tuple[object, ...]) -> None:
    assert halos(instance(op, args)) == []


@pytest.mark.parametrize("step", [-2, -1, 1, 2])
@pytest.mark.parametrize("outer", [Window(64, -1, 1, 63, 64), Window(64, 2, 3, -1, 1), Window(64, -1, 2, 30, 33)])
def test_two_windows_are_one_that_reaches_as_far(step: int, outer: Window) -> None:
    inner = Window(64, step, 1, 5, 6)
    for row in range(64):
        first, last = outer.reach(row, 1)
        wanted, found = inner.reach(first, last - first + 1), inner.within(outer).reach(row, 1)
        assert found[0] <= wanted[0] <= wanted[1] <= found[1] and found[1] - found[0] - (wanted[1] - wanted[0]) < 4
