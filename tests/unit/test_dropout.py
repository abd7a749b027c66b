"""Dropout masks: hashes of the seed, the op's number and the box, as good as random numbers and read by no host."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.ops.dropout import dropout

SHAPES = [(256, 1024), (64, 4096), (4, 48, 7, 195), (2**17,)]


def mask(
    shape: tuple[int, ...], p: float, seed: int = 1, number: int = 1, box: tuple[int, ...] = (), device: str = "cpu"
) -> Tensor:
    x = torch.ones(shape, device=device)
    return dropout(x, p, torch.tensor(seed, device=device), number, list(box))[1]


def standard(mask: Tensor, p: float) -> Tensor:
    """Numbers of mean 0 and variance 1, if they are what they should be."""
    return (mask.double() - (1 - p)) / math.sqrt(p * (1 - p))


def deviations(total: Tensor) -> float:
    """By how many standard deviations a sum of products of independent standard numbers is off 0."""
    return float(total.sum()) / math.sqrt(total.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dropout_masks_are_independent(shape: tuple[int, ...], p: float) -> None:
    """Neighbours in each dim are, and masks of other numbers, seeds and boxes, also some places further."""
    one = standard(mask(shape, p), p)
    found = {"mean": one}
    for dim in range(len(shape)):
        length = shape[dim]
        for apart in (1, 2):
            found[f"{apart} apart in dim {dim}"] = one.narrow(dim, 0, length - apart) * one.narrow(
                dim, apart, length - apart
            )
    first = [0] * len(shape)
    others = {
        "number": mask(shape, p, number=2),
        "seed": mask(shape, p, seed=2),
        "far seed": mask(shape, p, seed=2**61 + 5),
        "box": mask(shape, p, box=(shape[0], *first[1:])),
        "first box": mask(shape, p, box=tuple(first)),
        "last box": mask(shape, p, box=(*first[1:], 1)),
    }
    for name, other in others.items():
        found[name] = one * standard(other, p)
        found[f"{name}, one further"] = one.flatten()[1:] * standard(other, p).flatten()[:-1]
    off = {name: round(deviations(total), 1) for name, total in found.items() if abs(deviations(total)) > 4}
    assert not off


def test_dropout_scales_what_it_keeps() -> None:
    x, seed = torch.randn(33, 5), torch.tensor(3)
    out, keep = dropout(x, 0.25, seed, 1, [])
    torch.testing.assert_close(out, torch.where(keep, x / 0.75, 0.0))
    assert dropout(x, 0.0, seed, 1, [])[1].all() and not dropout(x, 1.0, seed, 1, [])[0].any()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,), (5, 1, 1)], ids=str)
def test_dropout_of_any_shape(shape: tuple[int, ...]) -> None:
    out, keep = dropout(torch.ones(shape), 0.5, torch.tensor(3), 1, [0] * len(shape))
    assert out.shape == keep.shape == shape and keep.dtype == torch.bool


def test_dropout_reads_no_seed() -> None:
    """A fake tensor has no content: who reads it on the host raises."""
    with FakeTensorMode() as mode:
        seed = mode.from_tensor(torch.tensor(1))
        out, keep = dropout(torch.ones(4, 6), 0.5, seed, 1, [0, 0])
    assert out.shape == keep.shape == (4, 6)


@pytest.mark.gpu
def test_a_cuda_graph_draws_anew_by_another_seed() -> None:
    x, seed = torch.ones(64, 96, device="cuda"), torch.tensor(3, device="cuda")
    dropout(x, 0.5, seed, 1, [0, 0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        keep = dropout(x, 0.5, seed, 1, [0, 0])[1]
    for number in (3, 4):
        seed.fill_(number)
        graph.replay()
        torch.testing.assert_close(keep.cpu(), mask((64, 96), 0.5, number, 1, (0, 0)))
