"""Numbered elements in the size of their pattern do what tensors of numbers do."""

from __future__ import annotations

import math
import random

import pytest
import torch

from shardfx.ir.ops import pack
from shardfx.runtime.verify.proof.elements import BITS, Elements, cat, joined, make_run, read


def same(a: Elements, b: torch.Tensor) -> bool:
    return a.shape == tuple(b.shape) and torch.equal(a.written_out(), b)


def whole(shape: tuple[int, ...], source: int) -> tuple[Elements, torch.Tensor]:
    numbers = torch.arange(math.prod(shape)).reshape(shape) + (source << BITS)
    strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
    return Elements.of(shape, source << BITS, zip(shape, strides, strict=True)), numbers


def moved(rng: random.Random, x, y):
    """One random move of both."""
    dims = x.dim()
    kind = rng.choice(["permute", "narrow", "split", "reshape", "cat", "pad"])
    d = rng.randrange(dims)
    if kind == "permute":
        order = rng.sample(range(dims), dims)
        return x.permute(order), y.permute(order)
    if kind == "narrow" and x.shape[d] > 1:
        start = rng.randrange(x.shape[d] - 1)
        length = rng.randrange(1, x.shape[d] - start + 1)
        return x.narrow(d, start, length), y.narrow(d, start, length)
    if kind == "split":
        size = rng.randrange(1, x.shape[d] + 1)
        i = rng.randrange(-(-x.shape[d] // size))
        return x.split(size, d)[i], y.split(size, d)[i]
    if kind == "reshape":
        n = math.prod(x.shape)
        divisors = [k for k in range(1, n + 1) if n % k == 0]
        a = rng.choice(divisors)
        return x.reshape([a, -1]), y.reshape([a, -1])
    if kind == "cat":
        order = rng.sample(range(2), 2)
        more = whole(tuple(x.shape), 7)
        return cat([(x, more[0])[i] for i in order], d), torch.cat([(y, more[1])[i] for i in order], d)
    zeros = list(x.shape)
    return cat([x, x.new_zeros(zeros)], d), torch.cat([y, y.new_zeros(zeros)], d)


@pytest.mark.parametrize("seed", range(150))
def test_moves_are_those_of_tensors(seed: int) -> None:
    rng = random.Random(seed)
    x, y = whole(tuple(rng.choice([1, 2, 3, 4, 6]) for _ in range(rng.randrange(1, 5))), 3)
    for _ in range(6):
        x, y = moved(rng, x, y)
        assert same(x, y)
        assert x.equals(Elements(x.shape, joined(make_run(int(v), ()) for v in y.flatten())))
        other = y.flatten().roll(1)
        if not torch.equal(other, y.flatten()):
            assert not x.equals(Elements(x.shape, joined(make_run(int(v), ()) for v in other)))
        if y.numel() > 3000:
            break


def test_empty_tensors_are_joined_along_any_dim() -> None:
    x, y = whole((2, 0, 3), 3)
    assert same(cat([x, x], 2), torch.cat([y, y], 2))


def test_a_box_of_a_large_value_is_one_run_through_packing_and_gathering() -> None:
    """Eight ranks hold columns of a value of a billion elements: packed, gathered, unpacked it is the whole."""
    size, columns, ranks = 1 << 20, 1 << 10, 8
    width = columns // ranks
    shards = [Elements.of((size, width), rank * width, ((size, columns), (width, 1))) for rank in range(ranks)]
    sent = [pack.pack(p, [size, width], 1, width) for p in shards]
    got = pack.unpack_gathered(cat(sent), width, [width] * ranks, 1, [size, columns])
    assert len(got.runs) == 1
    assert got.equals(Elements.of((size, columns), 0, ((size * columns, 1),)))


def test_rows_that_are_repeated_are_read_as_they_are_written() -> None:
    """The last element of a row and the first of the next are a step apart, as if they were of one run."""
    rows = Elements.of((4, 3, 6), 0, ((4, 6), (3, 0), (6, 1)))
    again = read(rows.written_out())
    assert again.equals(rows) and again.runs == rows.runs
