"""Normal forms: equal expressions are one value, different ones are two."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfx.ir.builder import trace_on_meta
from shardfx.ir.ops.dropout import draw
from shardfx.ir.spec import TensorType
from shardfx.runtime.verify.proof.normal_form import COMMUTE, NormalForms

A = torch.ops.aten
D = torch.float64


def T(*shape: int, d: torch.dtype = D) -> TensorType:
    return TensorType(shape, d)


x46, y46, sq = T(4, 6), T(4, 6), T(6, 6)

EQUAL: dict[str, tuple[Any, ...]] = {
    "negneg": (lambda x: x.neg().neg(), lambda x: x, (x46,)),
    "x2half": (lambda x: x * 2 * 0.5, lambda x: x, (x46,)),
    "flip2": (lambda x: x.flip(0).flip(0), lambda x: x, (x46,)),
    "expand same": (lambda x: x.expand(4, 6), lambda x: x, (x46,)),
    "tt": (lambda x: x.t().t(), lambda x: x, (x46,)),
    "add zeros": (lambda x: x + torch.zeros_like(x), lambda x: x, (x46,)),
    "mul ones": (lambda x: x * torch.ones_like(x), lambda x: x, (x46,)),
    "cat one": (lambda x: torch.cat([x]), lambda x: x, (x46,)),
    "splitcat": (lambda x: torch.cat(x.split(2)), lambda x: x, (x46,)),
    "splitcat1": (lambda x: torch.cat(x.split(2, 1), 1), lambda x: x, (x46,)),
    "splitcat sum": (lambda x, y: torch.cat((x + y * 2).split(2)), lambda x, y: x + y * 2, (x46, y46)),
    "splitcat gelu": (lambda x, y: torch.cat(F.gelu(x * y).split(2)), lambda x, y: F.gelu(x * y), (x46, y46)),
    "slice all": (lambda x: x[0:4], lambda x: x, (x46,)),
    "sub": (lambda x, y: x + y.neg(), lambda x, y: x - y, (x46, y46)),
    "rsub": (lambda x: 1 - x, lambda x: x.neg() + 1, (x46,)),
    "comm mul": (lambda x, y: x * y, lambda x, y: y * x, (x46, y46)),
    "comm add": (lambda x, y: torch.add(x, y, alpha=2), lambda x, y: y * 2 + x, (x46, y46)),
    "bmm": (lambda x, y: torch.bmm(x[None], y[None])[0], lambda x, y: x @ y, (x46, T(6, 5))),
    "einsum": (lambda x, y: torch.einsum("ij,jk->ik", x, y), lambda x, y: x @ y, (x46, T(6, 5))),
    "einsumT": (lambda x, y: torch.einsum("ij,kj->ki", x, y), lambda x, y: y @ x.t(), (x46, T(5, 6))),
    "linear": (lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b, (x46, T(5, 6), T(5))),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w), lambda x, w, b: b + (x @ w), (x46, T(6, 5), T(5))),
    "mm tt": (lambda x, w: (w.t() @ x.t()).t(), lambda x, w: x @ w, (x46, T(6, 5))),
    "linear3": (
        lambda x, w: F.linear(x, w),
        lambda x, w: (x.reshape(-1, 6) @ w.t()).view(2, 4, 5),
        (T(2, 4, 6), T(5, 6)),
    ),
    "matmul3": (lambda x, w: x @ w, lambda x, w: (x.reshape(-1, 6) @ w).view(2, 4, 5), (T(2, 4, 6), T(6, 5))),
    "silu": (lambda x: x * x.sigmoid(), F.silu, (x46,)),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), F.gelu, (x46,)),
    "gelu2": (lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), F.gelu, (x46,)),
    "gelut": (
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: F.gelu(x, approximate="tanh"),
        (x46,),
    ),
    "pow": (lambda x: x**2, lambda x: x * x, (x46,)),
    "square": (lambda x: x.square(), lambda x: x * x, (x46,)),
    "where": (lambda x, m: torch.where(m, 0.0, x), lambda x, m: x.masked_fill(m, 0), (x46, T(4, 6, d=torch.bool))),
    "clone": (lambda x: x.clone().detach().contiguous(), lambda x: x, (x46,)),
    "to": (lambda x: x.to(D), lambda x: x, (x46,)),
    "bcast": (lambda x, b: x + b.expand(4, 6), lambda x, b: x + b, (x46, T(6))),
    "bcast2": (lambda x, b: x * b[None, :], lambda x, b: b * x, (x46, T(6))),
    "dot scale": (lambda x, w: (x * 2) @ w, lambda x, w: (x @ w) * 2, (x46, T(6, 5))),
    "stack": (lambda x, y: torch.stack([x, y])[1], lambda x, y: y, (x46, y46)),
    "roll": (lambda x: x.roll(1, 0).roll(-1, 0), lambda x: x, (x46,)),
    "pad": (lambda x: F.pad(x, (1, 1))[:, 1:-1], lambda x: x, (x46,)),
    "unbind": (lambda x: torch.stack(x.unbind(1), 1), lambda x: x, (x46,)),
    "div": (lambda x, y: x * (1 / y), lambda x, y: x / y, (x46, y46)),
    "tanh bw": (lambda g, y: g * (1 - y**2), lambda g, y: A.tanh_backward(g, y), (x46, y46)),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=2), lambda x, y: x + 2 * y * x, (x46, y46)),
    "mse": (lambda x, y: F.mse_loss(x, y), lambda x, y: ((x - y) ** 2).mean(), (x46, y46)),
    "int add": (lambda x, y: x + y + 1, lambda x, y: 1 + y + x, (T(4, d=torch.int64), T(4, d=torch.int64))),
    "repeat": (lambda x: x.repeat(2, 1)[4:], lambda x: x, (x46,)),
    "mm T sq": (lambda x, w: x @ w, lambda x, w: (w.t() @ x.t()).t(), (sq, sq)),
}
UNEQUAL: dict[str, tuple[Any, ...]] = {
    "x2": (lambda x: x * 2, lambda x: x, (x46,)),
    "mmT": (lambda x, w: x @ w.t(), lambda x, w: x @ w, (sq, sq)),
    "mm order": (lambda x, w: w @ x, lambda x, w: x @ w, (sq, sq)),
    "sub order": (lambda x, y: y - x, lambda x, y: x - y, (x46, y46)),
    "div order": (lambda x, y: y / x, lambda x, y: x / y, (x46, y46)),
    "x-x": (lambda x: x - x, lambda x: x * 0, (x46,)),
    "x/x": (lambda x: x / x, lambda x: torch.ones_like(x), (x46,)),
    "flip": (lambda x: x.flip(0), lambda x: x, (x46,)),
    "sum dims": (lambda x: x.sum(0), lambda x: x.sum(1), (sq,)),
    "sum1 T": (lambda x: (x + x.t()).sum(0), lambda x: (2 * x).sum(0), (sq,)),
    "split swap": (lambda x: torch.cat(x.split(2)[::-1]), lambda x: x, (x46,)),
    "reshape t": (lambda x: x.t().reshape(4, 6), lambda x: x, (x46,)),
    "down up": (lambda x: x.to(torch.float32).to(D), lambda x: x, (x46,)),
    "softmax dim": (lambda x: x.softmax(0), lambda x: x.softmax(1), (sq,)),
    "relu gelu": (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh"), (x46,)),
    "amax amin": (lambda x: x.amax(0), lambda x: x.amin(0), (x46,)),
    "sum of prod": (lambda x, y: (x * y).sum(), lambda x, y: x.sum() * y.sum(), (x46, y46)),
    "amax neg": (lambda x: (-x).amax(0), lambda x: -(x.amax(0)), (x46,)),
    "amax twice": (lambda x: (2 * x).amax(0), lambda x: x.amax(0), (x46,)),
    "pw T": (lambda x: x * x.t(), lambda x: x * x, (sq,)),
    "bias dim": (lambda x, b: x + b[:, None], lambda x, b: x + b, (sq, T(6))),
    "ge gt": (lambda x, y: x >= y, lambda x, y: x > y, (x46, y46)),
    "where swap": (
        lambda x, y, m: torch.where(m, x, y),
        lambda x, y, m: torch.where(m, y, x),
        (x46, y46, T(4, 6, d=torch.bool)),
    ),
    "int div": (lambda x: x // 2 * 2, lambda x: x, (T(4, d=torch.int64),)),
    "prod of sums": (lambda x, y: (x + y) * (x + y), lambda x, y: x * x + y * y, (x46, y46)),
    "add a": (lambda x, y: torch.add(x, y, alpha=2), lambda x, y: x + y, (x46, y46)),
    "recip sum": (lambda x, y: 1 / (x + y), lambda x, y: 1 / x + 1 / y, (x46, y46)),
    "sqrt sq": (lambda x: (x * x).sqrt(), lambda x: x, (x46,)),
    "mean": (lambda x: x.sum() / 6, lambda x: x.mean(), (x46,)),
    "bool add": (lambda m, n: m + n, lambda m, n: m * n, (T(4, d=torch.bool), T(4, d=torch.bool))),
    "as_strided": (
        lambda x: x.t().as_strided((4, 6), (6, 1)),
        lambda x: x.t().contiguous().as_strided((4, 6), (6, 1)),
        (x46,),
    ),
    "sum int": (lambda x: x.sum(), lambda x: x.to(torch.float64).sum(), (T(4, d=torch.int64),)),
    "view dtype": (lambda x: x.view(torch.int64).view(D), lambda x: x.view(torch.int64) + 0, (x46,)),
    "negview": (lambda x: torch._neg_view(x), lambda x: x, (x46,)),
    "drop": (lambda x: F.dropout(x, 0.5) + F.dropout(x, 0.5), lambda x: 2 * F.dropout(x, 0.5), (x46,)),
    "rand": (lambda x: torch.rand_like(x) + x, lambda x: torch.rand_like(x) + x, (x46,)),
    "empty": (lambda x: torch.empty_like(x) + x, lambda x: torch.empty_like(x) + x, (x46,)),
    "two sums odd": (lambda x: x.sum(0).sum(0), lambda x: x.sum((0, 2)), (T(4, 4, 4),)),
    "no bias": (lambda x, w, b: torch.addmm(b, x, w, beta=0), lambda x, w, b: 0 * b + x @ w, (x46, T(6, 5), T(5))),
    "no product": (
        lambda x, w, b: torch.addmm(b, x, w, alpha=0),
        lambda x, w, b: b + 0 * (x @ w),
        (x46, T(6, 5), T(5)),
    ),
}


def values(one: Any, other: Any, types: tuple[TensorType, ...]) -> tuple[Any, Any]:
    forms = NormalForms()
    given = [forms.atom(("input", i), t.shape, t.dtype) for i, t in enumerate(types)]
    graphs = (trace_on_meta(lambda *each, f=f: f(*each), types).graph for f in (one, other))
    made = [forms.graph(graph, given) for graph in graphs]
    return made[0], made[1]


@pytest.mark.parametrize("name", EQUAL)
def test_equal_expressions_have_one_value_and_equal_numbers(name: str) -> None:
    one, other, types = EQUAL[name]
    a, b = values(one, other, types)
    assert a is not None and a == b
    torch.manual_seed(0)
    given = [torch.randn(t.shape, dtype=D).mul(3).to(t.dtype) for t in types]
    torch.testing.assert_close(one(*given), other(*given), equal_nan=True)


@pytest.mark.parametrize("name", UNEQUAL)
def test_different_expressions_have_two_values(name: str) -> None:
    one, other, types = UNEQUAL[name]
    a, b = values(one, other, types)
    assert a is None or a != b


@pytest.mark.parametrize("op", sorted(COMMUTE, key=str), ids=str)
def test_commutative_op_gives_the_same_of_exchanged_operands(op: Any) -> None:
    torch.manual_seed(0)
    a, b = (torch.randint(-2, 3, (50,)) for _ in range(2))
    assert torch.equal(op(a, b), op(b, a))


def test_random_number_of_a_seed_is_one_value_for_each_number_of_a_draw() -> None:
    """Its decomposition writes in place: it is the op's own result."""
    forms = NormalForms()
    seed = forms.atom(("input", "seed"), (), torch.int64)
    one, again, two = (forms.call(draw, (seed, n), {}, lambda: ((), torch.int64)) for n in (1, 1, 2))
    assert one == again != two
