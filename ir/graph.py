"""The program: a small SSA graph, the same before and after every pass.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42

A :class:`Graph` has inputs (parameters, buffers, the arguments of the model, constants), nodes in an order that
can be executed, and outputs (results, loss, gradients, new buffer contents). It is changed through
:class:`Rewriter` only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar

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


Attr = int | float | bool | str
"""What an attribute of a node may be."""


@dataclass(eq=False, slots=True)
class Value:
    """One tensor of the program: result ``index`` of ``node``, or (``node`` is None) an input of the graph.

    ``spec`` is how it is placed, once that is decided. ``hint`` is how somebody wants it to be used, and ``hinted_by``
    who: the hint's pattern, or a pass. A value that a node makes is then held so; of a parameter ``spec`` says how it
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
        """The source of the node that makes it; of an input its name."""
        return self.node.where if self.node is not None else Where(module=self.name)

    def copied(self, node: Node | None) -> Value:
        """The same value as a result of another node."""
        return Value(self.type, node, self.index, self.name, self.spec, self.hint, self.hinted_by)

    def local_bytes(self, mesh: Mesh) -> int:
        """What the rank that holds most of the value holds of it (in one turn)."""
        numel = self.spec.local_numel(self.shape, mesh) if self.spec is not None else self.type.numel
        return numel * self.type.dtype.itemsize

    def __repr__(self) -> str:
        return f"%{self.name or '?'}"


@dataclass(eq=False, slots=True)
class Node:
    """One application of an op. ``args`` and ``kwargs`` nest Values in lists and tuples, as the op's schema does.

    ``attrs`` are a pass's own remarks (``{"lane": 1}``): the text, copies and rewrites keep them, and no op reads them.
    ``made_by`` is the pass that made the node, "" for capture; ``why`` says why, in words.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Value | None] = field(default_factory=list)
    phase: Phase = Phase.FORWARD
    where: Where = NOWHERE
    stage: int | None = None
    strategy: Strategy | None = None
    why: str = ""
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    made_by: str = ""

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
        """The name of its first result."""
        return self.outs[0].name if self.outs else op_name(self.op)

    def copied(self, change: Callable[[Value], Any]) -> Node:
        """Another node of the same content with fresh results, and ``change`` of each operand."""
        new = Node(self.op, substitute(self.args, change), {k: substitute(a, change) for k, a in self.kwargs.items()})
        for name in KEPT:
            setattr(new, name, getattr(self, name))
        new.attrs = dict(self.attrs)
        new.results = [None if v is None else v.copied(new) for v in self.results]
        return new

    def __repr__(self) -> str:
        return f"<{op_name(self.op)} {', '.join(map(repr, self.outs))}>"


KEPT = ("phase", "where", "stage", "strategy", "why", "made_by")
"""What a copy of a node has as it is, beside its op, arguments, results and attributes."""


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
    """What an input of a graph is to the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ARGUMENT = "argument"
    TARGET = "target"
    CONSTANT = "constant"
    SEED = "seed"


@dataclass(eq=False, slots=True)
class Input:
    """An input of the graph. ``name`` is the model's own (``layers.0.w1.weight``, ``args.0``, ``targets.0``).

    ``aliases`` are the model's other names of the same tensor (a tied weight).
    """

    kind: InputKind
    name: str
    value: Value
    constant: torch.Tensor | None = None
    aliases: tuple[str, ...] = ()


class OutputKind(StrEnum):
    """What an output of a graph is to the model."""

    RESULT = "result"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"


@dataclass(eq=False, slots=True)
class Output:
    """An output of the graph: a result of the model, its loss, a parameter's gradient, or a buffer's new content.

    ``spec`` is the placement in which it must leave the program; None while that is not known.
    """

    kind: OutputKind
    name: str
    value: Value
    spec: Spec | None = None


@dataclass(eq=False)
class Graph:
    """A program on a mesh. ``str(graph)`` is its legal, parseable text (see :mod:`shardfx.ir.text.printer`).

    ``established`` is what passes have brought about, ``notes`` what capture and passes have to say to the user.
    """

    printer: ClassVar[Callable[[Graph], str]]
    """Writes the text of a graph: :mod:`shardfx.ir.text`, which knows graphs, puts it here when it is imported."""

    mesh: Mesh
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    established: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)

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
        """The input of this name."""
        return next(given for given in self.inputs if given.name == name)

    @property
    def aliases(self) -> dict[str, str]:
        """Every name of every input, with the name under which the graph has it."""
        return {name: given.name for given in self.inputs for name in (given.name, *given.aliases)}

    def output_specs(self) -> dict[Output, Spec]:
        """The placement in which each output must leave: as it says; or else a gradient and a buffer's new content as
        their input is stored, a loss whole, a result as it is made, and nothing partial."""
        stored = {given.name: given.value.spec for given in self.inputs}
        found: dict[Output, Spec] = {}
        for output in self.outputs:
            made = output.value.spec
            spec = stored.get(output.name) if output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER) else None
            if spec is None:
                whole = output.kind is OutputKind.LOSS or made is None
                spec = Spec.whole(output.value.type.ndim) if whole or made is None else made.reduced()
            found[output] = output.spec or spec
        return found

    def of_kind(self, kind: InputKind) -> list[Input]:
        """The inputs of one kind, in order."""
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
        inputs = []
        for given in self.inputs:
            value = values[given.value] = given.value.copied(None)
            inputs.append(Input(given.kind, given.name, value, given.constant, given.aliases))
        nodes = []
        for old in self.nodes:
            new = old.copied(values.__getitem__)
            values.update(zip(old.outs, new.outs, strict=True))
            nodes.append(new)
        outputs = [Output(o.kind, o.name, values[o.value], o.spec) for o in self.outputs]
        return Graph(self.mesh, inputs, nodes, outputs, self.established, list(self.notes))

    def __str__(self) -> str:
        return Graph.printer(self)


def op_name(op: Any) -> str:
    """``aten.mm``, ``aten.add.Tensor``, ``comm.all_reduce``: the default overload's name is left out."""
    if isinstance(op, torch._ops.OpOverload):
        namespace, name = op.name().split("::")
        return f"{namespace}.{name}"
    return str(op)
