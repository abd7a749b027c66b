"""The kernels behind attention, each by name: the memory layout of their results, and their numbers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from shardfx.ir.ops.context import attention_kernels
from shardfx.ir.ops.context.plain_attention import backward_by_hand, forward_by_hand
from shardfx.ir.ops.fused_attention import attention, attention_backward
from tests.on_gpu import without_synchronisation

aten = torch.ops.aten


def contiguous(b: int, h: int, s: int, e: int, **options: Any) -> Tensor:
    return torch.randn(b, h, s, e, **options)


def rows_first(b: int, h: int, s: int, e: int, **options: Any) -> Tensor:
    """As a projection and ``view(b, s, h, e).transpose(1, 2)`` give it."""
    return torch.randn(b, s, h, e, **options).transpose(1, 2)


def part_of_qkv(b: int, h: int, s: int, e: int, **options: Any) -> Tensor:
    return torch.randn(b, s, 3 * h * e, **options).split(h * e, -1)[1].unflatten(-1, (h, e)).transpose(1, 2)


def expanded(b: int, h: int, s: int, e: int, **options: Any) -> Tensor:
    return torch.randn(b, 1, s, e, **options).expand(-1, h, -1, -1)


def columns_first(b: int, h: int, s: int, e: int, **options: Any) -> Tensor:
    return torch.randn(b, h, e, s, **options).mT


Layout = Callable[..., Tensor]
LAYOUTS: list[Layout] = [contiguous, rows_first, part_of_qkv, expanded, columns_first]
KERNELS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "": SDPBackend.MATH,
}
"""The kernels on CUDA, and torch's name for each; without a name it is done by hand."""


