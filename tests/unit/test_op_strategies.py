"""``sx.strategies``: what a rule offers is right, rank by rank, and nothing that is right is missing of what it should
offer."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch

import shardfx as sx
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.recombine import reduce
from shardfx.ir.oracle.soundness import shard_operands
from shardfx.ir.shards import local_shard

aten = torch.ops.aten
MESHES = (sx.Mesh(a=2), sx.Mesh(a=2, b=2))


def t(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def index(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, high, shape)


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.5


def bias_gradient() -> tuple[Any, ...]:
    options = ([6], [1], [0], [1], False, [0], 1, [False, False, True])
    return aten.convolution_backward.default, (t(2, 6, 6), t(2, 4, 8), t(6, 4, 3), *options)


def layer_norm_backward() -> tuple[Any, ...]:
    options = ([6], t(4, 1), positive(4, 1), t(6), t(6), [False, True, True])
    return aten.native_layer_norm_backward.default, (t(4, 6), t(4, 6), *options)


def pool_backward() -> tuple[Any, ...]:
    x = t(2, 8, 8)
    y, places = aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return aten.max_pool2d_with_indices_backward.default, (
        torch.randn_like(y), x, [3, 3], [2, 2], [1, 1], [1, 1], False, places,
    )  # fmt: skip


CASES: dict[str, Callable[[], tuple[Any, ...]]] = {
    "mm": lambda: (aten.mm.default, (t(4, 6), t(6, 5))),
    "addmm": lambda: (aten.addmm.default, (t(5), t(4, 6), t(6, 5)), {"beta": 0.5, "alpha": 2}),
    "convolution with bias": lambda: (
        aten.convolution.default,
        (t(2, 4, 8), t(6, 4, 3), t(6), [1], [1], [1], False, [0], 1),
    ),
    "batch norm, training": lambda: (
        aten.native_batch_norm.default,
        (t(4, 4), t(4), t(4), None, None, True, 0.1, 1e-5),
    ),
    "layer norm backward, no input": layer_norm_backward,
    "convolution backward, bias": bias_gradient,
    "slice_scatter": lambda: (aten.slice_scatter.default, (t(4, 6), t(4, 3), 1, 0, 6, 2)),
    "scatter_reduce, amax": lambda: (aten.scatter_reduce.two, (t(5, 4), 0, index(5, 5, 4), t(5, 4), "amax")),
    "mse_loss backward, mean": lambda: (aten.mse_loss_backward.default, (t(), t(5, 6), t(5, 6), 1)),
    "l1_loss, mean, discovered": lambda: (aten.l1_loss.default, (t(7, 6), t(7, 6), 1)),
    "index_add": lambda: (aten.index_add.default, (t(5, 4), 0, index(5, 8), t(8, 4))),
    "index_put": lambda: (aten.index_put.default, (t(5, 6), [index(5, 4), index(6, 4)], t(4), True)),
    "mean": lambda: (aten.mean.dim, (t(4, 5, 6), [0, 1])),
    "max-pool backward": pool_backward,
    "view": lambda: (aten.view.default, (t(4, 6, 5), [24, 5])),
}


def strategies(name: str, mesh: sx.Mesh, **options: Any) -> list[Any]:
    op, args, *kwargs = CASES[name]()
    return sx.strategies(op, args, *kwargs, mesh=mesh, **options)


def texts(found: list[Any]) -> list[str]:
    return [str(each) for each in found]


def same_but_for(axes: Collection[str], mesh: sx.Mesh, rank: int, other: int) -> bool:
    """Whether two ranks lie at the same place, axes apart along which they have terms of a sum."""
    return all(mesh.coords(rank)[axis] == mesh.coords(other)[axis] for axis in mesh.names if axis not in axes)


@pytest.mark.long
@pytest.mark.parametrize("mesh", MESHES, ids=repr)
@pytest.mark.parametrize("name", CASES)
def test_every_listed_strategy_recomputes_the_result(name: str, mesh: sx.Mesh) -> None:
    torch.manual_seed(0)
    op, args, *kwargs = CASES[name]()
    of = instance(op, args, *kwargs)
    draw = torch.Generator().manual_seed(0)
    found = sx.strategies(op, args, *kwargs, mesh=mesh)
    assert any(not spec.is_replicated for each in found for spec in each.operands)
    for each in found[:: 1 + len(found) // 300]:
        held = shard_operands(each, of, mesh, draw)
        ranks = {rank: each.call(*shards, rank=rank) for rank, shards in held.items()}
        parts = {rank: made if isinstance(made, tuple) else (made,) for rank, made in ranks.items()}
        for i, (whole, spec) in enumerate(zip(of.kept, each.results, strict=True)):
            partial = dict(spec.partial)
            for rank in parts:
                terms = [parts[other][i] for other in parts if same_but_for(partial, mesh, rank, other)]
                made = reduce(terms, next(iter(partial.values()), "sum"))
                shard = local_shard(whole, sx.Spec(spec.dims), mesh, rank)
                torch.testing.assert_close(made, shard, rtol=1e-10, atol=1e-10, msg=f"{each}, result {i}")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("addmm", "[5] +{a}, [4, 6{a}], [6{a}, 5] -> [4, 5] +{a}"),
        ("convolution with bias", "[2, 4{a}, 8], [6, 4{a}, 3], [6] +{a} -> [2, 6, 8] +{a}"),
        ("index_add", "[5, 4] +{a}, [8{a}], [8{a}, 4] -> [5, 4] +{a}"),
        ("index_put", "[5, 6] +{a}, [4{a}], [4{a}], [4{a}] -> [5, 6] +{a}"),
        ("mean", "[4, 5{a}, 6] -> [6] +{a}"),
        ("batch norm, training", "[4, 4], [4] +{a}, [4] +{a} -> [4, 4] +{a}, [4], [4]"),
        ("layer norm backward, no input", "[4, 6{a}], [4, 6{a}], [4, 1], [4, 1], [6{a}], [6{a}] -> [6{a}], [6{a}]"),
        ("convolution backward, bias", "[2, 6, 6{a}], [2, 4, 8], [6, 4, 3] -> [6] +{a}"),
        ("convolution backward, bias", "[2, 6, 6{a}], [2, 4, 8] +{a}, [6, 4, 3] -> [6] +{a}"),
        ("slice_scatter", "[4, (3{a} 2)], [4, 3{a}] -> [4, (3{a} 2)]"),
        ("scatter_reduce, amax", "[5, 4], [5{a}, 4], [5{a}, 4] -> [5, 4] max{a}"),
        ("mse_loss backward, mean", "[], [5{a}, 6], [5{a}, 6] -> [5{a}, 6]"),
        ("max-pool backward", "[2, 4{a}, 4], [2, 8, 8], [2, 4{a}, 4] -> [2, 8, 8] +{a}"),
        ("view", "[4, 6{a}, 5] -> [(4 6{a}), 5]"),
    ],
)
def test_an_axis_that_shards_operands_or_finds_others_partial_is_offered(name: str, expected: str) -> None:
    assert expected in texts(strategies(name, sx.Mesh(a=2), discover=False))


def test_a_mean_over_a_sharded_dim_is_discovered_as_a_sum_of_shares() -> None:
    assert "[7{a}, 6], [7{a}, 6] -> [] +{a}" in texts(strategies("l1_loss, mean, discovered", sx.Mesh(a=2)))
    with pytest.raises(sx.Error, match=r"(?s)has no rule for this call.*discover=True"):
        strategies("l1_loss, mean, discovered", sx.Mesh(a=2), discover=False)


def test_a_bias_is_no_partial_sum_over_one_axis_where_the_sum_is_sharded_over_two() -> None:
    mesh = sx.Mesh(a=2, b=2)
    for name in ("addmm", "index_add"):
        op, args, *kwargs = CASES[name]()
        for each in sx.strategies(op, args, *kwargs, mesh=mesh):
            added, summed = set(each.operands[0].partial_axes), set(each.operands[2].dims[0].axes)
            assert not added or not summed or added & summed in (set(), summed), str(each)


def test_tensors_on_meta_and_an_axis_of_one_rank() -> None:
    op, args, kwargs = CASES["addmm"]()
    on_meta = tuple(each.to("meta") for each in args)
    found = texts(sx.strategies(op, on_meta, kwargs))
    assert found == texts(sx.strategies(op, args, kwargs)) and len(found) == 6
    assert len(sx.strategies(op, on_meta, kwargs, mesh=sx.Mesh(a=1))) == 1


def test_an_op_without_a_rule_a_packet_and_other_shards_are_errors() -> None:
    with pytest.raises(sx.Error, match=r"(?s)has no rule for this call.*strategies\(aten\.nonzero\)"):
        sx.strategies(aten.nonzero.default, (t(4),))
    with pytest.raises(sx.Error, match=r"(?s)no op.*name the overload"):
        sx.strategies(aten.mm, (t(4, 6), t(6, 5)))
    with pytest.raises(sx.Error, match=r"(?s)does not take these arguments"):
        sx.strategies(aten.mm.default, (t(4, 6), t(5, 5)))
    sharded = strategies("mm", sx.Mesh(a=2))[-1]
    with pytest.raises(sx.Error, match=r"(?s)other shards.*\[4, 6\], \[6, 3\].*\[4, 6\], \[6, 5\]"):
        sharded.call(t(4, 6), t(6, 5))
    with pytest.raises(sx.Error, match="no such rank"):
        sharded.call(t(4, 6), t(6, 3), rank=2)
