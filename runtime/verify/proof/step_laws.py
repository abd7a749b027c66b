"""Laws of attention in steps (:mod:`shardfx.ir.ops.context.attention_steps`), of which a ring is made.

Attention to keys in disjoint blocks is joined by logsumexps in any order: steps of all shifts, each once, are attention
to all keys. Its gradients are sums over keys, and over queries: so are those of the steps, once each stands where its
keys do::

    step(q, k, v, out, lse, shift=s)    of blocks S, joined with block s     ->  steps of S + {s}
    steps of all shifts, the last of them said to be last                    ->  attention(q, k, v)
    grad_q of s, for all s, added up                                         ->  grad_q; as that of a relative bias
    rotate(grad_k of s, -s), for all s, added up                             ->  grad_k

A sequence that the blocks do not divide is padded behind its last row: with a causal mask no query sees such keys, and
where gradients are padded with zeros, no gradient comes from such queries. So the first rows of a result are those of
the sequence itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.graph import Node, Value, substitute
from shardfx.ir.ops.context.attention_steps import attention_step, attention_step_backward, rotate
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rules.template import argument
from shardfx.ir.spec import TensorType

from .head_copies import Made, Make, TermOf, Types

aten = torch.ops.aten
BLOCKS = 3
"""The dim of blocks, between stripes and the rows of a block."""
Group = tuple[int, int, TensorType]
"""A whole gradient, the number of its parts, and their type."""
STEP = ("out", "logsumexp", "shift", "last")
"""The arguments that attention does not have."""


@dataclass
class AttentionSteps:
    """The terms of steps, and of their gradients."""

    types: Sequence[TensorType]
    """Of each term."""
    seen_as: dict[int, int]
    """The term that another one is a reshape of."""
    apply_whole: Callable[[Node, TermOf], Made]
    """The terms of a node's results."""
    make: Make
    _chains: dict[Made, tuple[Any, frozenset[int]]] = field(default_factory=dict)
    """Results of some steps: the whole attention with its view, and the shifts of the blocks."""
    _away: dict[int, tuple[int, int]] = field(default_factory=dict)
    """A gradient of keys that stands where its queries do: its shift, and itself at home."""
    _group: dict[int, Group] = field(default_factory=dict)
    """The whole gradient of which a term is a part."""
    _parts: dict[Group, dict[int, int]] = field(default_factory=dict)
    """Of a whole gradient its known parts, by shift."""
    _padded: dict[int, tuple[int, Any]] = field(default_factory=dict)
    """A term of more rows: the first rows, and what the others are; None where nobody knows."""

    def apply(self, node: Node, term: TermOf, types: Types) -> Made | None:
        """The terms of a step's results; None where a node is none, or takes what no earlier step gave."""
        if node.op is rotate:
            return self._rotated(node, term(node.operands[0]))
        if node.op is aten.constant_pad_nd.default:
            return self._with_rows(node, term(node.operands[0]), types)
        if node.op is aten.slice.Tensor:
            return self._first_rows(node, self.reshaped(term(node.operands[0]), node.operands[0].type, node))
        if node.op not in (attention_step, attention_step_backward):
            return None
        view = self._view(node)
        if view is None:
            return None
        blocks, shift = view[1], node.kwargs.get("shift", 0) % view[1]
        whole = self._whole(node, term, view, types)
        if node.op is attention_step_backward:
            if whole[4] is None and types[3] is not None:  # an equal call before it had no such result
                return None
            of_whole = zip((*whole[:3], whole[5]), (*types[:3], types[4]), strict=True)
            *parts, of_bias = (
                None if each is None or type is None else self._gradient(node, each, shift, blocks, i in (1, 2), type)
                for i, (each, type) in enumerate(of_whole)
            )
            return *parts, whole[4], of_bias
        known, before = (node.kwargs.get(name) for name in ("out", "logsumexp")), frozenset[int]()
        sofar = tuple(None if each is None else term(each) for each in known)
        if sofar != (None, None):
            of, before = self._chains.get(sofar, ((), before))
            if of != (whole, view) or shift in before:
                return None
        seen, last = before | {shift}, bool(node.kwargs.get("last"))
        if last and len(seen) == blocks:
            return tuple(
                None if each is None or type is None else self.reshaped(each, type, node)
                for each, type in zip(whole, types, strict=True)
            )
        made = self.make(("steps", whole, view, seen, last), types, node)
        if not last:
            self._chains[made] = (whole, view), seen
        return made

    def reshaped(self, term: int, type: TensorType, node: Node) -> int:
        """The term of another one in another shape."""
        base = self.seen_as.get(term, term)
        (made,) = (base,) if self.types[base] == type else self.make(("reshape", base, type), [type], node)
        assert made is not None
        if made != base:
            self.seen_as[made] = base
        return made

    def total(self, parts: Iterable[int], node: Node) -> tuple[int, ...]:
        """The parts of a sum, with all those of one gradient as that."""
        left = [*parts]
        for group in dict.fromkeys(self._group[each] for each in left if each in self._group):
            (whole, blocks, type), of = group, [*self._parts[group].values()]
            if len(of) == blocks and all(each in left for each in of):
                for each in of:
                    left.remove(each)
                left.append(self.reshaped(whole, type, node))
        return tuple(sorted(left))

    def _view(self, node: Node) -> tuple[int, ...] | None:
        """Stripes, blocks and rows of a block, where all operands have the same."""
        found = {v.shape[2:5] if v.type.ndim > 4 else v.shape[1:4] for v in node.operands if v.type.ndim > 2}
        return found.pop() if len(found) == 1 else None

    def _whole(self, node: Node, term: TermOf, view: Sequence[int], types: Types) -> Made:
        """The terms of attention to all keys, of the operands that a step has in blocks."""
        kwargs = {name: each for name, each in node.kwargs.items() if name not in STEP}
        own = Node(node.op, node.args, kwargs).operands
        terms = {v: self.reshaped(term(v), self._flat(v.type, view), node) for v in own}
        shorter = self._shorter(node, terms)
        terms |= shorter
        values = {v: Value(self.types[each]) for v, each in terms.items()}
        op = attention if node.op is attention_step else attention_backward
        args, *rest = (substitute(each, values.__getitem__) for each in (node.args, *kwargs.values()))
        made = Node(op, args, dict(zip(kwargs, rest, strict=True)))
        made.where = node.where
        flat = [None if type is None else self._flat(type, view) for type in types]
        if op is attention_backward:
            flat.insert(3, None)
        elif flat[0] is not None:  # which is in the dtype of scores between steps
            flat[0] = TensorType(flat[0].shape, node.operands[0].type.dtype)
        rows = self.types[terms[node.operands[0]]].shape[2]
        of = [None if type is None else _of_rows(type, rows) for type in flat]
        made.results = [None if type is None else Value(type, made, i) for i, type in enumerate(of)]
        found = self.apply_whole(made, {each: terms[v] for v, each in values.items()}.__getitem__)
        return tuple(
            each if each is None or type is None or not shorter else self._longer(each, type, node)
            for each, type in zip(found, flat, strict=True)
        )

    def _shorter(self, node: Node, terms: dict[Value, int]) -> dict[Value, int]:
        """The operands without the rows behind the last one, where all have such rows, which do not matter."""
        of_rows = {v: each for v, each in terms.items() if v.type.ndim > 2}
        if not argument(node, "causal") or not all(each in self._padded for each in of_rows.values()):
            return {}
        found = {v: self._padded[each] for v, each in of_rows.items()}
        results = [argument(node, name) for name in ("out", "logsumexp")] if argument(node, "grad") is not None else []
        if any(fill != (None if v in results else "0") for v, (_, fill) in found.items()):
            return {}
        sizes = {self.types[each].shape[2 if self.types[each].ndim > 2 else 1] for each, _ in found.values()}
        return {} if len(sizes) > 1 else {v: each for v, (each, _) in found.items()}

    def _longer(self, term: int, type: TensorType, node: Node) -> int:
        """A term whose first rows are those of another one."""
        if self.types[term] == type:
            return term
        (made,) = self.make(("first rows", term, type), (type,), node)
        assert made is not None
        self._padded.setdefault(made, (term, None))
        return made

    def _with_rows(self, node: Node, term: int, types: Types) -> Made | None:
        """The term of rows that are padded behind the last one; None where other dims are padded."""
        value, pads, fill = *node.args[:2], argument(node, "value")
        dim = 2 if value.type.ndim > 2 else 1
        own = [0] * 2 * (value.type.ndim - dim)
        if not own or len(pads) != len(own) or list(pads[:-1]) != own[:-1] or pads[-1] < 1:
            return None
        if types[0] is None or types[0].shape[dim] != value.shape[dim] + pads[-1]:
            return None
        made = self.make(("padded", term, types[0], repr(fill)), types, node)
        self._padded[made[0]] = term, repr(fill)  # type: ignore[index]
        return made

    def _first_rows(self, node: Node, term: int) -> Made | None:
        """The term of all rows but those behind the last one; None where a slice is of others."""
        base, _ = self._padded.get(term, (None, None))
        dim, start, end, step = (argument(node, name) for name in ("dim", "start", "end", "step"))
        if base is None or dim != (2 if node.outs[0].type.ndim > 2 else 1) or start or step != 1:
            return None
        return (base,) if end == node.outs[0].shape[dim] and self.types[base] == node.outs[0].type else None

    @staticmethod
    def _flat(type: TensorType, view: Sequence[int]) -> TensorType:
        if type.ndim < 3:
            return type
        dim = 2 if type.ndim > 4 else 1
        rows = view[0] * view[1] * view[2]
        return TensorType((*type.shape[:dim], rows, *type.shape[dim + 3 :]), type.dtype)

    def _gradient(self, node: Node, whole: int, shift: int, blocks: int, moved: bool, type: TensorType) -> int:
        (home,) = self.make(("part", whole, shift, blocks, type), (type,), node)
        assert home is not None
        self._group[home] = whole, blocks, type
        self._parts.setdefault((whole, blocks, type), {})[shift] = home
        if not moved or not shift:
            return home
        (away,) = self.make(("part away", whole, shift, blocks, type), (type,), node)
        assert away is not None
        self._away[away] = shift, home
        return away

    def _rotated(self, node: Node, term: int) -> Made | None:
        shift, home = self._away.get(term, (0, term))
        plain = argument(node, "dim") == BLOCKS and not argument(node, "place")
        by = argument(node, "shift") if plain else None
        return (home,) if home != term and by is not None and (by + shift) % node.outs[0].shape[BLOCKS] == 0 else None


def _of_rows(type: TensorType, rows: int) -> TensorType:
    """A type ``[b h s ..]`` of another number of rows; one of no rows as it is."""
    return type if type.ndim < 3 else TensorType((*type.shape[:2], rows, *type.shape[3:]), type.dtype)
