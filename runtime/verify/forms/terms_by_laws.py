"""Terms that are equal by laws: one for each value in normal form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from shardfx.ir.graph import Node, Value, Where, op_name, substitute
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.rules.local import gives_list
from shardfx.ir.spec import TensorType
from shardfx.runtime.verify.proof.terms import Terms

from .forms import NormalForms
from .known_ops import empty
from .values import V


@dataclass
class TermsByLaws(Terms):
    """Terms, and the value of each."""

    by_arguments: ClassVar[bool] = False
    forms: NormalForms = field(default_factory=empty)
    _values: list[V] = field(default_factory=list)
    _terms: dict[V, int] = field(default_factory=dict)

    def _new(self, type: TensorType, where: Where, name: str, value: V | None = None) -> int:
        term = super()._new(type, where, name)
        self._values.append(value or self.forms.another(type.shape, type.dtype))
        self._terms[self._values[term]] = term
        return term

    def apply(self, node: Node, term: Callable[[Value], int]) -> tuple[int | None, ...]:
        """The terms of a node's results, its operands being ``term`` of them."""
        if isinstance(node.op, OwnOp):
            return super().apply(node, term)
        args = substitute(node.args, lambda v: self._values[term(v)])
        kwargs = {k: substitute(a, lambda v: self._values[term(v)]) for k, a in node.kwargs.items()}
        types = [None if v is None else (v.type.shape, v.type.dtype) for v in node.results]
        several = gives_list(node.op) or len(types) != 1
        made: Any = self.forms.call(node.op, args, kwargs, lambda: types if several else types[0])
        pairs = zip(node.results, made if isinstance(made, list) else [made], strict=False)
        return tuple(None if v is None else self._term(each, v, node) for v, each in pairs)

    def _term(self, value: V, of: Value, node: Node) -> int:
        if value not in self._terms:
            self._new(of.type, node.where, op_name(node.op), value)
        return self._terms[value]
