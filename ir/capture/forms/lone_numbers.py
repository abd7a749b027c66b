"""Numbers that stand where an op takes tensors.

``1j * b`` keeps the number for its backward, which conjugates it: autograd has it as a tensor, the trace as a number
again. Beside a tensor a number may stand for one (``mul(b, 1j)``); an op of numbers alone is given tensors of them.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Value
from shardfx.ir.spec import TensorType

KINDS = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
"""The dtype of a tensor that torch makes of a number of Python's for an op."""


def numbers_as_tensors(builder: GraphBuilder, op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments of a call, with tensors in place of numbers if no tensor is among those that the schema names."""
    taken = [i for i, each in enumerate(op._schema.arguments[: len(args)]) if "Tensor" in str(each.type)]
    numbers = [i for i in taken if type(args[i]) in KINDS]
    if not numbers or any(isinstance(args[i], (Value, list)) for i in taken):
        return args
    return tuple(_tensor(builder, each) if i in numbers else each for i, each in enumerate(args))


def _tensor(builder: GraphBuilder, number: Any) -> Value:
    dtype = KINDS[type(number)]
    made: Value = builder.add(torch.ops.aten.full.default, ([], number), TensorType((), dtype), dtype=dtype)
    return made
