"""A graph in other sizes of its dims: types, placements, and arguments that name a size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import torch

from shardfx.ir.builder import makes_of_nothing
from shardfx.ir.cut import Cut, Part
from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.graph import Graph, Node, Value, substitute
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.spec import Spec, TensorType

from .sizes import TRIES, Sizes, Unfit

aten = torch.ops.aten

MANY = 1 << 20
"""An op on more elements is tried on ``meta``."""


def placed(sizes: Sizes, value: Value, spec: Spec) -> Spec:
    """The placement of a value, with the new sizes of sub-dims."""
    cuts = []
    for key, cut in zip(sizes.dims(value), spec.dims, strict=True):
        if not cut.parts:
            cuts.append(cut)
            continue
        sized = [Part(math.prod(map(sizes.of, leaves)), part.axes) for part, leaves in sizes.parts(key, cut)]
        cuts.append(Cut(cut.axes, tuple(sized)))
    return Spec(tuple(cuts), spec.partial)


def small_graph(sizes: Sizes, graph: Graph) -> Graph:
    """The graph in the new sizes."""
    made = graph.copy()
    for old, new in zip(graph.values(), made.values(), strict=True):
        shape = tuple(sizes.of(key) for key in sizes.dims(old))
        new.type = TensorType(shape, old.type.dtype)
        new.spec = None if old.spec is None else placed(sizes, old, old.spec)
    for node, twin in zip(graph.nodes, made.nodes, strict=True):
        if node.strategy is not None:
            pairs = (
                tuple(placed(sizes, v, s) for v, s in zip(values, specs, strict=True))
                for values, specs in ((node.operands, node.strategy.operands), (node.outs, node.strategy.results))
            )
            operands, results = pairs
            twin.strategy = type(node.strategy)(operands, results, node.strategy.cuts)
        if isinstance(node.op, OwnOp):
            if "view" in node.kwargs:
                groups = sizes.grouped(node.kwargs["view"], sizes.dims(node.operands[0]))
                view = tuple(math.prod(map(sizes.of, group)) for group in groups)
                twin.kwargs = {**twin.kwargs, "view": type(node.kwargs["view"])(view)}
        else:
            _arguments(sizes, node, twin)
    return made


def _arguments(sizes: Sizes, node: Node, twin: Node) -> None:
    """Arguments that are sizes of dims: where dims of one size get several, those that the op takes."""
    entry = sizes.book.entry(node.op)
    keys = [key for v in [*node.outs, *node.operands] for key in sizes.dims(v)]
    new_sizes: dict[int, list[int]] = {}
    for key in keys:
        if sizes.size[key] > 1:
            new_sizes.setdefault(sizes.size[key], []).append(sizes.of(key))
    open_ = {size: list(dict.fromkeys(new)) for size, new in new_sizes.items()}
    args, kwargs = twin.args, twin.kwargs
    for chosen in itertools.islice(itertools.product(*open_.values()), TRIES):
        change = dict(zip(open_, chosen, strict=True))
        twin.args = _changed(args, change)
        twin.kwargs = {k: _changed(a, change) for k, a in kwargs.items()}
        if entry is not None and entry.shape_arg is not None and entry.shape_arg < len(node.args):
            at = entry.shape_arg
            twin.args = (*twin.args[:at], list(twin.outs[0].shape), *twin.args[at + 1 :])
        if _runs(twin):
            return
    raise Unfit(keys)


def _runs(node: Node) -> bool:
    """Whether the op gives results of the shapes that it should: on zeros, and where these are many on ``meta``."""
    device = "cpu" if sum(v.type.numel for v in [*node.operands, *node.outs]) <= MANY else "meta"

    def fake(value: Value) -> torch.Tensor:
        return torch.zeros(value.shape, dtype=value.type.dtype, device=device)

    op = aten.reshape.default if node.op is aten.view.default else node.op
    kwargs = {k: substitute(a, fake) for k, a in node.kwargs.items()}
    if makes_of_nothing(op):
        kwargs["device"] = torch.device(device)
    try:
        out = op(*substitute(node.args, fake), **kwargs)
    except DOES_NOT_RUN:
        return False
    results = out if isinstance(out, (tuple, list)) else [out]
    pairs = zip(node.results, results, strict=False)
    return all(value is None or tuple(result.shape) == value.shape for value, result in pairs)


def _changed(arg: Any, sizes: Mapping[int, int]) -> Any:
    """An argument with other sizes."""
    if isinstance(arg, (list, tuple)):
        return type(arg)(_changed(a, sizes) for a in arg)
    return sizes.get(arg, arg) if isinstance(arg, int) and not isinstance(arg, bool) else arg
