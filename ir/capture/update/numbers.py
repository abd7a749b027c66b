"""Calls of a traced step in which a number that nobody knows yet stands where an op takes a Python number.

``addcdiv(x, a, b, value=%v)`` becomes ``addcdiv(x, a * %v, b)``, in the order of operations of the kernel; an op that
has another form for tensors is called in that one.
"""

from __future__ import annotations

from collections.abc import Callable
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


def _scaled(op: Any) -> Callable[..., Any]:
    def sum_of(add: Add, x: Any, y: Any, alpha: Any) -> Any:
        return add(op, (x, add(aten.mul.Tensor, (y, alpha))))

    return sum_of


def _of_tensors(op: Any) -> Callable[..., Any]:
    def same(add: Add, x: Any, y: Any, *rest: Any) -> Any:
        return add(op, (x, y))

    return same


FORMS: dict[Any, Callable[..., Any]] = {
    aten.add.Tensor: _scaled(aten.add.Tensor),
    aten.sub.Tensor: _scaled(aten.sub.Tensor),
    aten.mul.Scalar: _of_tensors(aten.mul.Tensor),
    aten.div.Scalar: _of_tensors(aten.div.Tensor),
    aten.add.Scalar: _of_tensors(aten.add.Tensor),
    aten.sub.Scalar: _of_tensors(aten.sub.Tensor),
    aten.pow.Tensor_Scalar: _of_tensors(aten.pow.Tensor_Tensor),
    aten.rsub.Scalar: lambda add, x, y, alpha: add(aten.sub.Tensor, (y, x)),
    aten.addcmul.default: lambda add, x, a, b, v: add(aten.addcmul.default, (x, add(aten.mul.Tensor, (a, v)), b)),
    aten.addcdiv.default: lambda add, x, a, b, v: add(aten.addcdiv.default, (x, add(aten.mul.Tensor, (a, v)), b)),
    aten.lerp.Scalar: lambda add, x, y, v: add(
        aten.add.Tensor, (x, add(aten.mul.Tensor, (add(aten.sub.Tensor, (y, x)), v)))
    ),
}
"""How an op is said that is given such a number, by its arguments in the order of the schema."""
