"""Segments of an optimizer's step: the same numbers as call by call, however members lie; damaged ones are refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.ops.computing import segment as module
from shardfx.ir.ops.computing.segment import misfit, segment
from shardfx.passes.rank import Segments
from tests.plans import MESHES
from tests.stepped import KINDS, batches, small_plan

CALLS = [
    "aten.mul.out(c0, s0, out=c0)",
    "aten.lerp.Scalar_out(c2, c1, 0.1, out=c2)",
    "aten.sqrt.default(c3)",
    "aten.add.out(r2, 1e-08, out=r2)",
    "aten.addcdiv.out(r0, r1, r3, value=-0.5, out=r0)",
]
GIVES = [0, 2]
SHAPES = [(4, 5), (7,), (3, 2, 5), (1,)]
Layout = Callable[[], list[list[Tensor]]]


def side_by_side() -> list[list[Tensor]]:
    """Members one behind the other, in all columns."""
    sizes = [torch.Size(shape).numel() for shape in SHAPES]
    flats = [torch.rand(sum(sizes), dtype=torch.float64).split(sizes) for _ in range(4)]
    return [[flat[i].view(shape) for flat in flats] for i, shape in enumerate(SHAPES)]


def apart() -> list[list[Tensor]]:
    """Each tensor somewhere."""
    return [[torch.rand(shape, dtype=torch.float64) for _ in range(4)] for shape in SHAPES]


def transposed() -> list[list[Tensor]]:
    """Columns that lie in another order than their shapes say, beside others."""
    rows = side_by_side()
    rows[0] = [column.clone().t() for column in rows[0]]
    return rows


def backwards() -> list[list[Tensor]]:
    """Side by side, and named in another order."""
    return side_by_side()[::-1]


def one_column_elsewhere() -> list[list[Tensor]]:
    """Side by side but for a gradient."""
    rows = side_by_side()
    rows[1][1] = rows[1][1].clone()
    return rows


@pytest.mark.parametrize("layout", [side_by_side, apart, transposed, backwards, one_column_elsewhere])
@pytest.mark.parametrize("block", [8, 64, 2**18])
def test_a_segment_is_its_calls(layout: Layout, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, in memory in whatever order, in blocks that end within a member."""
    monkeypatch.setattr(module, "BLOCK", block)
    rows, scale = layout(), torch.tensor(0.9, dtype=torch.float64)
    wanted = []
    for p, g, m, v in [[column.clone() for column in row] for row in rows]:
        new = torch.lerp(m, g, 0.1)
        wanted += [torch.addcdiv(p * scale, new, v.sqrt() + 1e-8, value=-0.5), new]
    kept = [row[3].clone() for row in rows]
    given = segment(CALLS, GIVES, len(rows), [column for row in rows for column in row], [scale])
    assert all(map(torch.equal, given, wanted))
    assert all(a is b for a, b in zip(given, [row[i] for row in rows for i in GIVES], strict=True))
    assert all(torch.equal(row[3], was) for row, was in zip(rows, kept, strict=True))


def test_what_is_no_segment_is_said() -> None:
    ok = list("abcdefgh")
    assert not misfit(CALLS, GIVES, 2, ok, 1)
    for calls, gives, tensors, what in (
        (CALLS, GIVES, ok[:7], "7 tensors are not those of 2 members"),
        (CALLS, GIVES, [*"abcdafgh"], "two members of a segment"),
        (CALLS, GIVES, [*"abcdeagh"], "two members of a segment"),
        (CALLS, [3], ok, "gives what it does not write"),
        (["aten.mm.out(c0, c1, out=c0)"], [0], ok, "more than one element"),
        (["aten.mul.out(c0, s1, out=c0)"], [0], ok, "takes s1, which is not there"),
        (["aten.mul.out(c0, r0, out=c0)"], [0], ok, "takes r0, which is not there"),
        (["aten.mul.out(s0, 2, out=s0)"], [], ok, "what all members take"),
        (["print(c0)"], [], ok, "no call of a segment"),
        (["aten.mul.out(c0, __import__('os'), out=c0)"], [0], ok, "no call of a segment"),
    ):
        assert what in misfit(calls, gives, 2, tensors, 1)


