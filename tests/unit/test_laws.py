"""Normal forms: what is equal by the laws is one value, what is not is two, and every law holds when it is run."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from shardfx.ir.oracle.draws import FLOATS
from shardfx.ir.spec import TensorType
from shardfx.runtime.verify.forms.known_ops import empty
from shardfx.runtime.verify.forms.laws import COMMUTE, INVOLUTIONS, LAWS

A = torch.ops.aten
D = torch.float64
INF, NAN = float("inf"), float("nan")


def T(*shape: int, d: torch.dtype = D) -> TensorType:
    return TensorType(shape, d)


x46, y46, sq = T(4, 6), T(4, 6), T(6, 6)

EQUAL: dict[str, tuple[Any, ...]] = {
    "negneg": (lambda x: x.neg().neg(), lambda x: x, (x46,)),
    "x2half": (lambda x: x * 2 * 0.5, lambda x: x, (x46,)),
    "flip2": (lambda x: x.flip(0).flip(0), lambda x: x, (x46,)),
    "expand same": (lambda x: x.expand(4, 6), lambda x: x, (x46,)),
    "tt": (lambda x: x.t().t(), lambda x: x, (x46,)),
    "perm relu": (lambda x: x.t().relu().t(), lambda x: x.relu(), (x46,)),
    "view relu": (lambda x: x.reshape(-1).relu().view(4, 6), lambda x: x.relu(), (x46,)),
    "add zeros": (lambda x: x + torch.zeros_like(x), lambda x: x, (x46,)),
    "mul ones": (lambda x: x * torch.ones_like(x), lambda x: x, (x46,)),
    "cat one": (lambda x: torch.cat([x]), lambda x: x, (x46,)),
    "splitcat": (lambda x: torch.cat(x.split(2)), lambda x: x, (x46,)),
    "splitcat1": (lambda x: torch.cat(x.split(2, 1), 1), lambda x: x, (x46,)),
    "splitcat sum": (lambda x, y: torch.cat((x + y * 2).split(2)), lambda x, y: x + y * 2, (x46, y46)),
    "splitcat gelu": (lambda x, y: torch.cat(F.gelu(x * y).split(2)), lambda x, y: F.gelu(x * y), (x46, y46)),
    "slice all": (lambda x: x[0:4], lambda x: x, (x46,)),
    "two sums": (lambda x: x.sum(1).sum(0), lambda x: x.sum(), (x46,)),
    "two sums b": (lambda x: x.sum(0).sum(0), lambda x: x.sum(), (x46,)),
    "two sums 3": (lambda x: x.sum(2).sum(0), lambda x: x.sum((0, 2)), (T(3, 4, 5),)),
    "two sums keep": (
        lambda x: x.sum(2, keepdim=True).sum(0, keepdim=True),
        lambda x: x.sum((0, 2), keepdim=True),
        (T(3, 4, 5),),
    ),
    "sum of t": (lambda x: x.t().sum(), lambda x: x.sum(), (x46,)),
    "sum of t pw": (lambda x, y: (x.t() * y.t()).sum(), lambda x, y: (x * y).sum(), (x46, y46)),
    "sum flat": (lambda x: x.reshape(-1).sum(), lambda x: x.sum(), (x46,)),
    "amax two": (lambda x: x.amax(1).amax(0), lambda x: x.amax(), (x46,)),
    "mean": (lambda x: x.sum() / 24, lambda x: x.mean(), (x46,)),
    "mean2": (lambda x: x.mean(0).mean(), lambda x: x.mean(), (x46,)),
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
    "softmax": (lambda x: x.log_softmax(-1).exp(), lambda x: x.softmax(-1), (x46,)),
    "silu": (lambda x: x * x.sigmoid(), F.silu, (x46,)),
    "gelu": (lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))), F.gelu, (x46,)),
    "gelu2": (lambda x: x * 0.5 * (1 + torch.erf(x * math.sqrt(0.5))), F.gelu, (x46,)),
    "gelut": (
        lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
        lambda x: F.gelu(x, approximate="tanh"),
        (x46,),
    ),
    "rsqrt": (lambda x: 1 / x.sqrt(), lambda x: x.rsqrt(), (x46,)),
    "pow": (lambda x: x**2, lambda x: x * x, (x46,)),
    "square": (lambda x: x.square(), lambda x: x * x, (x46,)),
    "where": (lambda x, m: torch.where(m, 0.0, x), lambda x, m: x.masked_fill(m, 0), (x46, T(4, 6, d=torch.bool))),
    "relu c": (lambda x: x.clamp_min(0), F.relu, (x46,)),
    "relu m": (lambda x: torch.maximum(x, torch.zeros_like(x)), F.relu, (x46,)),
    "relu m0": (lambda x: torch.maximum(x.new_zeros(()), x), F.relu, (x46,)),
    "clone": (lambda x: x.clone().detach().contiguous(), lambda x: x, (x46,)),
    "to": (lambda x: x.to(D), lambda x: x, (x46,)),
    "up down": (lambda x: x.to(D).to(torch.float32), lambda x: x, (T(4, 6, d=torch.float32),)),
    "bcast": (lambda x, b: x + b.expand(4, 6), lambda x, b: x + b, (x46, T(6))),
    "bcast2": (lambda x, b: x * b[None, :], lambda x, b: b * x, (x46, T(6))),
    "sum scale": (lambda x: (x * 3).sum(0), lambda x: x.sum(0) * 3, (x46,)),
    "sum of add": (lambda x, y: (x + y).sum(0), lambda x, y: y.sum(0) + x.sum(0), (x46, y46)),
    "dot scale": (lambda x, w: (x * 2) @ w, lambda x, w: (x @ w) * 2, (x46, T(6, 5))),
    "stack": (lambda x, y: torch.stack([x, y])[1], lambda x, y: y, (x46, y46)),
    "roll": (lambda x: x.roll(1, 0).roll(-1, 0), lambda x: x, (x46,)),
    "pad": (lambda x: F.pad(x, (1, 1))[:, 1:-1], lambda x: x, (x46,)),
    "unbind": (lambda x: torch.stack(x.unbind(1), 1), lambda x: x, (x46,)),
    "div": (lambda x, y: x * (1 / y), lambda x, y: x / y, (x46, y46)),
    "gt": (lambda x, y: x > y, lambda x, y: y < x, (x46, y46)),
    "notnot": (lambda m: m.logical_not().logical_not(), lambda m: m, (T(4, 6, d=torch.bool),)),
    "tanh bw": (lambda g, y: g * (1 - y**2), lambda g, y: A.tanh_backward(g, y), (x46, y46)),
    "addcmul": (lambda x, y: torch.addcmul(x, x, y, value=2), lambda x, y: x + 2 * y * x, (x46, y46)),
    "lerp": (lambda x, y: x.lerp(y, 0.1), lambda x, y: x + 0.1 * (y - x), (x46, y46)),
    "norm": (lambda x: torch.linalg.vector_norm(x), lambda x: (x**2).sum().sqrt(), (x46,)),
    "mse": (lambda x, y: F.mse_loss(x, y), lambda x, y: ((x - y) ** 2).mean(), (x46, y46)),
    "int add": (lambda x, y: x + y + 1, lambda x, y: 1 + y + x, (T(4, d=torch.int64), T(4, d=torch.int64))),
    "repeat": (lambda x: x.repeat(2, 1)[4:], lambda x: x, (x46,)),
    "sum unsq": (lambda x: x.unsqueeze(0).sum(0), lambda x: x, (x46,)),
    "chunkadd": (lambda x, y: torch.cat([x[:2] + y[:2], x[2:] + y[2:]]), lambda x, y: x + y, (x46, y46)),
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
    forms = empty()
    given = [forms.given(i, t.shape, t.dtype) for i, t in enumerate(types)]
    return forms.traced(one, given, {}), forms.traced(other, given, {})


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_by_the_laws_is_one_value_and_so_are_its_numbers(name: str) -> None:
    one, other, types = EQUAL[name]
    a, b = values(one, other, types)
    assert a is not None and a == b
    torch.manual_seed(0)
    given = [torch.randn(t.shape, dtype=D).mul(3).to(t.dtype) for t in types]
    torch.testing.assert_close(one(*given), other(*given), equal_nan=True)


@pytest.mark.parametrize("name", UNEQUAL)
def test_what_is_not_equal_is_two_values(name: str) -> None:
    one, other, types = UNEQUAL[name]
    a, b = values(one, other, types)
    assert a is None or a != b


# ---- the laws, run ------------------------------------------------------------------------------------------------

MORE: dict[Any, tuple[Any, ...]] = {
    A._softmax.default: (-1, False),
    A.clamp.default: (-0.5, 0.7),
    A.clamp_min.default: (0.25,),
    A.clamp_max.default: (0.25,),
    A.masked_fill.Scalar: (-2.5,),
    A.lerp.Scalar: (0.3,),
    A.threshold_backward.default: (0.0,),
    **dict.fromkeys((A.ge.Scalar, A.gt.Scalar, A.le.Scalar, A.lt.Scalar), (0.0,)),
}
"""What an op takes besides tensors."""
SHAPES = {
    A.addmm.default: ((5, 6), (5, 4), (4, 6)),
    A.addmv.default: ((5,), (5, 4), (4,)),
    A.baddbmm.default: ((2, 5, 6), (2, 5, 4), (2, 4, 6)),
    A.masked_fill.Tensor: ((5, 6), (5, 6), ()),
}
KEYWORDS: dict[Any, dict[str, Any]] = {
    A.addmm.default: {"beta": 2, "alpha": 0.5},
    A.baddbmm.default: {"beta": 2, "alpha": 0.5},
    A.addmv.default: {"beta": 2, "alpha": 0.5},
    A.addcmul.default: {"value": -0.5},
    A.addcdiv.default: {"value": -0.5},
    A.gelu.default: {"approximate": "tanh"},
}


def operands(op: Any, draw: Any, random: torch.Generator, special: bool) -> list[torch.Tensor]:
    required = [a for a in op._schema.arguments if "Tensor" in str(a.type) and not a.has_default_value()]
    found = []
    for place, each in enumerate(required):
        shape = SHAPES.get(op, ((5, 6),) * 9)[place]
        tensor = draw(shape, random)
        if special and tensor.dim():
            tensor.view(-1)[:4] = torch.tensor([INF, -INF, NAN, 0.0], dtype=D)[torch.randperm(4)]
        found.append(tensor > 0 if each.name == "mask" else tensor)
    return found


@pytest.mark.parametrize("op", LAWS, ids=str)
def test_a_law_holds(op: Any) -> None:
    """Of both signs, zeros and ties; and what is infinite or NaN is so by both."""
    random = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    for draw in FLOATS:
        for special in (False, True):
            for kwargs in ({}, KEYWORDS.get(op, {})):
                given = [*operands(op, draw, random, special), *MORE.get(op, ())]
                expected, got = op(*given, **kwargs), LAWS[op](*given, **kwargs)
                assert expected.dtype == got.dtype and expected.shape == got.shape
                torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9, equal_nan=True)


def test_what_commutes_does_and_what_iterations_back_does() -> None:
    torch.manual_seed(0)
    for op in COMMUTE:
        a, b = (torch.randint(-2, 3, (50,)) for _ in range(2))
        assert torch.equal(op(a, b), op(b, a))
    for op, dtype in INVOLUTIONS.items():
        of = torch.randint(-2, 3, (50,)).to(dtype or torch.int64)
        assert torch.equal(op(op(of)), of)


def test_a_law_takes_what_its_op_takes() -> None:
    for op, law in LAWS.items():
        assert len(inspect.signature(law).parameters) >= sum(not a.has_default_value() for a in op._schema.arguments)
