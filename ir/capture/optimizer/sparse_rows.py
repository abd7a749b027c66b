"""Sparse gradients of embedding tables: a step of the rows that were looked up, and of no others.

``nn.Embedding(sparse=True)`` gives a gradient of ids and rows, and an optimizer that takes it (SparseAdam, Adagrad,
SGD) steps these rows and their states. Its code is traced as if all rows were there, and what no id names is kept:

    %8 = aten.embedding_dense_backward(%7, %ids, 8000, -1, False)
    %9 = aten.full([64, 1], 1.0), %10 = aten.embedding_dense_backward(%9, %ids, ...), %11 = aten.gt.Scalar(%10, 0)
    %20 = aten.add.Tensor(%w, ...), %21 = aten.where.self(%11, %20, %w)             a new parameter

Without an optimizer in the program a gradient is dense, and the program gives the ids beside it (``OutputKind.ROWS``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.graph import Graph, InputKind, Node, Output, OutputKind, Phase, Value
from shardfx.ir.ops.traits import is_cast, with_defaults

aten = torch.ops.aten
SPARSE = "sparse"
"""Among the options of a step: its gradient is one of rows."""
BY_IDS: dict[str, Any] = {
    "__getitem__": torch.clone,
    "__setitem__": Tensor.copy_,
    "index_select": lambda x, dim: x.clone(),
    "index_add_": lambda x, dim, rows, alpha=1: x.add_(rows, alpha=alpha),
    "index_copy_": lambda x, dim, rows: x.copy_(rows),
}
"""Ops that take the ids of rows, as they are where all rows are there."""
GRADIENT_OF: Any = vars(torch._C.TensorBase)["grad"].__get__
"""What reads the gradient of a tensor."""


def sparse_lookups(graph: Graph) -> dict[str, list[Node]]:
    """The lookups in each parameter that the forward uses by sparse ones alone."""
    users, found = graph.users(), dict[str, list[Node]]()
    for inp in graph.of_kind(InputKind.PARAMETER):
        uses = [user for user in users[inp.value] if user.phase is Phase.FORWARD]
        for node in uses:
            uses += users[node.outs[0]] if is_cast(node) else []
        lookups = [node for node in uses if not is_cast(node)]
        if lookups and all(node.op is aten.embedding.default and _given(node)["sparse"] for node in lookups):
            found[inp.name] = lookups
    return found


def _given(node: Node) -> dict[str, Any]:
    return with_defaults(node.op, node.args, node.kwargs)


# ---- the trace ----------------------------------------------------------------------------------------------------


class RowGradient:
    """What a step sees as its sparse gradient: the rows are all of its parameter, the ids are not looked at."""

    is_sparse = True

    def __init__(self, rows: Tensor) -> None:
        self._rows = rows

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented

    def __neg__(self) -> RowGradient:
        return RowGradient(-self._rows)

    def __getitem__(self, dim: int) -> RowGradient:
        """The ids of the rows, by which tensors are indexed."""
        return self

    def coalesce(self) -> RowGradient:
        """Itself: each row is there once."""
        return self

    def indices(self) -> RowGradient:
        """The ids: what stands for them."""
        return self

    def values(self) -> Tensor:
        """The rows."""
        return self._rows

    def new(self, ids: RowGradient, rows: Tensor, size: Sequence[int]) -> RowGradient:
        """Other rows of the same ids."""
        return RowGradient(rows)

    _indices, _values = indices, values

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rows, name)


class _RowsAsTensors(TorchFunctionMode):
    """Within, a parameter's gradient is sparse, and ops on what is sparse are those on its rows."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__()
        self._parameter = parameter

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if name == "sparse_coo_tensor":
            return RowGradient(args[1])
        if name == "sparse_mask":
            return RowGradient(args[0].clone())
        if any(isinstance(each, RowGradient) for each in args[1:-1] or args[1:]) and name in BY_IDS:
            return BY_IDS[name](*(each for each in args if not isinstance(each, RowGradient)), **kwargs)
        args, kwargs = tree_map_only(RowGradient, lambda each: each.values(), (args, kwargs))
        found = func(*args, **kwargs)
        is_gradient = func == GRADIENT_OF and args[0] is self._parameter
        return RowGradient(found) if is_gradient and found is not None else found


