"""Op instances to check rules with, hand-picked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.ops.context.attention_steps import attention_step, attention_step_backward, rotate
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.oracle.instance import Instance, instance
from tests.op_calls import b, f, i, others

aten = torch.ops.aten


def conv(
    x: Tensor,
    w: Tensor,
    bias: Tensor | None = None,
    stride: int = 1,
    padding: int = 0,
    dilation: int = 1,
    transposed: bool = False,
    output_padding: int = 0,
    groups: int = 1,
) -> tuple[Any, ...]:
    n = x.dim() - 2
    return x, w, bias, [stride] * n, [padding] * n, [dilation] * n, transposed, [output_padding] * n, groups


CONVOLUTIONS = {
    "plain": conv(f(4, 6, 8, 8), f(4, 6, 3, 3), padding=1),
    "bias": conv(f(4, 6, 8, 8), f(4, 6, 3, 3), f(4), padding=1),
    "stride and dilation": conv(f(2, 3, 9, 9), f(4, 3, 3, 3), stride=2, padding=2, dilation=2),
    "groups": conv(f(2, 8, 6, 6), f(12, 2, 3, 3), f(12), groups=4),
    "depthwise": conv(f(2, 6, 6, 6), f(6, 1, 3, 3), padding=1, groups=6),
    "one by one": conv(f(2, 3, 6, 4), f(5, 3, 1, 1), f(5)),
    "one by one, stride": conv(f(2, 3, 8, 8), f(5, 3, 1, 1), stride=2),
    "patches": conv(f(2, 3, 12, 8), f(5, 3, 4, 4), f(5), stride=4),
    "patches with a rest": conv(f(2, 3, 13, 8), f(5, 3, 4, 4), stride=4),
    "transposed": conv(f(2, 4, 5, 5), f(4, 6, 3, 3), f(6), stride=2, padding=1, transposed=True, output_padding=1),
    "transposed, side by side": conv(f(2, 4, 6, 6), f(4, 6, 2, 2), stride=2, transposed=True),
    "transposed, groups": conv(f(2, 4, 5, 5), f(4, 3, 2, 2), stride=2, transposed=True, groups=2),
    "1d": conv(f(2, 4, 10), f(6, 4, 3), f(6), padding=1),
    "3d": conv(f(2, 2, 4, 4, 4), f(4, 2, 2, 2, 2), stride=2),
}


def convolutions() -> Iterator[Instance]:
    for args in CONVOLUTIONS.values():
        made = instance(aten.convolution.default, args)
        yield made
        (y,) = made.results
        assert y is not None
        x, w, bias, *rest = args
        sizes = [bias.shape[0]] if bias is not None else None
        for mask in ([True, True, bias is not None], [False, True, False]):
            yield instance(aten.convolution_backward.default, (torch.randn_like(y), x, w, sizes, *rest, mask))


def norms() -> Iterator[Instance]:
    x, grad = f(4, 6, 5), f(4, 6, 5)
    for weight in (f(5), None):
        made = instance(aten.native_layer_norm.default, (x, [5], weight, weight, 1e-5))
        yield made
        _, mean, rstd = made.results
        for mask in ([True, weight is not None, weight is not None], [True, False, False]):
            args = (grad, x, [5], mean, rstd, weight, weight, mask)
            yield instance(aten.native_layer_norm_backward.default, args)
    made = instance(aten.native_layer_norm.default, (x, [6, 5], f(6, 5), None, 1e-5))
    yield made
    x, grad, w = f(4, 6, 3, 2), f(4, 6, 3, 2), f(6)
    for weight in (w, None):
        made = instance(aten.native_group_norm.default, (x, weight, weight, 4, 6, 6, 3, 1e-5))
        yield made
        _, mean, rstd = made.results
        mask = [True, weight is not None, weight is not None]
        yield instance(aten.native_group_norm_backward.default, (grad, x, mean, rstd, weight, 4, 6, 6, 3, mask))
    stats = (f(6), f(6).abs() + 1)
    for training in (True, False):
        args = (x, w, f(6), *stats, training, 0.1, 1e-5)
        made = instance(aten._native_batch_norm_legit_functional.default, args)
        yield made
        _, mean, rstd = made.results[:3]
        args = (grad, x, w, *stats, mean, rstd, training, 1e-5, [True, True, True])
        yield instance(aten.native_batch_norm_backward.default, args)
    yield instance(aten._native_batch_norm_legit_no_training.default, (x, w, f(6), *stats, 0.1, 1e-5))


def attentions() -> Iterator[Instance]:
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for heads, causal, mask in (
        (4, True, None),
        (4, False, None),
        (2, True, None),
        (4, False, f(2, 1, 6, 5)),
        (4, False, f(6, 5)),
    ):
        keys = 6 if causal else 5
        q, k, v = f(2, 4, 6, 4), f(2, heads, keys, 4), f(2, heads, keys, 4)
        if heads != 4:  # the kernel wants equal heads, and the rule knows of groups all the same
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        made = instance(forward, (q, k, v, 0.0, causal), {"attn_mask": mask})
        yield made
        out, lse = made.results
        yield instance(backward, (f(2, 4, 6, 4), q, k, v, out, lse, 0.0, causal), {"attn_mask": mask})


def own_attentions() -> Iterator[Instance]:
    """Our op of attention: groups, masks of each kind (with their gradient), dropout, soft caps, sinks."""
    draw = (0.3, torch.tensor(5), 1, [])
    for heads, causal, mask, drop, more in (
        (4, True, None, (), {}),
        (2, True, None, draw, {}),
        (1, False, None, (), {"sinks": f(4)}),
        (2, False, f(2, 1, 6, 5), (), {}),
        (2, False, f(1, 4, 6, 5), draw, {"softcap": 1.5}),
        (4, False, f(6, 5), (), {"softcap": 1.5, "sinks": f(4)}),
        (2, False, b(2, 4, 1, 5), (), {}),
        (2, True, None, (), {"softcap": 1.5, "sinks": f(4)}),
        (2, True, None, (), {"window": [2, 0], "sinks": f(4)}),
        (4, True, f(1, 4, 6, 6), (), {"window": [2, 0]}),
        (2, True, None, (), {"relative_bias": f(4, 11)}),
        (2, True, None, (), {"window": [2, 0], "sinks": f(4), "relative_bias": f(4, 11)}),
        (4, False, None, (), {"q_ids": i(2, 2, 6), "k_ids": i(2, 2, 5), "softcap": 1.5, "flat": True}),
    ):
        keys = 6 if causal else 5
        q, k, v = f(2, 4, 6, 4), f(2, heads, keys, 4), f(2, heads, keys, 3)
        made = instance(attention, (q, k, v, mask, causal, None, *drop), more)
        yield made
        of_mask = "relative_bias" in more or (mask is not None and mask.is_floating_point())
        args = (f(2, 4, 6, 3), q, k, v, *made.results, mask, causal, None, of_mask, *drop)
        back = instance(attention_backward, args, more)
        for number, is_made in ((3, of_mask and mask is not None), (4, "sinks" in more), (5, "relative_bias" in more)):
            if not is_made:
                back.node.results[number] = None
        yield back


def attention_steps() -> Iterator[Instance]:
    """Steps of a ring of four blocks, of one stripe and of two: the first, one of another block, the last."""
    for stripes, window, ids, sinks, bias in (
        (1, [], None, None, None),
        (2, [], None, f(4), None),
        (1, [3, 0], i(2, 2, 1, 4, 2), None, None),
        (2, [], None, None, f(4, 31)),
    ):
        q, k, v = f(2, 4, stripes, 4, 2, 4), f(2, 2, stripes, 4, 2, 4), f(2, 2, stripes, 4, 2, 3)
        how = (None, True, None, 0.0, None, 0, [], window, ids, ids, 0.0, sinks, bias)
        made = instance(attention_step, (q, k, v, *how))
        yield made
        for shift in (1, 3):
            sofar = dict(zip(("out", "logsumexp"), made.results, strict=True))
            made = instance(attention_step, (q, k, v, *how), {**sofar, "shift": shift, "last": shift == 3})
            yield made
        args = (f(2, 4, stripes, 4, 2, 3), q, k, v, *made.results, *how[:3], bias is not None, *how[3:])
        for shift in (0, 2):
            back = instance(attention_step_backward, args, {"shift": shift})
            for number, of in ((3, sinks), (4, bias)):
                if of is None:
                    back.node.results[number] = None
            yield back
    yield instance(rotate, (f(2, 4, 3), 1, 1))
    yield instance(rotate, (f(2, 5), 1, -2))


def losses() -> Iterator[Instance]:
    for shape, op, back in (
        ((5, 6), aten.nll_loss_forward.default, aten.nll_loss_backward.default),
        ((4, 6, 3, 2), aten.nll_loss2d_forward.default, aten.nll_loss2d_backward.default),
    ):
        x = f(*shape)
        target = i(6, shape[0], *shape[2:])
        target.view(-1)[1] = -100
        for weight in (None, f(6).abs()):
            for reduction in (0, 1, 2):
                made = instance(op, (x, target, weight, reduction, -100))
                yield made
                loss, total = made.results
                assert loss is not None
                yield instance(back, (torch.randn_like(loss), x, target, weight, reduction, -100, total))
        yield instance(op, (x, i(5, shape[0], *shape[2:]), None, 2, 3))


def picked() -> list[Instance]:
    """All hand-picked instances."""
    torch.manual_seed(0)
    found = [*convolutions(), *norms(), *attentions(), *own_attentions(), *attention_steps(), *losses()]
    for op, *args in others():
        kwargs = args.pop() if args and isinstance(args[-1], dict) else {}
        found.append(instance(op, args, kwargs))
    return found
