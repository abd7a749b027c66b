"""Context parallelism: strategies of attention over a sharded sequence compared with one device; bytes; errors."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.ops.context.attention_steps import ATTENTION
from tests.collective_counts import count_collectives
from tests.reference import check_step

DIM, HEADS, GROUPS, ROWS = 32, 8, 4, 12
Sharded = dict[str, Any]


class SelfAttention(nn.Module):
    """Causal self-attention, four heads of keys for eight of queries; ``before``: of so many keys before each query."""

    def __init__(self, before: int | None = None) -> None:
        super().__init__()
        self.before = before
        self.q, self.o = (nn.Linear(DIM, DIM, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(DIM, DIM * GROUPS // HEADS, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (heads, -1)).transpose(1, 2)
            for each, heads in ((self.q, HEADS), (self.k, GROUPS), (self.v, GROUPS))
        )
        square = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool)
        seen = None if self.before is None else square.tril().triu(-self.before)
        out = F.scaled_dot_product_attention(q, k, v, seen, is_causal=seen is None, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks of attention."""

    def __init__(self, before: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(SelfAttention(before) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def loss(out: Tensor) -> Tensor:
    return (out**2).mean()


def plan(
    mesh: sx.Mesh, specs: Sharded, x: Tensor, before: int | None = None, **options: Any
) -> tuple[sx.ParallelModule, Model]:
    torch.manual_seed(0)
    model = Model(before).double()
    alone = deepcopy(model)
    hints = sx.Hints(args=(x,), loss=loss, specs=specs, **options)
    return sx.parallelize(model, mesh, hints, virtual=True), alone


def strategy_of(pm: sx.ParallelModule) -> set[str]:
    """The strategies of all attention calls, forward and backward."""
    made = [node.strategy for node in pm.planned.nodes if node.op in ATTENTION]
    return {" ".join(sorted(f"{factor}{{{' '.join(axes)}}}" for factor, axes in each.shardings)) for each in made}


def rows_of(batch: int = 2, rows: int = ROWS) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(batch, rows, DIM, dtype=torch.float64)


TP = {f"**.{name}.weight": "tp, -" for name in "qkv"} | {"**.o.weight": "-, tp"}
CASES: dict[str, tuple[sx.Mesh, Sharded, str, int]] = {
    "gather": (sx.Mesh(cp=3), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "gather")}, "s{cp}", 13),
    "gather, stripes": (
        sx.Mesh(dp=2, cp=2),
        {"args.0": "dp, cp, -", "layers.*": sx.Context("cp", "gather", stripes=3)},
        "b{dp} s{cp}",
        12,
    ),
    "all-to-all": (sx.Mesh(cp=4), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "all-to-all")}, "h{cp}", 12),
    "more ranks than key heads": (
        sx.Mesh(cp=8),
        {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "all-to-all")},
        "h{cp}",
        16,
    ),
    "more ranks with tp than key heads": (
        sx.Mesh(tp=2, cp=4),
        {"args.0": "-, cp, -", "layers.*": sx.Context("cp"), **TP},
        "h{tp cp}",
        13,
    ),
    "uneven rows": (sx.Mesh(cp=2), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "all-to-all")}, "h{cp}", 13),
    "2d": (sx.Mesh(r=2, u=2), {"args.0": "-, r u, -", "layers.*": sx.Context("r u", "2d")}, "h{u} p{r}", 12),
    "2d, uneven rows": (
        sx.Mesh(r=2, u=2),
        {"args.0": "-, r u, -", "layers.*": sx.Context("r u", "2d")},
        "h{u} p{r}",
        13,
    ),
    "ring": (sx.Mesh(cp=3), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "ring")}, "p{cp}", 12),
    "ring, stripes": (
        sx.Mesh(dp=2, tp=2, cp=2),
        {"args.0": "dp, cp, -", "layers.*": sx.Context("cp", "ring", stripes=3), **TP},
        "b{dp} h{tp} p{cp}",
        12,
    ),
    "auto": (sx.Mesh(cp=2), {"args.0": "-, cp, -", "**": sx.Context("cp")}, "p{cp}", 12),
    "auto, three ranks": (sx.Mesh(cp=3), {"args.0": "-, cp, -", "layers.*": sx.Context("cp")}, "p{cp}", 12),
    "dp, tp, zero, recompute": (
        sx.Mesh(dp=2, tp=2, cp=2),
        {"args.0": "dp, cp, -", "layers.*": sx.Context("cp", "all-to-all"), **TP},
        "b{dp} h{tp cp}",
        12,
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_context_parallel_attention_matches_single_device(case: str) -> None:
    mesh, specs, expected, rows = CASES[case]
    more = {"zero": 3, "zero_min_numel": 1, "recompute": "layers.*"} if "zero" in case else {}
    x = rows_of(rows=rows)
    pm, alone = plan(mesh, specs, x, **more)
    assert strategy_of(pm) == {expected}
    check_step(pm, alone, loss, (x,), bound=1e-12)


def test_all_to_all_sends_its_share_of_heads_whatever_the_ranks() -> None:
    """Queries, keys, values and the result, and the gradients of each: all but a rank's own rows of its own heads."""
    for ranks in (2, 4):
        x = rows_of()
        pm, _ = plan(sx.Mesh(cp=ranks), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "all-to-all")}, x)
        with count_collectives() as counts:
            pm(x).backward()
        sent = sum(count.nbytes for (op, _), count in counts.items() if op == "all_to_all_single")
        wide = 2 * DIM + 2 * DIM * GROUPS // HEADS
        assert sent == pytest.approx(2 * 2 * (ranks - 1) / ranks * (x[..., 0].numel() / ranks) * wide * 8)
        assert {op for op, _ in counts} == {"all_to_all_single", "all_reduce"}


