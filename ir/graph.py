"""The program: a small SSA graph, the same before and after every pass.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42

A :class:`Graph` has inputs (parameters, buffers, the arguments of the model, constants), nodes in an order that
can be executed, and outputs (results, loss, gradients, new buffer contents). It is changed through
:class:`Rewriter` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch

from .mesh import Mesh
from .repeat import Repeat
from .spec import Spec, TensorType


class Phase(StrEnum):
    FORWARD = "forward"
    BACKWARD = "backward"
    UPDATE = "update"


@dataclass(frozen=True, slots=True)
class Where:
    """Where a node comes from in the user's own code."""

    module: str = ""
    file: str = ""
    line: int = 0
    code: str = ""

    def __str__(self) -> str:
        name = self.file.rsplit("/", 1)[-1]
        return "  ".join(part for part in (self.module, f"{name}:{self.line}" if name else "") if part)


NOWHERE = Where()


@dataclass(frozen=True, slots=True)
class Strategy:
    """How a node is computed: the spec it needs of each tensor operand and gives to each result.

    ``cuts`` says which factor of the op's rule is cut over which axes.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    cuts: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(eq=False, slots=True)
class Value:
    """One tensor of the program: result ``index`` of ``node``, or (``node`` is None) an input of the graph."""

    type: TensorType
    node: Node | None = None
    index: int = 0
    name: str = ""
    spec: Spec | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def where(self) -> Where:
        return self.node.where if self.node is not None else Where(module=self.name)

    def local_bytes(self, mesh: Mesh) -> int:
        """What the rank that holds most of the value holds of it (in one turn)."""
        numel = self.spec.local_numel(self.shape, mesh) if self.spec is not None else self.type.numel
        return numel * self.type.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name or '?'}"


@dataclass(eq=False, slots=True)
class Node:
    """One application of an op. ``args`` and ``kwargs`` nest Values in lists and tuples, as the op's schema does."""

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value | None] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    where: Where = NOWHERE
    stage: int | None = None
    strategy: Strategy | None = None
    why: str = ""

    @property
    def operands(self) -> list[Value]:
        """The tensors that go in, in the order of the arguments (a value that is used twice stands twice)."""
        found: list[Value] = []
        _collect(self.args, found)
        if self.kwargs:
            _collect(tuple(self.kwargs.values()), found)
        return found

    @property
    def outs(self) -> list[Value]:
        """The results that are tensors."""
        return [value for value in self.results if value is not None]

    @property
    def name(self) -> str:
        return self.outs[0].name if self.outs else op_name(self.op)

    def __repr__(self) -> str:
        return f"<{op_name(self.op)} {', '.join(map(repr, self.outs))}>"


def _collect(args: Iterable[Any], found: list[Value]) -> None:
    for arg in args:
        if isinstance(arg, Value):
            found.append(arg)
        elif isinstance(arg, (list, tuple)):
            _collect(arg, found)


def substitute(arg: Any, change: Callable[[Value], Any]) -> Any:
    """The same nest of arguments with every Value changed."""
    if isinstance(arg, Value):
        return change(arg)
    if isinstance(arg, (list, tuple)):
        return type(arg)(substitute(a, change) for a in arg)
    return arg


class InputKind(StrEnum):
    PARAMETER = "parameter"
    BUFFER = "buffer"
    ARGUMENT = "argument"
    TARGET = "target"
    CONSTANT = "constant"
    SEED = "seed"


@dataclass(eq=False, slots=True)
class Input:
    """An input of the graph. ``name`` is the model's own (``layers.0.w1.weight``, ``args.0``, ``targets.0``)."""

    kind: InputKind
    name: str
    value: Value
    constant: torch.Tensor | None = None


class OutputKind(StrEnum):
    RESULT = "result"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"


@dataclass(eq=False, slots=True)
class Output:
    """An output of the graph: a result of the model, its loss, a parameter's gradient, or a buffer's new content."""

    kind: OutputKind
    name: str
    value: Value


@dataclass(eq=False)
class Graph:
    """A program on a mesh. ``str(graph)`` is its legal, parseable text (see :mod:`shardfx.ir.text.printer`).

    ``repeats`` are the equal blocks that are left out of it (see :mod:`.unfold`).
    """

    mesh: Mesh
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    established: frozenset[str] = frozenset()
    repeats: tuple[Repeat, ...] = ()

    def values(self) -> Iterator[Value]:
        """Every value, in the order of definition."""
        for given in self.inputs:
            yield given.value
        for node in self.nodes:
            yield from node.outs

    def users(self) -> dict[Value, list[Node]]:
        """For every value the nodes that use it, each node once, in order."""
        users: dict[Value, list[Node]] = {value: [] for value in self.values()}
        for node in self.nodes:
            for value in dict.fromkeys(node.operands):
                users[value].append(node)
        return users

    def input(self, name: str) -> Input:
        return next(given for given in self.inputs if given.name == name)

    def of_kind(self, kind: InputKind) -> list[Input]:
        return [given for given in self.inputs if given.kind is kind]

    def rename(self) -> None:
        """Give every node's values the names %0, %1, ... in order; inputs keep theirs."""
        number = 0
        for node in self.nodes:
            for value in node.outs:
                value.name = str(number)
                number += 1

    def copy(self) -> Graph:
        """Another graph of the same content; types, specs and sources are shared, being frozen."""
        values: dict[Value, Value] = {}

        def twin(value: Value, node: Node | None) -> Value:
            values[value] = Value(value.type, node, value.index, value.name, value.spec)
            return values[value]

        inputs = [Input(g.kind, g.name, twin(g.value, None), g.constant) for g in self.inputs]
        nodes = []
        for old in self.nodes:
            new = Node(old.op, (), {}, [], old.phase, old.where, old.stage, old.strategy, old.why)
            new.args = substitute(old.args, values.__getitem__)
            new.kwargs = {k: substitute(a, values.__getitem__) for k, a in old.kwargs.items()}
            new.results = [None if v is None else twin(v, new) for v in old.results]
            nodes.append(new)
        outputs = [Output(o.kind, o.name, values[o.value]) for o in self.outputs]
        return Graph(self.mesh, inputs, nodes, outputs, self.established, self.repeats)

    def __str__(self) -> str:
        from shardfx.ir.text.printer import print_graph

        return print_graph(self)


def op_name(op: Any) -> str:
    """``aten.mm``, ``aten.add.Tensor``, ``comm.all_reduce``: the default overload's name is left out."""
    if isinstance(op, torch._ops.OpOverload):
        namespace, name = op.name().split("::")
        return f"{namespace}.{name}"
    return str(op)
