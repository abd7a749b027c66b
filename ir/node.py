"""Nodes and values of the graph IR.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42

A :class:`Node` applies an op to :class:`Value` s and makes others. Placements stand on the values, and on the node as
its :class:`Strategy`: how it is computed, what it needs and gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any

import torch

from .mesh import Mesh
from .spec import Spec, TensorType


class Phase(StrEnum):
    """The part of a step that a node belongs to."""

    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Where:
    """The origin of a node in the user's own code."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return "  ".join(part for part in (self.module, f"{name}:{self.line}" if name else "") if part)


NOWHERE = Where()


FactorAxes = tuple[tuple[str, tuple[str, ...]], ...]
"""Which factor of an op's rule is sharded over which axes, major first."""


def factors_text(shardings: FactorAxes) -> str:
    """``n{tp} m{}``, or ``-`` where nothing is sharded."""
    return " ".join(f"{factor}{{{','.join(axes)}}}" for factor, axes in shardings) or "-"


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a node is computed: the spec it needs of each tensor operand and gives to each result.

    ``shardings`` says which factor of the op's rule is sharded over which axes.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    shardings: FactorAxes = ()


@dataclass(frozen=True, slots=True)
class Pin:
    """A sharding pinned on a node: the axes of some factors of its rule (none: replicated), and ``by`` whom.

    ``op`` is the op that this is said of where that is a part of the node's: ``aten.mm`` of an ``addmm``.
    """

    shardings: FactorAxes
    by: str
    op: str = ""


Attr = int | float | bool | str
"""What an attribute of a node may be."""


@dataclass(eq=False, slots=True)
class Value:
    """One tensor of the program: result ``index`` of ``node``, or (``node`` is None) an input of the graph.

    ``spec`` is how it is placed, once that is decided. ``hint`` is how somebody wants it to be used, and ``hinted_by``
    who: the hint's pattern, or a pass. A value that a node makes then has it; of a parameter ``spec`` says how it
    is stored and ``hint`` how it computes.
    """

    type: TensorType
    node: Node | None = None
    index: int = 0
    name: str = ""
    spec: Spec | None = None
    hint: Spec | None = None
    hinted_by: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.type.shape

    @property
    def where(self) -> Where:
        """The source of its node; of an input its name."""
        return self.node.where if self.node is not None else Where(module=self.name)

    def copied(self, node: Node | None) -> Value:
        """A copy of the value, as a result of another node."""
        return Value(self.type, node, self.index, self.name, self.spec, self.hint, self.hinted_by)

    def local_bytes(self, mesh: Mesh) -> int:
        """The bytes of the largest shard (in one iteration)."""
        numel = self.spec.local_numel(self.shape, mesh) if self.spec is not None else self.type.numel
        return numel * self.type.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name or '?'}"


@dataclass(eq=False, slots=True)
class Node:
    """One application of an op. ``args`` and ``kwargs`` nest Values in lists and tuples, as the op's schema does.

    ``at`` are the stages of a pipeline in which it is done; none: in all of them.
    ``attrs`` are a pass's own remarks (``{"lane": 1}``): the text, copies and rewrites keep them, and no op reads them.
    ``pin`` is how somebody wants it to be sharded. ``made_by`` is the pass that made the node, "" for capture; ``why``
    says why, in words.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value | None] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    where: Where = NOWHERE
    at: tuple[int, ...] = ()
    strategy: Strategy | None = None
    pin: Pin | None = None
    why: str = ""
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    made_by: str = ""

    @property
    def operands(self) -> list[Value]:
        """The tensor operands, in the order of the arguments (a value that is used twice stands twice)."""
        found: list[Value] = []
        for arg in self.args:
            if isinstance(arg, Value):
                found.append(arg)
            elif isinstance(arg, (list, tuple)):
                _collect(arg, found)
        if self.kwargs:
            _collect(self.kwargs.values(), found)
        return found

    @property
    def outs(self) -> list[Value]:
        """The tensor results."""
        return [value for value in self.results if value is not None]

    @property
    def name(self) -> str:
        """The name of its first result."""
        return self.outs[0].name if self.outs else op_name(self.op)

    def blank(self, where: Where) -> Node:
        """A copy of the node with fresh results and provenance, and without arguments yet."""
        new = Node(self.op, (), {}, where=where, attrs=dict(self.attrs))
        for name in KEPT:
            setattr(new, name, getattr(self, name))
        new.results = [None if v is None else v.copied(new) for v in self.results]
        return new

    def fill(self, old: Node, change: Callable[[Value], Any]) -> None:
        """Set the arguments to those of ``old``, each value mapped."""
        self.args = substitute(old.args, change)
        if old.kwargs:
            self.kwargs = {key: substitute(arg, change) for key, arg in old.kwargs.items()}

    def copied(self, change: Callable[[Value], Any]) -> Node:
        """A copy of the node with fresh results, its operands mapped by ``change``."""
        new = self.blank(self.where)
        new.fill(self, change)
        return new

    def __repr__(self) -> str:
        return f"<{op_name(self.op)} {', '.join(map(repr, self.outs))}>"


KEPT = tuple(f.name for f in fields(Node) if f.name not in ("op", "args", "kwargs", "results", "where", "attrs"))
"""What another node of the same content has as it is."""


def _collect(args: Iterable[Any], found: list[Value]) -> None:
    for arg in args:
        if isinstance(arg, Value):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            _collect(arg, found)


def substitute(arg: Any, change: Callable[[Value], Any]) -> Any:
    """A nest of arguments with every Value mapped by a function."""
    if isinstance(arg, Value):
        return change(arg)
    if isinstance(arg, tuple):
        return tuple([substitute(a, change) for a in arg])
    if isinstance(arg, list):
        return [substitute(a, change) for a in arg]
    return arg


def op_name(op: Any) -> str:
    """``aten.mm``, ``aten.add.Tensor``, ``comm.all_reduce``: the default overload's name is left out."""
    if isinstance(op, torch._ops.OpOverload):
        namespace, name = op.name().split("::")
        return f"{namespace}.{name}"
    return str(op)


@cache
def _slot(op: Any, name: str) -> int | None:
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "shardfx":
        return None
    return next((i for i, each in enumerate(op._schema.arguments) if each.name == name), None)


def draw_slot(node: Node) -> int | None:
    """The argument that numbers the draw of a random op of ours; None for any other op."""
    slot = _slot(node.op, "number")
    return slot if slot is not None and slot < len(node.args) else None
