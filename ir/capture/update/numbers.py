"""Calls of a traced step in which a number that nobody knows yet stands where an op takes a Python number.

``addcdiv(x, a, b, value=%v)`` becomes ``addcdiv(x, a * %v, b)``, in the order of operations of the kernel, and in the
precision in which the kernel computes: ``add(x, y, alpha=%v)`` of a float64 and a bfloat16 rounds nothing to bfloat16.
An op that has another form for tensors is called in that one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import torch

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.errors import Error
from shardfx.ir.graph import Value, op_name
from shardfx.ir.ops.traits import with_defaults

aten = torch.ops.aten
NUMBERS = ("NumberType", "FloatType", "IntType", "Optional[NumberType]", "number", "float", "int")


def unknown_numbers(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """The arguments of a call that are to be Python numbers, and are values here."""
    given = with_defaults(op, args, kwargs)
    numbers = {each.name for each in op._schema.arguments if str(each.real_type).lower() in SAID}
    return [name for name, arg in given.items() if isinstance(arg, Value) and name in numbers]


SAID = frozenset(each.lower() for each in NUMBERS)


def call_with_numbers(builder: GraphBuilder, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same call, of tensors alone.

    Raises:
        Error: the op is not known in such a form.
    """
    given = with_defaults(op, args, kwargs)
    form = FORMS.get(op)
    if form is None:
        raise Error(
            f"{op_name(op)} with a number that is read out of a tensor",
            where=str(builder.where),
            expected=f"one of {', '.join(map(op_name, FORMS))}",
            got=op_name(op),
            remedy="multiply by the tensor itself",
        )
    return form(builder.add, *(given[each.name] for each in op._schema.arguments if each.name in given))


Add = Callable[..., Any]
Form = Callable[..., Any]
"""``form(add, *arguments)`` writes a call by ``add``, which writes one op of a builder."""


def _scaled(op: Any) -> Form:
    return lambda add, x, y, alpha: add(op, (x, add(aten.mul.Tensor, (y, alpha))))


def _third(op: Any) -> Form:
    return lambda add, x, a, b, value: add(op, (x, add(aten.mul.Tensor, (a, value)), b))


def _interpolated(add: Add, x: Any, y: Any, weight: Any) -> Any:
    return add(aten.add.Tensor, (x, add(aten.mul.Tensor, (add(aten.sub.Tensor, (y, x)), weight))))


def _precise(form: Form, rounded: bool = False) -> Form:
    """A form of several ops whose operands are cast to the dtype in which a kernel computes, and its result to the
    kernel's. The last argument is the number, ``rounded`` by the kernel to what it gives."""

    def computed(add: Add, x: Any, *rest: Any) -> Any:
        *others, number = rest
        gives = _result_dtype(x, *others)
        wide = torch.float32 if gives in HALVES else gives
        number = _cast(add, number, gives) if rounded and gives in HALVES else number
        return _cast(add, form(add, *(_cast(add, each, wide) for each in (x, *others)), number), gives)

    return computed


HALVES = (torch.bfloat16, torch.float16)


def _result_dtype(*operands: Value) -> torch.dtype:
    """Of an op of these operands: one without dims changes nothing within its kind."""
    shells = [torch.empty((1,) * len(each.shape), dtype=each.type.dtype, device="meta") for each in operands]
    return reduce(lambda a, b: torch.empty(a.shape, dtype=torch.result_type(a, b), device="meta"), shells).dtype


def _cast(add: Add, value: Value, dtype: torch.dtype) -> Any:
    return value if value.type.dtype == dtype else add(aten._to_copy.default, (value,), dtype=dtype)


def _of_tensors(op: Any) -> Form:
    def same(add: Add, x: Any, y: Any, *rest: Any) -> Any:
        return add(op, (x, y))

    return same


FORMS: dict[Any, Form] = {
    aten.add.Tensor: _precise(_scaled(aten.add.Tensor), rounded=True),
    aten.sub.Tensor: _precise(_scaled(aten.sub.Tensor), rounded=True),
    aten.mul.Scalar: _of_tensors(aten.mul.Tensor),
    aten.div.Scalar: _of_tensors(aten.div.Tensor),
    aten.add.Scalar: _of_tensors(aten.add.Tensor),
    aten.sub.Scalar: _of_tensors(aten.sub.Tensor),
    aten.pow.Tensor_Scalar: _of_tensors(aten.pow.Tensor_Tensor),
    aten.rsub.Scalar: lambda add, x, y, alpha: add(aten.sub.Tensor, (y, x)),
    aten.addcmul.default: _precise(_third(aten.addcmul.default)),
    aten.addcdiv.default: _precise(_third(aten.addcdiv.default)),
    aten.lerp.Scalar: _precise(_interpolated),
}
"""How an op is said that is given such a number, by its arguments in the order of the schema."""
