"""Ops of ours: meta functions say what kernels give, CUDA gives what the CPU does; calls whose number is a value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import shardfx  # noqa: F401, which registers the ops
from shardfx.ir.capture.canonical.export_rewrites import single_pad
from tests.on_gpu import without_synchronisation
from tests.op_calls import b, f

ops = torch.ops.shardfx
ROWS = [0, 0], [6, 5]
"""A tile that is the whole image: where it begins, and the size of the image."""
KINDS = ("linear", "aligned linear", "cubic", "mirrored", "repeated")

CLOSE = {torch.float64: 1e-11, torch.float32: 1e-4, torch.bfloat16: 2e-2}


def calls() -> dict[str, list[tuple[Any, ...]]]:
    """The arguments of some calls of each op, by its name."""
    x, pooled = f(2, 3, 6, 5), f(2, 3, 3, 3)
    steps = [2.0, 2.5]
    indices = torch.randint(30, pooled.shape)
    ends = torch.tensor([3, 3, 8, 10])
    q, k, v, grad, rows = f(2, 4, 6, 8), f(2, 2, 5, 8), f(2, 2, 5, 3), f(2, 4, 6, 3), f(2, 4, 6)
    pairs, gets = torch.tensor([[[[0, 3], [2, 1], [3, 3]]]]), torch.tensor([[[[1, 1], [1, 3]], [[2, 0], [0, 1]]]])
    draw, view = (0.5, torch.tensor(7), 3, []), (1, 2, 3)
    steps_of = tuple(f(2, n, 6, e).unflatten(2, view) for n, e in ((4, 8), (2, 8), (2, 3)))
    return {
        "attention": [(q, k, v), (q, k, v, b(6, 5)), (q, k, v, f(4, 6, 5)[None]), (q, k, v, None, True, 0.3, *draw)],
        "attention_backward": [
            (grad, q, k, v, grad, rows, f(6, 5), False, None, True),
            (grad, q, k, v, grad, rows, None, True, 0.3, False, *draw),
        ],
        "attention_step": [steps_of, (*steps_of, None, True)],
        "attention_step_backward": [
            (grad.unflatten(2, view), *steps_of, grad.unflatten(2, view), rows.unflatten(2, view))
        ],
        "batch_norm_gradient": [
            *((x, x + 1, f(3), f(3), f(3), f(3), weight, 60) for weight in (f(3), None)),
            (x.bfloat16(), x.bfloat16(), *(f(3).float() for _ in range(5)), 60),
        ],
        "batch_norm_sums": [
            (x, x + 1, f(3), f(3)),
            *((x.to(dtype), x.to(dtype) + 1, f(3).float(), f(3).float()) for dtype in (torch.float32, torch.bfloat16)),
        ],
        "draw": [(torch.tensor(7), 3)],
        "dropout": [(x, 0.5, torch.tensor(7), 3, [])],
        "expert_rows": [(gets, 4), (gets, 2)],
        "expert_slots": [(pairs, 4, 2, 6), (pairs, 4, 2, 2), (pairs, 4, 1, 6)],
        "parts_mm": [(f(4, 5, 6), f(4, 6, 3), torch.tensor([[1, 4], [0, 5], [2, 2], [5, 5]]))],
        "parts_outer": [(f(4, 5, 6), f(4, 5, 3), torch.tensor([[1, 4], [0, 5], [2, 2], [5, 5]]), 2)],
        "routed_mm": [(f(3, n, 6), f(4, 6, 5), torch.tensor([[0, 3], [3, 3], [-1, 2]])) for n in (1, 2)],
        "routed_outer": [(f(3, 1, 6), f(3, 2, 5), torch.tensor([[0, 3], [3, 3], [-1, 2]]), 4)],
        "take_rows": [(f(2, 5, 3), torch.tensor([[[0, 4], [-1, 1]], [[2, 2], [3, -1]]]))],
        "grouped_mm": [(f(12, 6), f(4, 6, 5), ends), (f(6, 6), f(2, 6, 5), ends, [12, 4, 6], [4, 1, 2])],
        "grouped_outer": [(f(12, 6), f(12, 5), ends), (f(6, 6), f(6, 5), ends, [12, 4, 6], [4, 1, 2])],
        "joined_moments": [(f(2, 3), 12, dtype) for dtype in (torch.float32, torch.float64)],
        "materialize": [(x.mT,)],
        "max_pool_tile": [(x, [3, 2], [2, 2], [1, 2], [-1, -1], [5, 4]), (x, [2, 2], [2, 1], [1, 1], *ROWS)],
        "max_pool_tile_backward": [(pooled, x, indices, *ROWS), (pooled, x, indices, [1, 0], [6, 5])],
        "row_numbers": [(torch.tensor([[0, 7], [-1, 5]]), 3, padding) for padding in (-1, 7)],
        "numbered_rows": [(f(6, 4), torch.tensor([[[[1, 3, 0]], [[-2, 1, 1]]]]).int())],
        "numbered_sums": [(f(1, 2, 1, 3, 4), torch.tensor([[[[1, 3, 0]], [[-2, 1, 1]]]]).int(), 3)],
        "narrow_ids": [(torch.tensor([[0, 7], [2**40, -(2**40)]]), 7)],
        "no_share": [(x, [3, 2, 4], [2, 1], [torch.float64, torch.int64], [0.0, -1.0])],
        "batch_moments": [(x,), (x.bfloat16(),)],
        "rotate": [(x, 2, 1), (x[:, :, :2], 2, 1, [6, 2, 2, 1])],
        "resize_tile": [(x, *ROWS, [1, 0], [2, 2], steps, kind) for kind in KINDS],
        "resize_tile_backward": [(f(2, 3, 2, 2), *ROWS, [6, 5], [1, 0], steps, kind) for kind in KINDS],
    }


CALLS = calls()


def on(device: str, args: Sequence[Any]) -> list[Any]:
    return [a.to(device) if isinstance(a, Tensor) else a for a in args]


def call(name: str, args: Sequence[Any]) -> list[Tensor]:
    made = getattr(ops, name)(*args)
    return [made] if isinstance(made, Tensor) else list(made)


def names() -> Iterator[str]:
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("shardfx::"):
            yield name.removeprefix("shardfx::").partition(".")[0]


def test_each_op_has_a_call_here() -> None:
    assert set(names()) == set(CALLS)


@pytest.mark.parametrize("name", CALLS)
def test_meta_functions_say_what_the_cpu_gives(name: str) -> None:
    for args in CALLS[name]:
        for given, said in zip(call(name, args), call(name, on("meta", args)), strict=True):
            assert (given.shape, given.dtype, given.stride()) == (said.shape, said.dtype, said.stride())


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_cuda_gives_what_the_cpu_does_and_the_host_does_not_wait(name: str) -> None:
    for args in CALLS[name]:
        there = on("cuda", args)
        with without_synchronisation():
            made = call(name, there)
        rounded = max((CLOSE.get(a.dtype, 0.0) for a in args if isinstance(a, Tensor)), default=0.0)
        for ours, theirs in zip(made, call(name, args), strict=True):
            assert ours.is_cuda and ours.stride() == theirs.stride()
            close = max(CLOSE.get(theirs.dtype, 0.0), rounded)  # kernels round differences of 16 bits within
            torch.testing.assert_close(ours.cpu(), theirs, rtol=close, atol=close)


@pytest.mark.parametrize("pad", [(2, 1), (-1, 2), (2, -1), (-1, -2), (1, 0, -1, 2)])
def test_circular_padding_is_torchs(pad: tuple[int, ...]) -> None:
    """And its gradient, where rows are cut off, too."""
    x = f(2, 3, 4, 5).requires_grad_()
    ours, theirs = single_pad(x, (*pad, 0, 0)[:4], "circular"), F.pad(x, (*pad, 0, 0)[:4], mode="circular")
    assert torch.equal(ours, theirs)
    grad = torch.randn_like(theirs)
    torch.testing.assert_close(*(torch.autograd.grad(y, x, grad)[0] for y in (ours, theirs)))
