"""Is a node of a program one that can be read at all: a call of a function, with what its signature takes?

Whoever reads calls by their rows and schemas may then take the arguments for what these say: tensors where tensors
stand, and as many as there are. Whether the numbers among them are right is not asked here.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, get_type_hints

import torch
from torch import fx

from shardfx.ir.ops.computing.fused_update import run_of
from shardfx.ir.ops.computing.segment import misfit, segment
from shardfx.ir.ops.local_ops import OVERWRITING, row_of
from shardfx.ir.ops.traits import storage_offset

from .looped.within_turns import gives_number

OPS = ("placeholder", "get_attr", "call_function", "output")
TENSOR, TENSORS, OTHER, ANY = "a tensor", "a list of tensors", "no tensor", "anything"
NUMBER, NUMBERS = "a whole number", "a list of whole numbers"
NESTS = (type(None), str, list, tuple, dict, slice)
"""What is no number, of whatever type: ranks for which one program is written have numbers of their own."""


@dataclass(frozen=True)
class Slot:
    """One argument: what stands there, and whether it may be left out, be None, or be given by its name alone.

    ``number``: torch takes a number for a tensor of it, where another tensor says of which dtype.
    """

    name: str
    kind: str
    needed: bool = True
    optional: bool = False
    named: bool = False
    number: bool = False

    def takes(self, arg: Any) -> bool:
        """Whether an argument may stand here."""
        if self.kind == ANY or (arg is None and self.optional):
            return True
        if self.kind == TENSOR:
            return isinstance(arg, fx.Node) or (self.number and not isinstance(arg, NESTS))
        if self.kind == TENSORS:
            return isinstance(arg, (list, tuple)) and all(
                isinstance(each, fx.Node) or (each is None and self.optional) for each in arg
            )
        arg = _numbered(arg)
        if self.kind in (NUMBER, NUMBERS):
            return _numbers(arg) if self.kind == NUMBERS else _number(arg)
        return not _holds_a_node(arg)


def _numbered(arg: Any) -> Any:
    """An argument with a number in the place of each number of a turn."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_numbered(each) for each in arg)
    return 0 if isinstance(arg, fx.Node) and gives_number(arg) else arg


def malformed(node: fx.Node) -> str:
    """What is wrong with the form of a node; empty where nothing is."""
    if node.op not in OPS:
        return f"a {node.op} node is no part of a rank's program"
    if node.op != "call_function":
        return ""
    if not callable(node.target):
        return f"{node.target!r} is no function"
    row = row_of(node.target)
    slots = _slots(node.target) if row is not None or isinstance(node.target, torch._ops.OpOverload) else None
    wrong = "" if slots is None else _misfit(node, slots)
    if not wrong and storage_offset(node.target, node.args, node.kwargs) is not None:
        return f"{node.name} has a storage offset, which counts from the begin of memory that it may share with others"
    if not wrong and node.target is segment:
        return _no_segment(node)
    if not wrong and row is not None and row.group is not None and not isinstance(_at(node, row.group), str):
        return f"{node.name} names no group of ranks as its argument {row.group}"
    return wrong


def _no_segment(node: fx.Node) -> str:
    """What is wrong with a segment of an optimizer's step, and with what is taken of it."""
    if node.kwargs:
        return f"{node.name} takes its arguments by place"
    arguments: Any = node.args
    calls, gives, members, tensors, scalars, *fused = arguments
    wrong = misfit(calls, gives, members, tensors, len(scalars))
    if wrong:
        return f"{node.name} is no segment: {wrong}"
    if fused and list(fused[0]) != run_of(calls, gives):
        return f"{node.name} runs {fused[0][-1:]}, which does not compute its calls"
    results = range(len(gives) * members)
    for user in node.users:
        if user.target is not operator.getitem or user.args[1] not in results:
            return f"{user.name} takes another thing of {node.name} than one of its {len(results)} results"
    return ""


def _at(node: fx.Node, place: int) -> Any:
    return node.args[place] if place < len(node.args) else None