def test_a_ring_sends_keys_to_all_ranks_twice_and_their_gradients_home() -> None:
    for ranks in (2, 3):
        x = rows_of()
        pm, _ = plan(sx.Mesh(cp=ranks), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "ring")}, x)
        with count_collectives() as counts:
            pm(x).backward()
        sent = sum(count.nbytes for (op, _), count in counts.items() if op == "all_to_all_single")
        keys = 2 * DIM * GROUPS // HEADS
        assert sent == pytest.approx(2 * (ranks - 1) * 3 * (x[..., 0].numel() / ranks) * keys * 8)
        assert {op for op, _ in counts} == {"all_to_all_single", "all_reduce"}


QUERIES, KEYS = DIM * 8, DIM * GROUPS // HEADS * 8
"""Bytes of a row's queries, and of its keys."""
SENT: dict[str, tuple[str, sx.Mesh, float]] = {
    "gather on 2": ("gather", sx.Mesh(cp=2), 1 * 16 * 6 * KEYS),
    "gather on 4": ("gather", sx.Mesh(cp=4), 3 * 8 * 6 * KEYS),
    "2d on 4": ("2d", sx.Mesh(r=2, u=2), (1 - 2 / 4) * 8 * 4 * (QUERIES + KEYS) + 8 * 6 * KEYS),
    "window on 4": ("window", sx.Mesh(cp=4), 2 * 3 * (3 * QUERIES + 2 * KEYS)),
}


@pytest.mark.parametrize("case", SENT)
def test_each_other_strategy_sends_its_formula(case: str) -> None:
    """That of ``benchmarks.long_context``; of a window what the rank sends that has neighbours on both sides."""
    how, mesh, expected = SENT[case]
    axes, x = " ".join(axis.name for axis in mesh.axes), rows_of(rows=16)
    specs = {"args.0": f"-, {axes}, -", "layers.*": sx.Context(axes, how)}
    pm, _ = plan(mesh, specs, x, before=3 if how == "window" else None)
    with count_collectives() as counts:
        pm(x).backward()
    sent = {(op, group.split("@")[0]): each.nbytes for (op, group), each in counts.items() if op != "all_reduce"}
    assert sum(sent.values()) == pytest.approx(2 * expected)


@pytest.mark.long
def test_a_saved_plan_has_its_contexts(tmp_path: Path) -> None:
    ring, _ = plan(sx.Mesh(cp=2), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "ring", stripes=3)}, rows_of())
    known = sx.Plan.load(ring.plan.save(tmp_path / "ring.json"))
    again, _ = plan(known.mesh, known.specs, rows_of())
    assert not known.differences(again.planned) and "(3 4{cp})" in str(again.planned)
    specs = {"args.0": "-, cp, -", "layers.*": sx.Context("cp", how="all-to-all")}
    pm, _ = plan(sx.Mesh(cp=2), specs, rows_of())
    known = sx.Plan.load(pm.plan.save(tmp_path / "plan.json"))
    again, _ = plan(known.mesh, known.specs, rows_of())
    assert strategy_of(again) == {"h{cp}"}
    plain, _ = plan(known.mesh, dict(known.specs), rows_of(rows=8))
    assert strategy_of(plain) == {"h{cp}"}
    assert not known.differences(again.planned)


def test_a_context_leaves_attention_of_fewer_rows_than_ranks_alone() -> None:
    specs = {"args.0": "-, cp, -", "layers.*": sx.Context("cp")}
    with pytest.warns(sx.ShardfxWarning, match="redundant compute"):
        pm, alone = plan(sx.Mesh(cp=4), specs, rows_of(rows=3))
    check_step(pm, alone, loss, (rows_of(rows=3),), bound=1e-12)
    assert "context parallelism of 'layers.*' over cp: none, for rows are fewer" in str(pm.planned.notes)


