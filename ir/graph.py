"""The graph IR: a small SSA graph, of one form before and after every pass.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42

A :class:`Graph` has inputs (parameters, buffers, the arguments of the model, constants), nodes in an order that
can be executed, and outputs (results, loss, gradients, new buffer contents). It is changed through
:class:`Rewriter` only.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from shardfx.ir.schedule.actions import Pipelined

from .mesh import Mesh
from .node import NOWHERE, Attr, FactorAxes, Node, Phase, Pin, Strategy, Value, Where, factors_text, op_name, substitute
from .reasons import Reasons
from .repeat import Repeat
from .spec import Spec

__all__ = [
    "NOWHERE",
    "Attr",
    "FactorAxes",
    "Graph",
    "Guard",
    "Input",
    "InputKind",
    "Node",
    "Output",
    "OutputKind",
    "Phase",
    "Pin",
    "Strategy",
    "Value",
    "Where",
    "factors_text",
    "op_name",
    "substitute",
]


class InputKind(StrEnum):
    """The role of a graph input. A state is one of the optimizer, an option a scheduled number of it (the rate)."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ARGUMENT = "argument"
    TARGET = "target"
    CONSTANT = "constant"
    SEED = "seed"
    STATE = "state"
    OPTION = "option"

    @property
    def is_of_optimizer(self) -> bool:
        """Whether it belongs to the optimizer, so that no hint names it."""
        return self in (InputKind.STATE, InputKind.OPTION)


@dataclass(eq=False, slots=True)
class Input:
    """An input of the graph. ``name`` is the model's own (``layers.0.w1.weight``, ``args.0``, ``targets.0``).

    ``aliases`` are the model's other names of the same tensor (a tied weight). ``pool`` is what it lies in where it is
    not the device's memory: ``"host"``, ``"disk"``, or ``"disk:FOLDER"``. ``at`` are the stages of a pipeline that have
    it; none: all. ``dim_order``: its dims from the slowest to the fastest in memory (``(0, 2, 3, 1)``: channels last);
    none: row by row.
    """

    kind: InputKind
    name: str
    value: Value
    constant: torch.Tensor | None = None
    aliases: tuple[str, ...] = ()
    pool: str = ""
    at: tuple[int, ...] = ()
    dim_order: tuple[int, ...] = ()


class OutputKind(StrEnum):
    """The role of a graph output."""

    RESULT = "result"
    LOSS = "loss"
    GRADIENT = "gradient"
    BUFFER = "buffer"
    PARAMETER = "parameter"
    STATE = "state"
    GUARD = "guard"
    OVERFLOW = "overflow"
    """The number of rows for which a step has no room: it is run again with more."""
    ROWS = "rows"
    """The rows of an embedding table that a step looks up, where its gradient is sparse; negative: none."""

    @property
    def is_kept(self) -> bool:
        """Whether it is the new content of the input of the same name."""
        return self is OutputKind.BUFFER or self.is_stepped

    @property
    def is_stepped(self) -> bool:
        """Whether it is updated by an optimizer's step: it may overwrite the input of its name."""
        return self in (OutputKind.PARAMETER, OutputKind.STATE)

    @property
    def is_given_away(self) -> bool:
        """Whether it needs memory of its own, as its receiver may write into it, or into the inputs."""
        return self is OutputKind.GRADIENT or self.is_kept

    @property
    def leaves_replicated(self) -> bool:
        """Whether it is returned replicated."""
        return self in (OutputKind.LOSS, OutputKind.GUARD, OutputKind.OVERFLOW, OutputKind.ROWS)


@dataclass(frozen=True, slots=True)
class Guard:
    """A guard: a value on which the model's code branched, and what it was for the example.

    The program is the model for data that give the same. ``expected`` is what ``tolist()`` of the value gives; guards
    ``of_loss`` stand in the loss, and do not concern the model's results. ``op`` is who would have raised: then it is
    what that op wants of any data.
    """

    expected: Any
    where: Where = NOWHERE
    of_loss: bool = False
    op: str = ""

    def concerns(self, kinds: Container[OutputKind]) -> bool:
        """Whether the guard is in effect for programs of outputs of these kinds."""
        return not self.of_loss or OutputKind.LOSS in kinds or OutputKind.GRADIENT in kinds

    def holds(self, value: torch.Tensor) -> bool:
        """Whether the guard holds for a value: equal, floats up to rounding in another order of summation."""
        expected = torch.tensor(self.expected, dtype=value.dtype).reshape(value.shape)
        if not value.dtype.is_floating_point:
            return torch.equal(value, expected)
        slack = torch.finfo(value.dtype).eps ** (2 / 3)
        return torch.allclose(value, expected, rtol=slack, atol=slack, equal_nan=True)