def _misfit(node: fx.Node, slots: Sequence[Slot]) -> str:
    args = node.args
    if not node.kwargs and len(args) == len(slots) and not any(slot.named for slot in slots):  # as most are
        wrong = next((i for i, slot in enumerate(slots) if not slot.takes(args[i])), None)
        return "" if wrong is None else _not_taken(node, slots[wrong], args[wrong])
    places = [slot for slot in slots if not slot.named]
    if len(node.args) > len(places):
        return f"{node.name} has {len(node.args)} arguments, where {len(places)} are taken"
    given = dict(zip((slot.name for slot in places), node.args, strict=False))
    for name, arg in node.kwargs.items():
        if name in given or all(slot.name != name for slot in slots):
            return f"{node.name} has an argument {name!r} that is not taken" + (" twice" if name in given else "")
        given[name] = arg
    for slot in slots:
        if slot.name not in given:
            if slot.needed:
                return f"{node.name} lacks the argument {slot.name!r}"
        elif not slot.takes(given[slot.name]):
            return _not_taken(node, slot, given[slot.name])
    return ""


def _not_taken(node: fx.Node, slot: Slot, arg: Any) -> str:
    return f"{node.name} has {arg!r} for {slot.name!r}, where {slot.kind} is expected"


OVER = frozenset(OVERWRITING.values())
"""Pointwise ops in the form that writes into an operand's memory."""


@cache
def _slots(target: Callable[..., Any]) -> tuple[Slot, ...] | None:
    """The arguments of a torch op, or of one of our functions; None: nothing is known of them."""
    if isinstance(target, torch._ops.OpOverload):
        found = tuple(map(_of_schema, target._schema.arguments))
        tensors = [slot for slot in found if slot.kind == TENSOR and slot.name != "out"]
        several = len(tensors) > 1 and (row_of(target) is None or target in OVER)
        return tuple(replace(slot, number=several and slot.name != "out") for slot in found)
    row = row_of(target)
    if row is not None and row.name == "getitem":
        return Slot("a", TENSOR), Slot("b", OTHER)
    try:
        signature, hints = inspect.signature(target), get_type_hints(target)
    except (TypeError, ValueError, NameError):  # of a user's function: it need not say what it takes
        return None
    parameters = signature.parameters.values()
    if any(each.kind in (each.VAR_POSITIONAL, each.VAR_KEYWORD) for each in parameters):
        return None
    return tuple(
        Slot(
            each.name,
            _kind(hints.get(each.name)),
            each.default is each.empty,
            "None" in str(hints.get(each.name)),
            each.kind is each.KEYWORD_ONLY,
        )
        for each in parameters
    )


def _of_schema(each: Any) -> Slot:
    words = str(each.type)
    kind = OTHER if "Tensor" not in words else TENSORS if "List" in words else TENSOR
    return Slot(each.name, kind, not each.has_default_value(), "Optional" in words, each.kwarg_only)


def _kind(hint: Any) -> str:
    """What an annotation says."""
    if hint is None or hint is Any:
        return ANY
    words = str(hint)
    if "Tensor" not in words:
        return NUMBER if hint is int else NUMBERS if words.endswith(("Sequence[int]", "Sequence[int]]")) else OTHER
    return TENSOR if hint is torch.Tensor or "None" in words else TENSORS


def _number(arg: Any) -> bool:
    return not isinstance(arg, (*NESTS, float, fx.Node))


def _numbers(arg: Any) -> bool:
    """Whether it is a nest of lists of whole numbers."""
    return isinstance(arg, (list, tuple)) and all(_numbers(each) or _number(each) for each in arg)


def _holds_a_node(arg: Any) -> bool:
    if isinstance(arg, (list, tuple)):
        return any(map(_holds_a_node, arg))
    if isinstance(arg, slice):
        return any(map(_holds_a_node, (arg.start, arg.stop, arg.step)))
    return isinstance(arg, fx.Node)
