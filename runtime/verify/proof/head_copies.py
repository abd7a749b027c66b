"""Laws of attention on copies of key heads, which context parallelism makes where ranks are more than key heads.

Query heads share key heads in groups: ``attention(q, copies(k), copies(v))`` is ``attention(q, k, v)``, where each head
is copied so often in a row, and the gradient of ``k`` is the sum of those of its copies::

    copies(k) = reshape(expand(unsqueeze(k, 2), [b, g, times, t, e]), [b, g * times, t, e])
    sum(reshape(grad_of_copies, [b, g, times, t, e]), [2]) = grad_k
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.spec import TensorType

aten = torch.ops.aten
Types = Sequence[TensorType | None]
Made = tuple[int | None, ...]
"""The terms of a node's results."""
TermOf = Callable[[Value], int]
Call = Callable[[Node, TermOf, Types], Made]
"""The terms of a node of given operands, with results of such types."""
Make = Callable[[Hashable, Types, Node], Made]
"""The terms of a key."""
KEYS = {attention: 1, attention_backward: 2}
"""The place of the keys among the operands; the values stand behind them."""


@dataclass
class HeadCopies:
    """The terms of copies of heads, and of the gradients of copies."""

    types: Sequence[TensorType]
    """Of each term."""
    seen_as: Mapping[int, int]
    """The term that another one is a reshape of."""
    expanded: dict[int, int] = field(default_factory=dict)
    """A term that was expanded, by the result."""
    gradients: dict[int, int] = field(default_factory=dict)
    """The gradient of the heads themselves, by that of their copies."""

    def apply(self, node: Node, term: TermOf, types: Types, call: Call, make: Make) -> Made | None:
        """The terms of attention on copies, or of the sum of their gradients; None where a node is neither.

        A gradient of copies is a term of its own.
        """
        summed = self._summed(node, term(node.operands[0])) if node.operands else None
        if summed is not None:
            return (summed,)
        if node.op is aten.expand.default:
            made = call(node, term, types)
            self.expanded.update((each, term(node.operands[0])) for each in made if each is not None)
            return made
        few = self._originals(node, term)
        if not few:
            return None
        first = KEYS[node.op]
        keys = dict(zip(node.operands[first : first + 2], few, strict=True))
        whole = list(types)
        if first == 2:  # of the backward, whose results are gradients
            whole[1:3] = [self.types[each] if types[1 + i] is not None else None for i, each in enumerate(few)]
        found = list(call(node, lambda value: keys[value] if value in keys else term(value), whole))
        for place, (known, type) in enumerate(zip(found, types, strict=True)):
            if known is not None and type is not None and whole[place] != type:
                (copies,) = make(("copies", known, type), (type,), node)
                self.gradients[copies], found[place] = known, copies  # type: ignore[index]
        return tuple(found)

    def _originals(self, node: Node, term: TermOf) -> tuple[int, ...]:
        """The terms of the few heads that the keys and the values of an attention are copies of; none if they are no
        copies."""
        first = KEYS.get(node.op)
        found = [self._original(term(v)) for v in node.operands[first : first + 2]] if first is not None else []
        few = tuple([each for each in found if each is not None])
        return few if len(few) == 2 and self.types[few[0]].shape[1] == self.types[few[1]].shape[1] else ()

    def _original(self, copies: int) -> int | None:
        middle = self.seen_as.get(copies, copies)
        if middle not in self.expanded:
            return None
        added = self.expanded[middle]
        few = self.seen_as.get(added, added)
        shape, wide, many = (self.types[each].shape for each in (few, middle, copies))
        if len(shape) != 4 or len(wide) != 5:
            return None
        batch, groups, *rest = shape
        fits = wide == (batch, groups, wide[2], *rest) and many == (batch, groups * wide[2], *rest)
        return few if fits and self.types[added].shape == (batch, groups, 1, *rest) else None

    def _summed(self, node: Node, term: int) -> int | None:
        """The gradient of the heads, where a node sums that of their copies; else None."""
        found = self.gradients.get(self.seen_as.get(term, term))
        if found is None or node.op is not aten.sum.dim_IntList or node.kwargs or [*node.args[1:]] != [[2]]:
            return None
        batch, groups, *rest = self.types[found].shape
        wide = self.types[term].shape
        return found if wide == (batch, groups, wide[2], *rest) and len(wide) == 5 else None
