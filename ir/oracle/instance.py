"""An op instance: a node with its input tensors, so that it can be run, on one device and on shards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.ir.builder import types_of
from shardfx.ir.graph import Node, Value, substitute
from shardfx.ir.rules.local import TARGETS
from shardfx.ir.spec import TensorType

aten = torch.ops.aten
Results = list[torch.Tensor | None]
Place = tuple[Any, ...]
"""The path of an argument in nested lists, as in torch's pytrees."""
TRUSTING = {
    *(aten.lu_unpack, aten.linalg_lu_solve, aten.linalg_ldl_solve),
    *(aten.segment_reduce, aten._segment_reduce_backward),
}
"""Ops whose kernels do not check that shapes agree: only joint shardings of all operands' batch dims are tried."""
UNCHECKED = {aten._unsafe_masked_index, aten._unsafe_masked_index_put_accumulate, aten._unsafe_index, *TRUSTING}
"""Ops whose kernels do not check their arguments, as most backward ones. For an op with a decomposition, each candidate
is tried on that first, as it does check; else indices are made 0 or 1 (valid in every shard), and shapes must
agree."""


@dataclass(frozen=True, eq=False)
class Instance:
    """An op instance: a node, and a tensor for each of its operands."""

    node: Node
    tensors: tuple[torch.Tensor, ...]

    def on(self, tensors: Sequence[torch.Tensor]) -> Instance:
        """The same node on other tensors."""
        return Instance(self.node, tuple(tensors))

    @cached_property
    def results(self) -> Results:
        """The results on one device: one entry per result of the op."""
        return self.call(self.tensors)

    def keep(self, results: Results) -> Results:
        """The op's results that the node has (others are unused)."""
        return [r for r, v in zip(results, self.node.results, strict=False) if v is not None]

    @cached_property
    def kept(self) -> Results:
        """The results on one device that the node has."""
        return self.keep(self.results)

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        change: Mapping[Place, Any] | None = None,
        op: Callable[..., Any] | None = None,
    ) -> Results:
        """Run the op (or ``op`` instead) on other tensors; ``change`` replaces other arguments by path."""
        args, kwargs = bind(self.node, tensors)
        args = replaced(args, change) if change else args
        return as_results(call(op or self.node.op, args, kwargs))

    def attempt(self, *args: Any, **kwargs: Any) -> Results | None:
        """The results of :meth:`call`; None if the op rejects these arguments."""
        try:
            return self.call(*args, **kwargs)
        except Exception:  # whatever a kernel says of its arguments
            return None

    def __repr__(self) -> str:
        return describe(self.node)


def bind(node: Node, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The node's arguments with ``tensors`` for its operands."""
    xs = iter(tensors)

    def take(_: Value) -> Any:
        return next(xs)

    args = substitute(node.args, take)
    return args, {k: substitute(a, take) for k, a in node.kwargs.items()}


def replaced(args: tuple[Any, ...], change: Mapping[Place, Any]) -> tuple[Any, ...]:
    """The arguments, with those at some paths replaced."""
    made: tuple[Any, ...] = pytree.tree_map_with_path(lambda place, arg: change.get(place, arg), args)
    return made


def call(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an op without recording it for autograd."""
    with torch.no_grad():
        return TARGETS.get(op, op)(*args, **kwargs)


def as_results(out: Any) -> Results:
    """The output of an op as a list, with None for each that is no tensor."""
    many = out if isinstance(out, (tuple, list)) else [out]
    return [each if isinstance(each, torch.Tensor) else None for each in many]


def instance(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> Instance:
    """The instance of an op called with these arguments: every tensor among them is an operand of its own.

    Example::

        instance(torch.ops.aten.mm.default, (torch.randn(4, 3), torch.randn(3, 2)))
    """
    tensors: list[torch.Tensor] = []

    def lift(arg: torch.Tensor) -> Value:
        tensors.append(arg.detach().clone(memory_format=torch.contiguous_format))
        return Value(TensorType(tuple(arg.shape), arg.dtype), name=f"x{len(tensors) - 1}")

    node = Node(op, *pytree.tree_map_only(torch.Tensor, lift, (tuple(args), dict(kwargs or {}))))
    made = Instance(node, tuple(tensors))
    types = [types_of(result) for result in made.results]
    node.results = [None if t is None else Value(t, node, i, f"y{i}") for i, t in enumerate(types)]
    return made


def keep_results(made: Node, node: Node) -> None:
    """Drop the results of a node that another node does not have."""
    made.results = [None if wanted is None else value for value, wanted in zip(made.results, node.results, strict=True)]


def numbers(args: Any) -> list[int | float]:
    """The numbers among nested arguments."""
    return [arg for arg in pytree.tree_leaves(args) if isinstance(arg, (int, float)) and not isinstance(arg, bool)]


def is_float(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor's dtype is floating-point or complex: only such may be partial sums."""
    return tensor is not None and (tensor.is_floating_point() or tensor.is_complex())


def describe(node: Node) -> str:
    """An op instance in one line: ``aten.mm.default(f64[4, 3], f64[3, 2])``."""

    def text(arg: Any) -> str:
        if isinstance(arg, Value):
            kind = {torch.float64: "f64", torch.float32: "f32", torch.int64: "i64", torch.bool: "b8"}
            return f"{kind.get(arg.type.dtype, str(arg.type.dtype).removeprefix('torch.'))}{list(arg.shape)}"
        if isinstance(arg, (list, tuple)):
            return f"[{', '.join(map(text, arg))}]"
        return repr(arg)

    parts = [text(a) for a in node.args] + [f"{k}={text(a)}" for k, a in node.kwargs.items()]
    return f"{node.op}({', '.join(parts)})"


def runs(of: Instance) -> bool:
    """Whether the op accepts these tensors."""
    try:
        return of.results is not None
    except Exception:  # whatever a kernel says of its arguments
        return False
