"""Products with the matrices of experts: each token has some, by their numbers.

    y[n k m] = shardfx.routed_mm(x[n k a], w[g a m], ids[n k])       y[i, j] = x[i, j] @ w[ids[i, j]]
    w[g a m] = shardfx.routed_outer(x[n k a], y[n k m], ids, g)      for each expert the sum of x' y over its tokens

``x`` may be ``[n 1 a]``, the same row for all experts of a token. An id that is no expert's gives zeros. The ops say
what is computed; where tokens and experts are sharded, and in which order rows are computed, is decided by a pass.
Needs torch alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..computing.grouped_product import grouped_mm, grouped_outer
from ..computing.library import LIBRARY, define


def check(x: Tensor, w: Tensor, ids: Tensor) -> None:
    """Check the operands of a product.

    Raises:
        ValueError: they are not ``x [n, k or 1, a]``, matrices ``[g, a, m]``, and ``ids [n, k]`` of integers.
    """
    shapes = x.dim() == w.dim() == 3 and ids.dim() == 2 and x.shape[0] == ids.shape[0]
    integers = not ids.dtype.is_floating_point and ids.dtype is not torch.bool
    if not shapes or not integers or x.shape[1] not in (1, ids.shape[1]) or x.shape[2] != w.shape[1]:
        of = f"x {tuple(x.shape)}, w {tuple(w.shape)}, ids {tuple(ids.shape)} of {ids.dtype}"
        raise ValueError(f"routed_mm takes x [n, k or 1, a], w [g, a, m] and integers ids [n, k], not {of}")


def by_expert(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The order of pairs of a token and an expert by their expert, those of no expert last; and where each expert's
    end."""
    flat = ids.flatten()
    flat = torch.where((flat < 0) | (flat >= experts), experts, flat)
    known, order = torch.sort(flat, stable=True)
    return order, torch.searchsorted(known, torch.arange(experts, device=ids.device), right=True)


def _rows(x: Tensor, order: Tensor, each: int) -> Tensor:
    """The rows ``[n k a]`` of pairs in their order, of ``each`` pairs a token."""
    return x.flatten(0, 1)[order if x.shape[1] == each else order // each]


def _like_product(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    check(x, w, ids)
    return x.new_empty((*ids.shape, w.shape[2]))


@define(
    "routed_mm(Tensor x, Tensor w, Tensor ids) -> Tensor",
    shapes=_like_product,
)
def routed_mm(x: Tensor, w: Tensor, ids: Tensor) -> Tensor:
    """The product of each row with the matrix of its expert; zeros, and no error, for an id of none: below 0, or not
    below the number of experts."""
    check(x, w, ids)
    order, ends = by_expert(ids, w.shape[0])
    made = grouped_mm(_rows(x, order, ids.shape[1]), w, ends)
    out: Tensor = torch.empty_like(made).index_copy_(0, order, made).unflatten(0, ids.shape)
    return out


@define(
    "routed_outer(Tensor x, Tensor y, Tensor ids, int experts) -> Tensor",
    shapes=lambda x, y, ids, experts: x.new_empty((experts, x.shape[2], y.shape[2])),
)
def routed_outer(x: Tensor, y: Tensor, ids: Tensor, experts: int) -> Tensor:
    """The sum of the products of two rows each, over the rows of each expert."""
    order, ends = by_expert(ids, experts)
    made: Tensor = grouped_outer(_rows(x, order, ids.shape[1]), _rows(y, order, ids.shape[1]), ends)
    return made


def _setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _gradient(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, w, ids = ctx.saved_tensors
    of_x, of_w = None, None
    if ctx.needs_input_grad[0]:
        of_x = routed_mm(grad, w.transpose(1, 2), ids)
        of_x = of_x if x.shape[1] == ids.shape[1] else of_x.sum(1, True)
    if ctx.needs_input_grad[1]:
        of_w = routed_outer(x, grad, ids, w.shape[0])
    return of_x, of_w, None


torch.library.register_autograd("shardfx::routed_mm", _gradient, setup_context=_setup, lib=LIBRARY)