def found(pm: sx.ParallelModule) -> list[fx.Node]:
    """The segments of rank 1's step."""
    return [node for node in pm.rank_program(1).graph.nodes if node.target is segment]


STEPPED = [("AdamW", {"zero": 3}), ("momentum", {"clip_grad_norm": 0.1}), ("Lamb", {})]


@pytest.mark.long
@pytest.mark.parametrize(("kind", "hints"), STEPPED, ids=str)
def test_steps_are_the_same_in_segments(kind: str, hints: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit, but for what a fused kernel rounds otherwise; what looks at a whole tensor stays as it is."""
    pm = small_plan(KINDS[kind], MESHES["dp2"], **hints)
    losses = [pm.step(x, y) for x, y in batches(3)]
    assert pm.verify(), pm.verify().why
    far = 1e-12 if any(len(one.args) == 6 for one in found(pm)) else 0.0
    if kind == "AdamW":  # all four, and what is sharded of them is computed where it is stored
        assert sum(one.args[2] for one in found(pm)) == 4
    monkeypatch.setattr(Segments, "run", lambda *_: False)
    other = small_plan(KINDS[kind], MESHES["dp2"], **hints)
    assert all((a - other.step(x, y)).abs() <= far for a, (x, y) in zip(losses, batches(3), strict=True))
    assert not found(other)
    full = other.full_state_dict()
    assert all((value - full[name]).abs().max() <= far for name, value in pm.full_state_dict().items())


def swapped(node: fx.Node, column: int) -> None:
    """Two members of one shape take each other's column."""
    _, _, members, tensors, *_ = node.args
    width = len(tensors) // members  # type: ignore[arg-type, operator]
    changed: list[Any] = list(tensors)  # type: ignore[arg-type]
    a, b = column, column + 2 * width
    changed[a], changed[b] = changed[b], changed[a]
    node.args = (*node.args[:3], changed, *node.args[4:])


def other_result(node: fx.Node) -> None:
    """A result is that of another member."""
    first, second = list(node.users)[:2]
    first.args, second.args = second.args, first.args


def replaced(node: fx.Node, place: int, old: str, new: str) -> None:
    """The text of calls (``place`` 0), or of what is run for them (5), says something else."""
    calls: Any = node.args[place]
    args = list(node.args)
    args[place] = [each.replace(old, new) for each in calls]
    assert args[place] != calls
    node.args = tuple(args)


def other_call(node: fx.Node) -> None:
    """A call computes something else, and so does the kernel."""
    replaced(node, 0, "1e-08", "1e-07")
    replaced(node, 5, "1e-08", "1e-07")


def left_out(node: fx.Node) -> None:
    """A call is not made: the average stays."""
    replaced(node, 0, "0.09999999999999998", "0.0")


KERNELS = [
    partial(replaced, place=5, old="maximize=False", new="maximize=True"),
    partial(replaced, place=5, old="_fused_adamw_", new="_fused_adam_"),
]
DAMAGES = [partial(swapped, column=2), other_result, other_call, left_out, *KERNELS]


@pytest.mark.long
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_segments_are_refused(damage: Callable[[fx.Node], None]) -> None:
    """A state, or a gradient, of another parameter; another result; another number."""
    x = torch.rand(6, 4, dtype=torch.float64)
    batch = {"args.0": "dp, -", "targets.0": "dp, -"}
    hints = sx.Hints(args=(x,), targets=(x,), loss=F.mse_loss, optimizer=KINDS["AdamW"], specs=batch)
    pm = sx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double(), MESHES["dp2"], hints)
    module = pm.rank_module(1)
    assert pm.verify(modules={1: module})
    (node,) = (each for each in module.graph.nodes if each.target is segment)
    damage(node)
    module.recompile()
    assert not pm.verify(modules={1: module})
    if damage is other_call:  # which is found where the segment is decomposed
        verdict = pm.verify(modules={1: module}, run=True)
        assert verdict.fault is not None and verdict.fault.rank == 1 and verdict.fault.numbers
