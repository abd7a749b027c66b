"""Are a node's results what its op gives for these operands?"""

from __future__ import annotations

from typing import NoReturn

import torch

from shardfx.ir.builder import infer
from shardfx.ir.graph import Node, op_name
from shardfx.ir.ops.traits import storage_offset
from shardfx.ir.spec import TensorType

from .complaint import Complaint

DEVICES = ("meta", "cpu")
"""A type that hangs on the device is right if one of these gives it; the second is asked where the first differs."""


def check_types(node: Node, wrong: Complaint) -> None:
    """Run the op without numbers and compare the number, shapes and dtypes of its results.

    A result that the graph leaves out may be one that the op gives. Ops that are not torch's, and those that cannot be
    run so, are taken as they stand.
    """
    if not isinstance(node.op, torch._ops.OpOverload):
        return
    if (offset := storage_offset(node.op, node.args, node.kwargs)) is not None:
        what = f"{op_name(node.op)} has a storage offset, which is no property of a value"
        wrong.fail(what, node, expected="storage_offset None, of a slice where the view starts later", got=offset)
    given = [None if value is None else value.type for value in node.results]
    opinions: list[str | list[TensorType | None]] = []
    for device in DEVICES:
        try:
            found = infer(node.op, node.args, node.kwargs, device)
        except NotImplementedError:
            return
        except Exception as error:
            opinions.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        made = found if isinstance(found, list) else [found]
        if len(made) == len(given) and all(a is None or a == b for a, b in zip(given, made, strict=True)):
            return
        opinions.append([*made])
    _refuse(node, given, opinions[0], wrong)


def _refuse(
    node: Node, given: list[TensorType | None], made: str | list[TensorType | None], wrong: Complaint
) -> NoReturn:
    """Say in what the results differ; ``made`` is what the op gives, or why it gives nothing."""
    name = op_name(node.op)
    if isinstance(made, str):
        wrong.fail(f"{name} does not take these arguments", node, expected=str(node.op._schema), got=made)
    if len(made) != len(given):
        what = f"{name} has another number of results"
        wrong.fail(what, node, expected=f"{len(made)}", got=f"{len(given)} results")
    index = next(i for i, (a, b) in enumerate(zip(given, made, strict=True)) if a is not None and a != b)
    what = f"result {index} is not what {name} gives"
    wrong.fail(what, node, expected=_text(made[index]), got=_text(given[index]))


def _text(type: TensorType | None) -> str:
    return "no tensor" if type is None else f"{list(type.shape)} of {type.dtype}"