def test_a_window_that_is_none_is_gathered_with_a_warning() -> None:
    specs = {"args.0": "-, cp, -", "layers.*": sx.Context("cp", how="window")}
    with pytest.warns(sx.ShardfxWarning, match="gather; gathered, where an attention has no window"):
        pm, _ = plan(sx.Mesh(cp=2), specs, rows_of())
    assert strategy_of(pm) == {"s{cp}"}


def test_stripes_that_cannot_be_are_none_with_a_warning() -> None:
    specs = {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "ring", stripes=5)}
    with pytest.warns(sx.ShardfxWarning, match="without stripes, which need"):
        plan(sx.Mesh(cp=2), specs, rows_of())


class Mixed(nn.Module):
    """A causal layer, one with a sliding window, and one that sees all keys, with sinks."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.sinks = nn.Parameter(torch.randn(HEADS))

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        near = (place[:, None] - place).abs() <= 2
        for number in range(3):
            q, k, v = (each(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (self.q, self.k, self.v))
            if number < 2:
                out = F.scaled_dot_product_attention(q, k, v, near if number else None, is_causal=not number)
            else:
                sinks = self.sinks[:, None, None].expand(len(x), -1, x.shape[1], -1)
                scores = torch.cat([q @ k.mT / q.shape[-1] ** 0.5, sinks], -1)
                out = scores.softmax(-1)[..., :-1] @ v
            x = x + out.transpose(1, 2).flatten(2)
        return x


@pytest.mark.long
@pytest.mark.parametrize("how", ["ring", "gather"])
def test_layers_of_several_kinds_share_a_context(how: str) -> None:
    torch.manual_seed(0)
    model, x = Mixed().double(), rows_of(rows=1024)
    alone = deepcopy(model)
    hints = sx.Hints(args=(x,), loss=loss, specs={"args.0": "-, cp, -", "": sx.Context("cp", how)})
    check_step(sx.parallelize(model, sx.Mesh(cp=2), hints, virtual=True), alone, loss, (x,), bound=1e-12)


def test_heads_are_explained_by_the_context() -> None:
    pm, _ = plan(sx.Mesh(cp=2), {"args.0": "-, cp, -", "layers.*": sx.Context("cp", "all-to-all")}, rows_of())
    node = next(node for node in pm.planned.nodes if node.op is torch.ops.shardfx.attention.default)
    assert "the hint 'layers.*'" in str(pm.explain(node.outs[0].name))


BAD: dict[str, tuple[Any, str]] = {
    "unknown how": (lambda: sx.Context("cp", how="rings"), "expected: how one of auto, gather"),
    "stripes of auto": (lambda: sx.Context("cp", stripes=2), "stripes of gather, ring, 2d"),
    "stripes that are text": (lambda: sx.Context("cp", "ring", stripes="2"), "got: *.2."),  # type: ignore[arg-type]
    "no name": (lambda: sx.Context(""), "the name of a mesh axis"),
    "another axis": (lambda: {"layers.*": sx.Context("up")}, "mesh axis 'up' is unknown"),
    "an axis of the batch": (lambda: {"layers.*": sx.Context("dp")}, "'dp' shards no sequence here"),
    "no attention": (lambda: {"layers.*.q": sx.Context("cp")}, "names no attention"),
    "a strategy beside it": (
        lambda: {"layers.*": sx.Context("cp"), "strategies": {"layers.*:attention": "h{}"}},
        "hints disagree on the attention",
    ),
    "one axis": (lambda: {"layers.*": sx.Context("cp", how="2d")}, "a 2d strategy of one axis"),
    "more ranks than heads": (lambda: {"layers.*": sx.Context("cp", how="all-to-all")}, "at most 2 ranks"),
    "two of one": (lambda: {"layers.*": sx.Context("cp"), "**": sx.Context("cp", how="gather")}, "hints disagree"),
}


def planned_with(make: Any) -> None:
    specs = make()
    said = {"strategies": specs.pop("strategies")} if "strategies" in specs else {}
    plan(sx.Mesh(dp=2, cp=3), {"args.0": "dp, cp, -", **specs}, rows_of(), **said)


@pytest.mark.parametrize("case", BAD)
def test_a_context_that_cannot_be_is_an_error(case: str) -> None:
    make, text = BAD[case]
    with pytest.raises(sx.Error, match="(?s)" + text.replace("'", ".")):
        planned_with(make)


def test_axes_of_a_context_follow_those_of_the_sequence() -> None:
    with pytest.raises(sx.Error, match="in another order") as error:
        plan(sx.Mesh(r=2, u=2), {"args.0": "-, r u, -", "layers.*": sx.Context("u r")}, rows_of())
    assert 'sx.Context("r u"' in str(error.value)
