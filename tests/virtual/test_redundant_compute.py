"""An axis that shards too little of a plan, ``zero`` that shards nothing: one warning at planning, with the hint."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

TENSOR_PARALLEL = {"q.weight": "tp, -", "kv.weight": "tp, -", "o.weight": "-, tp", "up.weight": "tp, -"}


class Block(nn.Module):
    """Attention with as many heads for keys and values, and a feed-forward."""

    def __init__(self, heads: int = 4, kv: int = 4) -> None:
        super().__init__()
        self.heads, self.groups = heads, kv
        width = 4 * heads
        self.q, self.kv, self.o = nn.Linear(width, width), nn.Linear(width, 8 * kv), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.heads, 4).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, self.groups, 2, 4).permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.heads != self.groups)
        x = x + self.o(y.transpose(1, 2).reshape(batch, length, -1))
        return x + self.down(F.relu(self.up(x)))


def squares(out: Tensor, *targets: Tensor) -> Tensor:
    return out.pow(2).sum() + sum(target.sum() for target in targets)


def warned(
    mesh: sx.Mesh, model: nn.Module | None = None, shape: tuple[int, ...] = (8, 8, 16), **hints: Any
) -> list[str]:
    """What planning warns of."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        given = sx.Hints(args=(torch.zeros(shape),), loss=squares, **hints)
        pm = sx.parallelize(Block() if model is None else model, mesh, given, virtual=True)
    texts = [str(each.message) for each in found]
    assert all(issubclass(each.category, sx.ShardfxWarning) for each in found) and set(texts) <= set(pm.planned.notes)
    return texts


def followed(text: str) -> dict[str, Any]:
    """The hint that a warning says to write."""
    hint = re.search(r'Write .*?(specs|strategies|zero_min_numel)=(\{"[^}]*\}?"\}|\d+)', text)
    assert hint is not None, text
    return {hint[1]: eval(hint[2])}


LAYERS = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16), nn.Linear(16, 4))
UNUSED: dict[str, tuple[sx.Mesh, dict[str, Any], str]] = {
    "no specs": (sx.Mesh(dp=2), {}, "dp"),
    "targets only": (sx.Mesh(dp=2), {"targets": (torch.zeros(8),), "specs": {"targets.0": "dp"}}, "dp"),
    "a bias only": (sx.Mesh(tp=2), {"specs": {"2.bias": "tp"}, "model": LAYERS}, "tp"),
    "tp": (sx.Mesh(dp=2, tp=2), {"specs": {"args.0": "dp, -, -"}}, "tp"),
    "pp without a pipeline": (sx.Mesh(dp=2, pp=2), {"specs": {"args.0": "dp, -, -"}}, "pp"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_unused_mesh_axis_is_warned_of_with_a_hint_that_shards(case: str) -> None:
    mesh, hints, axis = UNUSED[case]
    (text,) = warned(mesh, **hints)
    assert text.startswith(f"redundant compute over {axis} (2 ranks)") and "FLOPs of a rank in a step (" in text
    hint = followed(text)
    specs = {**hints.get("specs", {}), **hint.pop("specs", {})}
    assert not warned(mesh, **{**hints, **hint, "specs": specs})


def test_unused_pipeline_axis_names_the_pipeline() -> None:
    (text,) = warned(sx.Mesh(pp=2), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)))
    assert 'pipeline=sx.Pipeline(axis="pp", microbatches="")' in text
    pipeline = sx.Pipeline(axis="pp", microbatches="")
    assert not warned(sx.Mesh(pp=2), nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), pipeline=pipeline)


def test_unused_loop_axis_is_warned_of_with_a_hint_that_iterates() -> None:
    mesh, specs = sx.Mesh(dp=2, mb=sx.Loop(2)), {"args.0": "dp, -, -"}
    (text,) = warned(mesh, specs=specs)
    assert text.startswith("loop axis mb (2 iterations) is not used") and "0 redundant FLOPs" in text
    assert not warned(mesh, **followed(text))


def test_zero_with_every_parameter_below_its_limit_is_warned_of() -> None:
    specs = {"args.0": "dp, -, -"}
    for level in (1, 2, 3):
        (text,) = warned(sx.Mesh(dp=2), specs=specs, zero=level)
        assert text.startswith(f"zero={level} shards nothing over dp: the largest has 1024 elements")
        assert not warned(sx.Mesh(dp=2), specs=specs, zero=level, **followed(text))


@pytest.mark.parametrize(("rows", "ranks"), [(4, 3), (2, 3), (5, 4)])
def test_batch_that_ranks_do_not_divide_is_warned_of(rows: int, ranks: int) -> None:
    shape, model = (rows, 16), nn.Linear(16, 16)
    (text,) = warned(sx.Mesh(dp=ranks), model, shape, specs={"args.0": "dp, -"})
    assert text.startswith(f"redundant compute over dp ({ranks} ranks)")
    assert f"a multiple of {ranks} in place of {rows} as dim 0 of args.0" in text
    assert not warned(sx.Mesh(dp=ranks), model, (2 * ranks, 16), specs={"args.0": "dp, -"})


def test_batch_of_one_is_warned_of_where_nothing_else_is_sharded() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)  # the batch is dim 1
    (text,) = warned(sx.Mesh(dp=2), layer, (6, 1, 8), specs={"args.0": "-, dp, -"})
    assert "(50%)" in text and "a multiple of 2 in place of 1 as dim 1 of args.0" in text


@pytest.mark.parametrize(("heads", "kv", "ranks", "how"), [(3, 3, 2, "shards unevenly"), (4, 2, 4, "does not shard")])
def test_heads_that_tensor_parallel_ranks_do_not_divide(heads: int, kv: int, ranks: int, how: str) -> None:
    mesh, model, shape = sx.Mesh(tp=ranks), Block(heads, kv), (8, 8, 4 * heads)
    (text,) = warned(mesh, model, shape, specs=TENSOR_PARALLEL)
    assert re.search(rf"begins at shardfx\.attention .*, which tp {how}", text), text
    assert not warned(mesh, model, shape, specs=TENSOR_PARALLEL, **followed(text))


SOUND: dict[str, Callable[[], list[str]]] = {
    "axes of size 1": lambda: warned(sx.Mesh(dp=1, tp=1, mb=sx.Loop(1)), zero=3),
    "data parallel": lambda: warned(sx.Mesh(dp=4), specs={"args.0": "dp, -, -"}),
    "tensor parallel": lambda: warned(sx.Mesh(dp=2, tp=2), specs={"args.0": "dp, -, -", **TENSOR_PARALLEL}),
    "a sharded feed-forward": lambda: warned(sx.Mesh(tp=2), specs={"up.weight": "tp, -"}),
    "sequence": lambda: warned(sx.Mesh(cp=2), specs={"args.0": "-, cp, -"}),
    "micro-batches": lambda: warned(sx.Mesh(mb=sx.Loop(2), dp=2), specs={"args.0": "mb dp, -, -"}),
    "zero": lambda: warned(sx.Mesh(dp=2), specs={"args.0": "dp, -, -"}, zero=3, zero_min_numel=1),
    "an odd length": lambda: warned(sx.Mesh(cp=2), shape=(2, 33, 16), specs={"args.0": "-, cp, -"}),
}


@pytest.mark.parametrize("case", SOUND)
def test_sound_plans_warn_of_nothing(case: str) -> None:
    assert not SOUND[case]()