def options_to_try(options: Mapping[str, Any], sparse: bool) -> list[dict[str, Any]]:
    """Further options by which a step may be traced, in order."""
    kind = {SPARSE: True} if sparse else {}
    return [kind, {**kind, "capturable": True}] if "capturable" in options else [kind]


@contextmanager
def sparse_gradient(parameter: Tensor, options: Mapping[str, Any]) -> Iterator[None]:
    """Within, the gradient of a parameter is sparse, where the options of its step say so; a root of a number that is
    traced is traced."""
    if SPARSE not in options:
        yield
        return
    root = math.sqrt
    math.sqrt = lambda x: torch.sqrt(x) if isinstance(x, Tensor) else root(x)  # type: ignore[assignment, return-value]
    try:
        with _RowsAsTensors(parameter):
            yield
    finally:
        math.sqrt = root


# ---- the update ---------------------------------------------------------------------------------------------------


def step_rows(
    builder: GraphBuilder, lookups: Sequence[Node], before: Sequence[Value], after: Sequence[Value]
) -> list[Value]:
    """The new contents of a parameter and its states, where only rows are stepped that lookups name."""
    if not lookups:
        return [*after]
    touched: Value | None = None
    count = before[0].shape[0]
    for node in lookups:
        named = _given(node)
        ids = named["indices"]
        ones = builder.add(aten.full.default, ([*ids.shape, 1], 1.0), dtype=torch.float32)
        times = builder.add(aten.embedding_dense_backward.default, (ones, ids, count, named["padding_idx"], False))
        touched = times if touched is None else builder.add(aten.add.Tensor, (touched, times))
    mask = builder.add(aten.gt.Scalar, (touched, 0))
    flat = builder.add(aten.squeeze.dim, (mask, 1))
    return [
        builder.add(aten.where.self, (mask if old.type.ndim > 1 else flat, new, old), old.type)
        if old.shape[:1] == (count,) and new is not old
        else new
        for old, new in zip(before, after, strict=True)
    ]


def name_rows(graph: Graph) -> None:
    """Have a program give, beside each gradient that is sparse in eager PyTorch, the ids of its rows."""
    builder = GraphBuilder(graph.mesh)
    builder.graph, builder.phase = graph, Phase.BACKWARD
    trained = {output.name for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    tables = sparse_lookups(graph) if trained else {}
    for name in (name for name in tables if name in trained):
        found = list[Value]()
        for node in tables[name]:
            named, builder.where = _given(node), node.where
            ids, padding = named["indices"], named["padding_idx"]
            if padding >= 0:
                ids = builder.add(aten.masked_fill.Scalar, (ids, builder.add(aten.eq.Scalar, (ids, padding)), -1))
            found.append(ids)
        if len(found) > 1:
            flat = [builder.add(aten.view.default, (ids, [ids.type.numel])) for ids in found]
            found = [builder.add(aten.cat.default, (flat,))]
        graph.outputs.append(Output(OutputKind.ROWS, name, found[0]))
    graph.rename()


def row_counts(graph: Graph, name: str) -> Iterator[Node]:
    """The nodes that say in the step of a parameter which rows were looked up, each behind those that it uses."""
    for value in (each.value for each in graph.outputs if each.kind is OutputKind.PARAMETER and each.name == name):
        while value.node is not None and value.node.op is aten.where.self:
            mask, value = value.node.operands[:2]
            found, todo = list[Node](), [mask.node if mask.shape[1:] == (1,) else None]
            while todo:
                node = todo.pop()
                if node is not None:
                    found.append(node)
                    todo += [] if node.op is aten.embedding_dense_backward.default else [v.node for v in node.operands]
            yield from reversed(found)
