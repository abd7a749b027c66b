"""Calls of ops, hand-picked: those that stand alone. Those that need the results of others are in ``instances``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardfx.ir.ops.computing.batch_statistics import (
    batch_moments,
    batch_norm_gradient,
    batch_norm_sums,
    joined_moments,
)
from shardfx.ir.ops.computing.grouped_product import grouped_mm, grouped_outer

aten = torch.ops.aten


def f(*shape: int) -> Tensor:
    """Random numbers."""
    return torch.randn(*shape, dtype=torch.float64)


def i(most: int, *shape: int) -> Tensor:
    """Random indices below ``most``."""
    return torch.randint(0, most, shape)


def b(*shape: int) -> Tensor:
    """A random mask."""
    return torch.rand(*shape) < 0.5


def others() -> list[tuple[Any, ...]]:
    """(op, its arguments, a dict of keyword arguments if the last is one)."""
    x3, index = f(4, 6, 5), i(4, 3, 6, 5)
    zeros = torch.zeros(4, 6, dtype=torch.float64)
    return [
        # products
        (aten.mm.default, f(4, 6), f(6, 5)),
        (aten.bmm.default, f(4, 3, 6), f(4, 6, 5)),
        (aten.mv.default, f(4, 6), f(6)),
        (aten.dot.default, f(6), f(6)),
        (grouped_mm, f(12, 6), f(4, 6, 5), torch.tensor([3, 3, 8, 10])),
        (grouped_outer, f(12, 6), f(12, 5), torch.tensor([3, 3, 8, 10])),
        (aten.adaptive_max_pool2d.default, f(2, 3, 5, 4), [1, 1]),
        (batch_moments, f(4, 3, 6, 4)),
        (joined_moments, f(2, 3), 12, torch.float64),
        (batch_norm_sums, f(4, 3, 5), f(4, 3, 5), f(3), f(3)),
        (batch_norm_gradient, f(4, 3, 5), f(4, 3, 5), f(3), f(3), f(3), f(3), f(3), 20),
        (batch_norm_gradient, f(4, 3), f(4, 3), f(3), f(3), f(3), f(3), None, 4),
        (aten._weight_norm_interface.default, f(4, 3, 6), f(1, 1, 6), 2),
        (aten.addmm.default, f(5), f(4, 6), f(6, 5), {"beta": 2, "alpha": 3}),
        (aten.addmm.default, f(4, 1), f(4, 6), f(6, 5)),
        (aten.baddbmm.default, f(1, 5), f(4, 3, 6), f(4, 6, 5)),
        (aten.linalg_solve_triangular.default, f(3, 1, 4, 4), f(2, 4, 6), {"upper": True}),
        # elementwise
        (aten.add.Tensor, f(4, 6), f(6)),
        (aten.add.Tensor, f(4, 1), f(1, 6), {"alpha": 2}),
        (aten.sub.Tensor, f(4, 6), f(4, 6)),
        (aten.mul.Tensor, f(4, 6), f(4, 1)),
        (aten.div.Tensor, f(4, 6), f(4, 1)),
        (aten.div.Tensor_mode, f(4, 6), f(4, 1), {"rounding_mode": "floor"}),
        (aten.where.self, b(4, 6), f(4, 6), f(6)),
        (aten.where.self, b(4, 1), f(4, 6), f(())),
        (aten.masked_fill.Scalar, f(4, 6), b(4, 6), 0),
        (aten.clamp.Tensor, f(4, 6), f(6), None),
        (aten._to_copy.default, f(4, 6), {"dtype": torch.float32}),
        (aten.gelu_backward.default, f(4, 6), f(4, 6)),
        (aten.threshold_backward.default, f(4, 6), f(4, 6), 0),
        (aten.addcmul.default, f(4, 6), f(4, 6), f(6)),
        (aten.lerp.Scalar, f(4, 6), f(6), 0.3),
        # reductions
        (aten.sum.dim_IntList, x3, [-1, 0], True),
        (aten.sum.dim_IntList, b(4, 6), [0]),
        (aten.sum.dim_IntList, x3, None),
        (aten.mean.dim, x3, []),
        (aten.amax.default, x3, [-2]),
        (aten.max.dim, x3, 1),
        (aten.any.dim, b(4, 6), 1),
        (aten.all.default, b(4, 6)),
        (aten.argmax.default, f(4, 6), 1, True),
        (aten.argmax.default, f(4, 6)),
        (aten.var.correction, x3, [1], {"correction": 1}),
        (aten.var_mean.correction, x3, [0, 2], {"correction": 0, "keepdim": True}),
        (aten.prod.dim_int, x3, 1),
        (aten.cumsum.default, x3, -1),
        (aten.sort.default, x3, 1, True),
        (aten.topk.default, f(4, 6), 3),
        (aten._softmax.default, x3, 1, False),
        (aten._log_softmax.default, x3, -1, False),
        (aten._log_softmax_backward_data.default, f(4, 6), f(4, 6), 1, torch.float64),
        # views and moves
        (aten.view.default, f(4, 6), [2, 12]),
        (aten.view.default, f(4, 6), [-1]),
        (aten.view.default, f(4, 6, 5), [24, 5]),
        (aten.view.default, f(24, 5), [4, 1, 6, 5]),
        (aten.view.default, f(4, 6), [3, 8]),
        (aten.as_strided.default, f(4, 6), [6, 4], [4, 1]),
        (aten.unfold.default, f(4, 6), 1, 2, 2),
        (aten.unfold.default, f(4, 6), 1, 3, 2),
        (aten.unfold_backward.default, f(4, 3, 2), [4, 6], 1, 2, 2),
        (aten.as_strided.default, f(4, 6), [3, 2], [1, 3]),
        (aten.isin.Tensor_Tensor, i(9, 4, 6), i(9, 5), {"invert": True}),
        (aten.unsqueeze.default, f(4, 6), -1),
        (aten.squeeze.dim, f(2, 3), 0),
        (aten.squeeze.dims, f(2, 1, 3, 1), [1, 3]),
        (aten.expand.default, f(4, 1), [3, 4, 6]),
        (aten.permute.default, x3, [2, 0, -2]),
        (aten.transpose.int, x3, 0, -1),
        (aten.t.default, f(4, 6)),
        (aten.slice.Tensor, f(4, 12), 1, 4, 8),
        (aten.slice.Tensor, f(4, 12), 1, -4, 9223372036854775807),
        (aten.slice.Tensor, f(4, 12), 1, 1, 12, 3),
        (aten.slice.Tensor, f(4, 12), 0, 0, 9223372036854775807),
        (aten.slice_backward.default, f(4, 4), [4, 12], 1, 4, 8, 1),
        (aten.slice_backward.default, f(4, 3), [4, 12], 1, 1, 4, 1),
        (aten.select.int, x3, -2, -1),
        (aten.select_backward.default, f(4, 5), [4, 6, 5], 1, 2),
        (aten.split.Tensor, f(4, 10), 4, 1),
        (aten.split_with_sizes.default, f(12, 4), [2, 10]),
        (aten.unbind.int, x3, 1),
        (aten.cat.default, [f(4, 6), f(4, 2)], -1),
        (aten.cat.default, [f(0), f(4, 6)]),
        (aten.stack.default, [f(4, 6), f(4, 6)], -1),
        (aten.flip.default, f(4, 6), [1]),
        (aten.roll.default, f(4, 6), [1], [0]),
        (aten.tril.default, x3, -1),
        (aten.constant_pad_nd.default, f(4, 6), [0, 0, 1, 2]),
        (aten.constant_pad_nd.default, f(4, 6), [1, -1]),
        (aten.constant_pad_nd.default, f(4, 6), [1, 2], 1.5),
        (aten.repeat.default, f(4, 6), [3, 1, 2]),
        (aten.diagonal.default, f(4, 6, 6), 1, 1, 2),
        (aten.unfold.default, f(4, 12), 1, 3, 2),
        (aten.pixel_shuffle.default, f(2, 8, 4, 3), 2),
        (aten.glu.default, f(4, 8), 1),
        (aten.glu_backward.default, f(4, 4), f(4, 8), 1),
        (aten.rot90.default, f(4, 6, 5), 1, [0, 1]),
        (aten.rot90.default, f(4, 6, 5), 2, [1, 2]),
        (aten.aminmax.default, f(4, 6, 5), {"dim": 1, "keepdim": True}),
        *((aten.rrelu_with_noise_backward.default, f(4, 6), f(4, 6), f(4, 6), 0.1, 0.1, on, False) for on in (0, 1)),
        # pictures
        (aten.max_pool2d_with_indices.default, f(2, 3, 8, 8), [2, 2], [2, 2]),
        (aten.avg_pool2d.default, f(2, 3, 8, 6), [3, 3], [1, 1], [1, 1]),
        (aten.avg_pool2d_backward.default, f(2, 3, 4, 3), f(2, 3, 8, 6), [2, 2], [], [0, 0], False, True, None),
        (aten._adaptive_avg_pool2d.default, f(2, 3, 8, 6), [4, 4]),
        (aten._adaptive_avg_pool2d_backward.default, f(2, 3, 4, 4), f(2, 3, 8, 6)),
        (aten.upsample_nearest2d.default, f(2, 3, 4, 4), [8, 6]),
        (aten.upsample_nearest2d.default, f(2, 3, 4, 4), [8, 8], 2.0, 2.0),
        (aten.upsample_nearest2d_backward.default, f(2, 3, 8, 6), [8, 6], [2, 3, 4, 4]),
        (aten.upsample_bilinear2d.default, f(2, 3, 4, 4), [8, 6], False),
        (aten.grid_sampler_2d.default, f(2, 3, 5, 5), f(2, 4, 4, 2), 0, 0, False),
        (aten.im2col.default, f(2, 3, 6, 6), [2, 2], [1, 1], [0, 0], [2, 2]),
        (aten.reflection_pad2d.default, f(2, 3, 5, 5), [1, 2, 0, 0]),
        # lookups
        (aten.embedding.default, f(10, 4), i(10, 3, 5)),
        (aten.embedding.default, f(10, 4), i(10, 3, 5), 3),
        (aten.embedding_dense_backward.default, f(3, 5, 4), i(10, 3, 5), 10, 7, False),
        (aten.embedding_dense_backward.default, f(3, 5, 4), i(12, 3, 5), 12, 7, True),
        (aten.gather.default, x3, 0, index),
        (aten.gather.default, x3, -3, i(4, 4, 6, 5)),
        (aten.gather.default, x3, 1, i(6, 2, 3, 5)),
        (aten.index.Tensor, x3, [i(4, 3)]),
        (aten.index.Tensor, x3, [None, i(6, 3, 1), i(5, 2)]),
        (aten.index.Tensor, x3, [i(4, 3), None, i(5, 3)]),
        (aten.index_select.default, x3, 1, i(6, 4)),
        (aten.scatter.src, x3, 1, torch.rand(4, 6, 5).argsort(1)[:, :3], f(4, 3, 5)),
        (aten.scatter.value, x3, 2, i(5, 4, 6, 1), 0),
        (aten.scatter_add.default, x3, 1, i(6, 4, 7, 5), f(4, 7, 5)),
        (aten.scatter_add.default, x3, 1, i(6, 3, 7, 5), f(4, 8, 5)),
        (aten.scatter_add.default, x3, 1, i(6, 3, 7, 5), f(3, 7, 5)),
        (aten.index_put.default, x3, [i(4, 7)], f(7, 6, 5), True),
        (aten.index_put.default, x3, [None, i(6, 3, 1), i(5, 2)], f(4, 3, 2), True),
        (aten.index_put.default, x3, [torch.tensor([2, 0])], f(2, 6, 5), False),
        (aten.index_put.default, x3, [b(4, 6)], f(())),
        (aten.index_put.default, x3, [None, b(6, 5)], f(1)),
        (aten.index_put.default, x3, [None, b(6)], f(4, 1, 5)),
        (aten.index_put.default, x3, [torch.tensor([True, False, True, True])], f(3, 6, 5), True),
        (aten.index_add.default, zeros, 1, i(6, 8), f(4, 8), {"alpha": 2}),
        (aten.index_copy.default, zeros, 1, torch.tensor([2, 0]), f(4, 2)),
        # values made
        (aten.arange.start, 3, 11),
        (aten.arange.start_step, 10, -3, -2),
        (aten.arange.start_step, 0.1, 1.3, 0.1, {"dtype": torch.float64}),
        (aten.full.default, [4, 6], 2.0),
        (aten.new_zeros.default, f(4, 6), [4, 3]),
        (aten.ones_like.default, f(4, 6)),
        (aten.eye.default, 4),
    ]