@dataclass(eq=False, slots=True)
class Output:
    """An output of the graph: a result of the model, its loss, a parameter's gradient, the new content of a buffer, a
    parameter or a state of its optimizer, or a value that a ``guard`` watches.

    ``spec`` is the placement in which it must leave the program; None while that is not known.
    """

    kind: OutputKind
    name: str
    value: Value
    spec: Spec | None = None
    guard: Guard | None = None


@dataclass(eq=False)
class Graph:
    """A program on a mesh. ``str(graph)`` is its legal, parseable text (see :mod:`shardfx.ir.text.printer`).

    ``established`` is what passes have brought about, ``notes`` what capture and passes have to say to the user,
    ``repeats`` the equal blocks that are left out (see :mod:`.repeat`), ``reasons`` why values are sharded as they are,
    ``pipeline`` where its stages lie and what they do when, where it has some.
    """

    mesh: Mesh
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    established: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    repeats: tuple[Repeat, ...] = ()
    reasons: Reasons = field(default_factory=Reasons)
    pipeline: Pipelined | None = None

    def is_here(self, at: Sequence[int], coords: Mapping[str, int]) -> bool:
        """Whether the rank at ``coords`` belongs to one of the stages."""
        return self.pipeline is None or self.pipeline.is_here(at, coords)

    def values(self) -> Iterator[Value]:
        """Every value, in the order of definition."""
        for inp in self.inputs:
            yield inp.value
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
        return next(inp for inp in self.inputs if inp.name == name)

    @property
    def aliases(self) -> dict[str, str]:
        """Every name of every input (tied ones have several), with the name under which the graph has it."""
        return {name: inp.name for inp in self.inputs for name in (inp.name, *inp.aliases)}

    def output_specs(self) -> dict[Output, Spec]:
        """The required placement of each output: as it says; or else a gradient and new content as their input is
        stored, a loss and a guard replicated, a result as it is made, and nothing partial."""
        stored = {inp.name: inp.value.spec for inp in self.inputs}
        found: dict[Output, Spec] = {}
        for output in self.outputs:
            made = output.value.spec
            spec = stored.get(output.name) if output.kind.is_given_away else None
            if spec is None:
                full = output.kind.leaves_replicated or made is None
                spec = Spec.replicated(output.value.type.ndim) if full or made is None else made.reduced()
            found[output] = output.spec or spec
        return found

    def of_kind(self, kind: InputKind) -> list[Input]:
        """The inputs of one kind, in order."""
        return [inp for inp in self.inputs if inp.kind is kind]

    def rename(self) -> None:
        """Renumber the values of all nodes %0, %1, ... in order; inputs keep their names."""
        number = 0
        for node in self.nodes:
            for value in node.outs:
                value.name = str(number)
                number += 1

    def copy(self) -> Graph:
        """A copy of the graph; types, specs and sources, which are frozen, are shared."""
        values: dict[Value, Value] = {}
        inputs = []
        for inp in self.inputs:
            value = values[inp.value] = inp.value.copied(None)
            inputs.append(replace(inp, value=value))
        nodes = []
        for old in self.nodes:
            new = old.copied(values.__getitem__)
            values.update(zip(old.outs, new.outs, strict=True))
            nodes.append(new)
        outputs = [Output(o.kind, o.name, values[o.value], o.spec, o.guard) for o in self.outputs]
        reasons = self.reasons.moved(lambda value: values.get(value, value))
        return Graph(
            self.mesh, inputs, nodes, outputs, self.established, list(self.notes), self.repeats, reasons, self.pipeline
        )

    def __str__(self) -> str:
        from .text.printer import print_graph  # which knows graphs

        return print_graph(self)
