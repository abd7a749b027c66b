"""Ops of the exported program that stay one op of the graph, whatever torch would make of them on some device; or that
torch's kernels take apart, and not its Python.

aten.scaled_dot_product_attention(q, k, v, attn_mask, 0.0, True)   ->   shardfx.attention(q, k, v, mask, True)
aten.upsample_bilinear2d.vec(x, None, False, [2.0, 2.0])   ->   aten.upsample_bilinear2d(x, [16, 16], False, 2.0, 2.0)
aten.pad(x, [1, 2], "circular")   ->   shardfx.ring(x, x, x, -1, 1, 2)
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import no_python_dispatcher

from shardfx.ir.ops.computing.rings import Ring
from shardfx.ir.ops.fused_attention import attention
from shardfx.ir.ops.traits import with_defaults

aten = torch.ops.aten


def whole_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """``F.scaled_dot_product_attention`` as the op of the graph, which wants ``[batch, heads, rows, columns]``.

    Dims before these become one batch; where there are fewer, there is one head. What broadcasts is expanded, but for
    a single key head, which is a group by itself.
    """
    dims = query.dim()
    q, k, v = (_with_heads(t, dims) for t in (query, key, value))
    lead = torch.broadcast_shapes(*(t.shape[:-3] for t in (q, k, v)))
    q, k, v = (_broadcast(t, lead).reshape(prod(lead), *t.shape[-3:]) for t in (q, k, v))
    if not enable_gqa and not (k.shape[1] == v.shape[1] and k.shape[1] in (1, q.shape[1])):
        heads = max(t.shape[1] for t in (q, k, v))
        q, k, v = (t.expand(-1, heads, -1, -1) for t in (q, k, v))
    mask = None if attn_mask is None else _mask(attn_mask, dims, lead)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    out: Tensor = attention(q, k, v, mask, is_causal, scale, float(dropout_p))[0]
    if dims > 4:
        return out.reshape(*lead, *out.shape[1:])
    for _ in range(4 - dims):
        out = out.squeeze(-3)
    return out


def _with_heads(tensor: Tensor, dims: int) -> Tensor:
    """A tensor of at least four dims: batch, heads, rows, columns."""
    for _ in range(4 - dims):
        tensor = tensor.unsqueeze(-3)
    return tensor


def _broadcast(tensor: Tensor, lead: Sequence[int]) -> Tensor:
    """A tensor with these dims before its last three."""
    return tensor if tensor.shape[:-3] == tuple(lead) else tensor.expand(*lead, *tensor.shape[-3:])


def _mask(mask: Tensor, dims: int, lead: Sequence[int]) -> Tensor:
    """A mask as one of two or four dims."""
    if mask.dim() <= 2:
        return mask if mask.dim() == 2 else mask.unsqueeze(0)
    if dims > 4 and mask.dim() >= 4:
        return _broadcast(mask, lead).reshape(prod(lead), *mask.shape[-3:])
    return mask.unsqueeze(-3 if dims == 3 else 0) if mask.dim() == 3 else mask


RESIZED = """upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa"""
"""Torch's kernels of ``F.interpolate``, each with a backward; traced, they would become lookups and products."""


class Resized(torch.autograd.Function):
    """A kernel of ``F.interpolate`` and its backward, each as one op."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, sizes: list[int], how: tuple[Any, ...]) -> Tensor:
        """The picture in other sizes."""
        ctx.of = name, sizes, list(x.shape), how
        with torch._C._AutoDispatchBelowAutograd():
            made: Tensor = getattr(aten, name).default(x, sizes, *how)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        """The gradient of the picture."""
        name, sizes, shape, how = ctx.of
        with torch._C._AutoDispatchBelowAutograd():
            return getattr(aten, f"{name}_backward").default(grad, sizes, shape, *how), None, None, None


def whole_resize(name: str) -> Callable[..., Any]:
    """``F.interpolate`` by one of its kernels, as the op of the graph, which wants sizes."""

    def resize(x: Tensor, sizes: Sequence[int] | None, *how: Any) -> Tensor:
        *aligned, factors = how
        if sizes is None:
            sizes = [int(size * factor) for size, factor in zip(x.shape[2:], factors, strict=True)]
        scales = factors if factors is not None else [None] * len(sizes)
        how = (*aligned, *scales)
        made: Tensor = Resized.apply(x, name, list(sizes), how)  # type: ignore[no-untyped-call]
        return made

    return resize


def whole_pad(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad``: where edges meet it is one op for each dim, of what a negative padding has left."""
    if mode != "circular":
        padded: Tensor = aten.pad.default(x, pad, mode, value)
        return padded
    x = aten.constant_pad_nd.default(x, [min(n, 0) for n in pad]) if min(pad) < 0 else x
    for i, (front, back) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        if front > 0 or back > 0:
            x = Ring.apply(x, -1 - i, max(front, 0), max(back, 0))  # type: ignore[no-untyped-call]
    return x


class AsTorch:
    """An op that is taken apart by torch's own kernel, as it is where nothing is traced, and not by its Python."""

    def __init__(self, op: Any) -> None:
        self._op, self.__name__ = op, f"{op.__name__}_as_torch"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the op gives."""
        with no_python_dispatcher():
            return self._op(*args, **kwargs)


KEPT: dict[Any, Callable[..., Any]] = {
    aten.scaled_dot_product_attention.default: whole_attention,
    aten.pad.default: whole_pad,
    **{getattr(aten, name).vec: whole_resize(name) for name in RESIZED.split()},
}
"""What each op of the exported program becomes."""


def drops_within(node: torch.fx.Node) -> bool:
    """Whether a call drops numbers between its layers, as recurrent ones do: torch's Python forgets to (2.13)."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = with_defaults(node.target, node.args, node.kwargs)
    return bool(given.get("dropout") and given.get("train"))


def keep_whole(exported: torch.fx.GraphModule, as_torch: Collection[Any] = ()) -> None:
    """Call the ops of the graph in place of torch's composite ones; ``as_torch`` are those that its kernels take
    apart.

    Their results may have other strides than torch's, behind which ``contiguous()`` was no op: what was a view of such
    is a reshape.
    """
    kept = False
    for node in exported.graph.nodes:
        first = node.all_input_nodes[:1]
        if node.target in as_torch or drops_within(node):
            node.target = AsTorch(node.target)
        elif node.target in KEPT and all(x.meta["val"].is_floating_point() for x in first if "val" in x.meta):
            node.target, kept = KEPT[node.target], True
        elif kept and node.target is aten.view.default:
            node.target = aten.reshape.default
    exported.recompile()
