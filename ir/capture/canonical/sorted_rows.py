"""Experts that a model writes out, with rows sorted by expert and products by group, as torchtitan has them.

    order = argsort(ids.view(-1));  tokens = order // k;  ends = cumsum(histc(ids))
    rows = x[tokens]                                       or gather, index_select; scores.view(-1)[order]
    rows = grouped_mm(rows, w, offs=ends)                  and ops that compute each row alone
    zeros.scatter_add(0, tokens, rows)                     or index_add; zeros[order] = rows; rows[argsort(order)]

As products with routed rows (:mod:`shardfx.ir.ops.experts.routed_product`) of ``x[:, None]`` and ``ids`` they are in no
order, and tokens and experts are sharded as any others are. What of the rows is used otherwise stays as it is written.
"""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from shardfx.ir.context.mask_reader import write
from shardfx.ir.ops.experts.routed_product import routed_mm
from shardfx.ir.ops.traits import with_defaults

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.unsqueeze.default)
CASTS = (aten.to.dtype, aten._to_copy.default, aten.contiguous.default, aten.clone.default)
SORTS = (aten.argsort.default, aten.argsort.stable, aten.sort.default, aten.sort.stable)
DIVISIONS = (aten.floor_divide.default, aten.floor_divide.Scalar, aten.div.Scalar_mode, aten.div.Tensor_mode)
BY_DIM = {aten.slice.Tensor: 1, aten.chunk.default: 2, aten.split.Tensor: 2, aten.select.int: 1}
"""Ops of each row alone, where their dim is not the first: its place among the arguments."""
PRODUCTS = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")


class Routing(NamedTuple):
    """What is known of a node, by the ids ``[n k]``: ``flat`` ids, their ``order``, ``sorted`` ids, ``tokens``, the way
    ``back``, ``counts``, ``ends``; or ``rows`` in the order, of ``pairs`` ``[n k ..]`` or ``[n 1 ..]``."""

    kind: str
    ids: fx.Node
    pairs: Any = None


def route_sorted_rows(graph: fx.Graph) -> None:
    """Rewrite the experts of an exported graph that sort their rows."""
    reader = _SortedRows()
    for node in list(graph.nodes):
        found = reader.read(node) if node.op == "call_function" else None
        if found is not None:
            reader.known[node] = found
        elif node.op == "call_function":
            reader.put_back(node)


