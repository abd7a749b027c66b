"""What programs call in the place of ops: the same ops, with the same arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardfx.ir.program.source import QUICK

X, Y, BIAS = torch.randn(4, 6), torch.randn(6, 4), torch.randn(6)
OUT = torch.empty(4, 6)
ARGUMENTS: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
    "add.Tensor": [
        ((X, BIAS), {"alpha": 2}),
        ((X, 2), {}),
        ((X.long(), 1.5), {}),
        ((X, torch.tensor(2.0).double()), {}),
    ],
    "add.out": [((X, 1e-8), {"out": OUT})],
    "addmm": [((BIAS, X, Y @ X), {}), ((BIAS, X, Y @ X), {"beta": 0.5, "alpha": 2.0})],
    "bmm": [((X.view(2, 2, 6), Y.view(2, 6, 2)), {})],
    "cat": [(([X, X.long()], 1), {}), (([X, X],), {})],
    "clone": [((X.t(),), {}), ((X.t(),), {"memory_format": torch.contiguous_format})],
    "contiguous": [((X.t(),), {}), ((X,), {})],
    "div.Tensor": [((X.long(), 2), {}), ((X, X), {})],
    "embedding": [((X, torch.tensor([[1, 3]])), {}), ((X, torch.tensor([1]), 2, False, False), {})],
    "expand": [((BIAS, [4, 6]), {}), ((BIAS, [4, 6]), {"implicit": True})],
    "mm": [((X, Y), {})],
    "mm.out": [((X, Y @ X), {"out": OUT})],
    "mul.Tensor": [((X, 0.5), {}), ((X, X.double()), {})],
    "mul.out": [((X, X), {"out": OUT})],
    "native_layer_norm": [((X, [6], BIAS, None, 1e-5), {})],
    "permute": [((X, [1, 0]), {})],
    "relu": [((X,), {})],
    "reshape": [((X, [2, -1]), {}), ((X.t(), [24]), {})],
    "sub.Tensor": [((X, 1), {}), ((X, X), {"alpha": 3})],
    "sum.dim_IntList": [((X, [0], True), {}), ((X, [0, 1]), {"dtype": torch.float64}), ((X, None), {})],
    "t": [((X,), {})],
    "transpose.int": [((X, 0, -1), {})],
    "unsqueeze": [((X, -1), {})],
    "view": [((X, [2, 12]), {})],
}


class Called(TorchDispatchMode):
    """The ops that are called, and with what beside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [arg if not isinstance(arg, torch.Tensor) else arg.shape for arg in args]
        self.calls.append(f"{func} {given} {sorted(kwargs or {})}")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("op", QUICK, ids=str)
def test_the_same_op_is_called_and_gives_the_same(op: Any) -> None:
    for args, kwargs in ARGUMENTS[str(op).removeprefix("aten.").removesuffix(".default")]:
        seen = []
        for function in (op, QUICK[op]):
            with Called() as called:
                result = function(*args, **kwargs)
            results = result if isinstance(result, tuple) else (result,)
            seen.append((called.calls, [each.clone() for each in results], [each.stride() for each in results]))
        (ops, values, strides), (their_ops, their_values, their_strides) = seen
        assert ops == their_ops and strides == their_strides
        assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(values, their_values, strict=True))
