"""Graph construction node by node; result types are inferred by running each op on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from .graph import Graph, Input, InputKind, Node, Phase, Value, Where, substitute
from .mesh import Mesh
from .spec import TensorType

aten = torch.ops.aten
MOVES = (
    aten.view.default,
    aten.t.default,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
)

Call = tuple[Any, tuple[Any, ...], dict[str, Any]]
"""An op and its arguments."""


class GraphBuilder:
    """Appends nodes to a graph, and merges equal ones (common subexpressions)."""

    def __init__(self, mesh: Mesh) -> None:
        self.graph = Graph(mesh)
        self.env: dict[torch.fx.Node, Any] = {}
        self.where = Where()
        self.phase = Phase.FORWARD
        self.seed: Value | None = None
        self.random, self.shared = 0, False
        self.drawn: dict[Value, Call] = {}
        """What stands for random numbers of torch's, and by which call torch draws them."""
        self._moves: dict[Any, Any] = {}

    def add(self, op: Any, args: tuple[Any, ...], types: Any = None, **kwargs: Any) -> Any:
        """Append a node; returns its one result, or the list of them. Types are inferred unless passed.

        A view or transpose, or what is ``shared``, that is there already is used again: what is made of it (a gathered
        copy, say) is then made once.
        """
        if op in MOVES or self.shared:
            key = (op, *(id(a) if isinstance(a, Value) else repr(a) for a in args), repr(kwargs))
            if key not in self._moves:
                self._moves[key] = self._append(op, args, types, kwargs)
            return self._moves[key]
        return self._append(op, args, types, kwargs)

    def _append(self, op: Any, args: tuple[Any, ...], types: Any, kwargs: dict[str, Any]) -> Any:
        if types is None:
            types = infer(op, args, kwargs)
        node = Node(op, args, kwargs, phase=self.phase, where=self.where)
        many = isinstance(types, list)
        node.results = [None if t is None else Value(t, node, i) for i, t in enumerate(types if many else [types])]
        self.graph.nodes.append(node)
        return node.results if many else node.results[0]

    def input(
        self,
        kind: InputKind,
        name: str,
        type: TensorType,
        constant: torch.Tensor | None = None,
        dim_order: tuple[int, ...] = (),
    ) -> Value:
        """A new input of the graph, behind the others; returns its value."""
        value = Value(type, None, 0, name)
        self.graph.inputs.append(Input(kind, name, value, constant, dim_order=dim_order))
        return value


def infer(
    op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: str = "meta"
) -> TensorType | list[TensorType | None]:
    """The type(s) of an op's result, by running it without numbers: on ``meta``, or as if on another device.

    They are the same but for a few ops, whose kernels leave out of some results what they have no use for.
    """

    def empty(value: Value) -> torch.Tensor:
        return torch.empty(value.shape, dtype=value.type.dtype, device=device)

    with nullcontext() if device == "meta" else FakeTensorMode():
        values = {k: substitute(a, empty) for k, a in kwargs.items()}
        if makes_of_nothing(op):
            values["device"] = device
        out = op(*substitute(args, empty), **values)
    types: TensorType | list[TensorType | None] = types_of(out)
    return types


def types_of(out: Any) -> Any:
    """The :class:`TensorType` of a tensor, those of a list or tuple of them, and None of anything else."""
    if isinstance(out, torch.Tensor):
        return TensorType(tuple(int(s) for s in out.shape), out.dtype)
    if isinstance(out, (tuple, list)):
        return [types_of(o) for o in out]
    return None


@cache
def makes_of_nothing(op: Any) -> bool:
    """Whether the op is a factory, whose result lies on no operand's device: ``full``, ``arange``."""
    if not isinstance(op, torch._ops.OpOverload):
        return False
    schema = op._schema.arguments
    return any(each.name == "device" for each in schema) and not any("Tensor" in str(each.type) for each in schema)


def trace_on_meta(function: Callable[..., Any], types: Iterable[TensorType]) -> torch.fx.GraphModule:
    """The ops of ``function`` on tensors of these types on ``meta``."""
    fake = [torch.empty(type.shape, dtype=type.dtype, device="meta") for type in types]
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):  # or torch makes one for each value
        return make_fx(function, tracing_mode="real")(*fake)