class _SortedRows:
    def __init__(self) -> None:
        self.known: dict[fx.Node, Routing] = {}

    def read(self, node: Any) -> Routing | None:
        """What is known of a node, by what is of its operands; nodes that put rows back are replaced."""
        first = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        op = node.target
        if first is None:
            return _flat(node) if op in VIEWS else self._rows(node)
        bound = with_defaults(op, node.args, node.kwargs) if isinstance(op, torch._ops.OpOverload) else {}
        if op is operator.getitem and first.kind != "rows":
            kinds = first.kind.split("/")
            return first._replace(kind=kinds[node.args[1]]) if len(kinds) > 1 else None
        if op in SORTS and first.kind in ("flat", "order") and not bound["descending"]:
            order = "order" if first.kind == "flat" else "back"
            return first._replace(kind=order if op in SORTS[:2] else f"sorted/{order}")
        if op in DIVISIONS and first.kind == "order" and bound["other"] == _shape(first.ids)[1]:
            return first._replace(kind="tokens") if bound.get("rounding_mode", "floor") == "floor" else None
        if op in (*VIEWS, *CASTS, aten.expand.default) and first.kind not in ("rows", "order"):
            return first
        if op is aten.histc.default and first.kind in ("flat", "sorted"):
            bins, least, most = bound["bins"], bound["min"], bound["max"]
            return Routing("counts", first.ids, bins) if least == 0 and most in (bins - 1, bins) else None
        if op is aten.cumsum.default and first.kind == "counts":
            return first._replace(kind="ends")
        return self._rows(node)

    def _is(self, node: Any, kind: str, ids: fx.Node) -> bool:
        found = self.known.get(node) if isinstance(node, fx.Node) else None
        return found is not None and found.kind == kind and found.ids is ids

    # ---- rows in the order of experts ------------------------------------------------------------------------------

    def _rows(self, node: Any) -> Routing | None:
        """Rows that are taken in the order, multiplied by group, or computed of such alone."""
        rows = [each for each in map(self.known.get, node.all_input_nodes) if each is not None and each.kind == "rows"]
        if not rows:
            return self._taken(node)
        ids, count = rows[0].ids, math.prod(_shape(rows[0].ids))
        if str(node.target) in PRODUCTS:
            return self._product(node, ids)
        if len({len(_shape(each.pairs)) for each in rows}) > 1:  # which broadcast otherwise than pairs do
            return None
        for each in node.all_input_nodes:
            shape = _shape(each)
            if not self._is(each, "rows", ids) and (each in self.known or len(shape) > 1 or shape[:1] == (count,)):
                return None
        if node.target in VIEWS:
            shape = _shape(node)
            fits = shape[:1] == (count,) and _shape(rows[0].pairs)[1] == _shape(ids)[1]
            seen = [*_shape(ids), *shape[1:]]
            return Routing("rows", ids, write(node, node, aten.reshape.default, rows[0].pairs, seen)) if fits else None
        is_op = isinstance(node.target, torch._ops.OpOverload)
        alone = is_op and torch.Tag.pointwise in node.target.tags and not node.target._schema.is_mutable
        if not alone and node.target not in (*CASTS, *BY_DIM, operator.getitem):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: self._pairs(each))
        if node.target in BY_DIM:
            place = BY_DIM[node.target]
            dim = args[place] if len(args) > place else 0
            if dim in (0, -len(_shape(rows[0].pairs)) + 1):
                return None
            args = (*args[:place], dim + (dim > 0), *args[place + 1 :])
        return Routing("rows", ids, write(node, node, node.target, *args, **kwargs))

    def _pairs(self, node: fx.Node) -> Any:
        return self.known[node].pairs if node in self.known else node

    def _product(self, node: Any, ids: fx.Node) -> Routing | None:
        bound = with_defaults(node.target, node.args, node.kwargs)
        found: Any = [bound.get(a, bound.get(b)) for a, b in (("self", "input"), ("mat2", "weight"), ("offs", "offs"))]
        x, w, ends = found
        of_all = self._is(ends, "ends", ids) and self.known[ends].pairs == _shape(w)[0] and self._is(x, "rows", ids)
        if not of_all or bound.get("bias") is not None or x.meta["val"].dtype != node.meta["val"].dtype:
            return None
        return Routing("rows", ids, write(node, node, routed_mm, self.known[x].pairs, w, ids))

    def _taken(self, node: Any) -> Routing | None:
        """Rows of tokens, or of flat pairs, that are taken in the order."""
        source, index = node.args[0] if node.args else None, None
        if node.target is aten.index.Tensor and len(node.args[1]) == 1:
            (index,) = node.args[1]
        elif node.target in (aten.gather.default, aten.index_select.default) and node.args[1] == 0:
            index = node.args[2]
        found = self.known.get(index) if isinstance(index, fx.Node) else None
        if found is None or not isinstance(source, fx.Node):
            return None
        known = self.known.get(source)
        if found.kind == "tokens" and known is None and _shape(source)[0] == _shape(found.ids)[0]:
            rows = write(node, node, aten.unsqueeze.default, source, 1)
            shape = [*_shape(found.ids), *_shape(rows)[2:]]  # so that gradients of several products are added by row
            return Routing("rows", found.ids, write(node, node, aten.expand.default, rows, shape))
        flat = known is not None and known.kind == "flat" and _shape(known.ids) == _shape(found.ids)
        return Routing("rows", found.ids, known.ids) if found.kind == "order" and flat and known is not None else None

    # ---- and back --------------------------------------------------------------------------------------------------

    def put_back(self, node: Any) -> None:
        """Replace a node that puts rows back to their tokens, or to the pairs of a token and an expert."""
        name = str(node.target).removeprefix("aten.").partition(".")[0].rstrip("_")
        first = self.known.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if name in ("index", "index_select") and first is not None and first.kind == "rows":
            index = node.args[1][0] if name == "index" else node.args[2]
            if self._is(index, "back", first.ids):
                _replace(node, write(node, node, aten.reshape.default, _of_all(node, first), [*_shape(node)]))
            return
        source = node.args[-1] if len(node.args) > 2 else None
        rows = self.known.get(source) if isinstance(source, fx.Node) else None
        if rows is None or rows.kind != "rows" or not _is_new(node):
            return
        if name in ("scatter_add", "index_add") and node.args[1] == 0 and not node.kwargs:
            if len(node.args) == 4 and self._is(node.args[2], "tokens", rows.ids):
                summed = write(node, node, aten.sum.dim_IntList, _of_all(node, rows), [1])
                _replace(node, write(node, node, aten.add.Tensor, node.args[0], summed))
        elif name == "index_put" and len(node.args) == 3 and len(node.args[1]) == 1:
            of_all = _shape(node)[0] == math.prod(_shape(rows.ids))
            if of_all and self._is(node.args[1][0], "order", rows.ids):
                _replace(node, write(node, node, aten.reshape.default, _of_all(node, rows), [*_shape(node)]))


def _shape(node: fx.Node) -> tuple[int, ...]:
    """The shape of a node's tensor; none of one that has several."""
    value = node.meta.get("val")
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _flat(node: Any) -> Routing | None:
    """The flat pairs of a node ``[n k]``."""
    source = node.args[0]
    is_flat = isinstance(source, fx.Node) and len(_shape(source)) == 2 and len(_shape(node)) == 1
    return Routing("flat", source) if is_flat and isinstance(source, fx.Node) else None


def _of_all(node: fx.Node, rows: Routing) -> fx.Node:
    """Pairs ``[n k ..]`` of rows, which may be the same for all experts of a token."""
    shape = [*_shape(rows.ids), *_shape(rows.pairs)[2:]]
    made: fx.Node = rows.pairs
    return made if [*_shape(made)] == shape else write(node, node, aten.expand.default, made, shape)


def _is_new(node: Any) -> bool:
    """Whether an op writes into nothing that is used otherwise."""
    into = node.args[0]
    mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    return not mutable or (isinstance(into, fx.Node) and [*into.users] == [node] and into.op == "call_function")


def _replace(node: fx.Node, made: fx.Node) -> None:
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