def strides(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """The strides that matter: those of dims with several elements."""
    return [tuple(a for a, n in zip(t.stride(), t.shape, strict=True) if n > 1 and t.numel()) for t in tensors]


# ---- memory layout -------------------------------------------------------------------------------------------------


FORMS: dict[str, tuple[int, int, int, int, str, float]] = {
    "plain": (2, 4, 5, 8, "", 0.0),
    "groups": (2, 2, 5, 8, "", 0.0),
    "bool mask": (2, 4, 5, 8, "bool", 0.0),
    "gradient of a mask": (2, 2, 5, 8, "float", 0.0),
    "another size of values": (2, 4, 5, 3, "", 0.0),
    "dropout": (2, 2, 5, 8, "", 0.5),
    "one query": (1, 4, 1, 8, "", 0.0),
    "no query": (2, 4, 0, 8, "", 0.0),
}
"""Batch, heads of keys (of 4), queries, columns of values, kind of mask, dropout."""


def without_content(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_meta_functions_say_the_strides_that_the_cpu_gives(layout: Layout, dtype: torch.dtype) -> None:
    for form, (b, heads, s, columns, kind, p) in FORMS.items():
        sizes = (4, s, 8), (heads, 6, 8), (heads, 6, columns)
        q, k, v = (layout(b, *size, dtype=dtype) for size in sizes)
        mask = {"": None, "bool": torch.rand(b, 1, s, 6) > 0.3, "float": torch.randn(s, 6, dtype=dtype)}[kind]
        how, draw = (mask is None, None), (p, torch.tensor(1), 0, [])
        made = attention(q, k, v, mask, *how, *draw)
        grads = attention_backward(made[0], q, k, v, *made, mask, *how, kind == "float", *draw)
        q, k, v, *given = (without_content(t) for t in (q, k, v, *made))
        mask = mask if mask is None else without_content(mask)
        draw = (p, torch.tensor(1, device="meta"), 0, [])
        said = attention(q, k, v, mask, *how, *draw)
        said_grads = attention_backward(given[0], q, k, v, *given, mask, *how, kind == "float", *draw)
        assert strides((*made, *grads)) == strides((*said, *said_grads)), form
        assert [t.dtype for t in (*made, *grads)] == [t.dtype for t in (*said, *said_grads)], form


class Copies(TorchDispatchMode):
    """Counts the copies of tensors of four dims."""

    count = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += op in (aten.copy_.default, aten.clone.default) and args[0].dim() == 4
        return op(*args, **(kwargs or {}))


ON: dict[str, Any] = {
    "meta": pytest.param("meta", nullcontext),
    "cuda": pytest.param(
        "cuda",
        FakeTensorMode,
        marks=pytest.mark.skipif(torch.version.cuda is None, reason="fake CUDA tensors need a CUDA build of torch"),
    ),
}


@pytest.mark.parametrize(("device", "mode"), ON.values(), ids=ON)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_meta_functions_say_the_strides_that_kernels_give(
    kernel: str, layout: Layout, device: str, mode: Callable[[], AbstractContextManager[Any]]
) -> None:
    """By torch's own meta functions of its kernels. No copy follows flash and cuDNN, nor the memory-efficient kernel
    where rows lie first."""
    dtype = torch.float32 if kernel == "efficient" else torch.bfloat16
    with mode():
        for heads, causal, masked in ((4, True, False), (2, True, False), (4, False, kernel in ("efficient", ""))):
            options = {"dtype": dtype, "device": device}
            q, k, v = layout(2, 4, 128, 16, **options), *(layout(2, heads, 128, 16, **options) for _ in "kv")
            mask = torch.randn(2, 1, 128, 128, **options) if masked else None
            q, k, v = attention_kernels.dense_rows(q, k, v)
            given = q.transpose(1, 2).contiguous().transpose(1, 2)  # as a projection gives it
            with Copies() as copies:
                out = attention_kernels.forward_by(kernel, q, k, v, mask, causal, None, None, 0.0)
                grads = attention_kernels.backward_by(kernel, given, (q, k, v), *out, mask, causal, None, False)
            said = attention(q, k, v, mask, causal)
            said_grads = attention_backward(given, q, k, v, *said, mask, causal)[:4]
            assert strides((*out, *grads)) == strides((*said, *said_grads))
            if kernel in ("cudnn", "flash") or (kernel == "efficient" and layout is rows_first and heads == 4):
                assert not copies.count


# ---- numbers -------------------------------------------------------------------------------------------------------


def by_hand(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool) -> list[Tensor]:
    """Result, logsumexp and gradients of q, k and v, in float64."""
    grad, q, k, v = (t.cpu().double() for t in (grad, q, k, v))
    if mask is not None:
        mask = mask.cpu() if mask.dtype == torch.bool else mask.cpu().double()
    made = forward_by_hand(q, k, v, mask, causal, None)
    return [*made, *backward_by_hand(grad, (q, k, v), *made, mask, causal, None, False)[:3]]


BOUND = {torch.float64: 1e-12, torch.float32: 5e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
HALF = [torch.bfloat16, torch.float16]
TAKEN = {"cudnn": HALF, "flash": HALF, "efficient": [*HALF, torch.float32], "": [*HALF, torch.float32, torch.float64]}
CALLS: dict[str, tuple[int, int, int, bool, str]] = {
    "square": (4, 128, 128, False, ""),
    "causal": (4, 128, 128, True, ""),
    "causal, groups": (2, 256, 256, True, ""),
    "one key head": (1, 128, 128, True, ""),
    "more keys": (4, 128, 256, False, ""),
    "partial tiles": (2, 100, 100, True, ""),
    "partial tiles, more keys": (4, 100, 70, False, ""),
    "causal, more keys": (2, 64, 96, True, ""),
    "mask": (2, 60, 70, False, "float"),
    "bool mask": (4, 64, 64, False, "bool"),
}
"""Heads of keys (of 4), queries, keys, whether it is causal, and of which kind its mask is."""


def takes(kernel: str, call: str) -> bool:
    _, s, t, causal, mask = CALLS[call]
    whole, plain = not (s % 128 or t % 128), not mask and (not causal or s == t)
    return {"cudnn": whole and plain, "flash": plain}.get(kernel, True)


PAIRS = [pair for pair in itertools.product(KERNELS, CALLS) if takes(*pair)]


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "call"), PAIRS, ids=[f"{kernel or 'by hand'}: {call}" for kernel, call in PAIRS])
def test_each_kernel_on_cuda_is_right(kernel: str, call: str) -> None:
    """Forward, logsumexp and gradients against float64 by hand, whatever lies where, without waiting for the device."""
    torch.manual_seed(0)
    heads, s, t, causal, kind = CALLS[call]
    for dtype, layout in itertools.product(TAKEN[kernel], LAYOUTS):
        if kernel == "cudnn" and layout is expanded:  # which it is not given
            continue
        options: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
        q, k, v, grad = (layout(2, *size, 64, **options) for size in ((4, s), (heads, t), (heads, t), (4, s)))
        mask = None
        if kind:
            mask = torch.rand(2, 1, s, t, device="cuda") > 0.3
            mask[0, 0, 1] = False  # a query that sees no key
            mask = mask if kind == "bool" else attention_kernels.bias_of(mask, dtype)
        with sdpa_kernel(KERNELS[kernel]):
            chosen = attention_kernels.kernel_for(*attention_kernels.dense_rows(q, k, v), mask, causal)
            assert chosen == kernel or (kernel == "cudnn" and heads == 1)  # which not every torch gives it
            with without_synchronisation():
                out, rows = attention(q, k, v, mask, causal)
                scattered = torch.stack([rows, rows], -1)[..., 0]
                grads = attention_backward(grad, q, k, v, out, scattered, mask, causal)
        expected = by_hand(grad, q, k, v, mask, causal)
        for ours, theirs in zip((out, rows, *grads[:3]), expected, strict=True):
            assert (ours.detach().cpu().double() - theirs).norm() < BOUND[dtype] * theirs.norm(), (dtype, layout)
        said = attention(*(without_content(x) for x in (q, k, v)), None, causal)
        assert strides(said) == strides((out, rows))


@pytest.mark.gpu
@pytest.mark.parametrize(("keys", "values"), [(192, 128), (64, 96), (20, 20), (36, 30)])
def test_fused_kernels_on_cuda_take_heads_of_any_width(keys: int, values: int) -> None:
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 4, 128, n).bfloat16().cuda() for n in (keys, keys, values, values))
    assert attention_kernels.kernel_for(q, k, v, None, True)
    made = attention(q, k, v, None, True)
    found = (*made, *attention_backward(grad, q, k, v, *made, None, True)[:3])
    for ours, theirs in zip(found, by_hand(grad, q, k, v, None, True), strict=True):
        assert (ours.cpu().double() - theirs).norm() < BOUND[torch.bfloat16] * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF)
def test_on_cuda_the_kernel_is_torchs_choice(dtype: torch.dtype) -> None:
    """cuDNN on Hopper, where all tiles are whole; flash where not."""
    q = rows_first(1, 4, 256, 64, dtype=dtype, device="cuda")
    chosen = {SDPBackend.CUDNN_ATTENTION.value: "cudnn", SDPBackend.FLASH_ATTENTION.value: "flash"}
    choice = chosen[torch._fused_sdp_choice(q, q, q, is_causal=True)]
    assert attention_kernels.kernel_for(q, q, q, None, True) == choice
    part = q[:, :, :100]
    assert attention_kernels.kernel_for(part, part, part, None, True) == "flash"
