"""Values in normal form: what calls give, numbered so that equal ones have one number.

A value is a tensor whose elements are elements of *atoms*, each at its place (:class:`..proof.elements.Elements`): so a
transpose of a transpose, a cat of the parts of a split or a slice of all there is *are* what they were made of. An atom
is a given tensor, or what an op gives of values::

    sum       constant + factor * value + ...            in any order, sums of sums among them (:mod:`.arithmetic`)
    product   value * value / value ...                  in any order
    each      an op that is done element by element      of values broadcast to its shape
    reduce    a sum, maximum, ... over the rows of a matrix, in one step or in several
    dot       a product of batches of matrices
    op        any other op

What moves the elements of a *sum*, *product* or *each* moves those of its operands. Ops of which :data:`.laws.LAWS`
says what they are become that. What is equal so is equal for real numbers: up to rounding, and where nothing overflows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import fx

from shardfx.ir.builder import trace_on_meta
from shardfx.ir.cost.fake_calls import FakeCalls, Layout, Result
from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.ops.traits import COPIES, draws, positional, with_defaults
from shardfx.ir.spec import TensorType

from .arithmetic import Number, Product, Sum, rounded, total
from .laws import COMMUTE, LAWS, ONLY
from .moves import looks_at_memory, moved, moves
from .sums import Sums
from .values import Each, V, key_of, put, values_in

aten = torch.ops.aten
DEEPEST = 60
"""So many ops that are done element by element are gone through, one behind the other, by a move."""


class Unfollowed(Exception):
    """Something gives what no value is."""


Types = Callable[[], Any]
"""What an op gives, nested as it gives it: a shape and a dtype for each tensor."""


@dataclass
class NormalForms(Sums):
    """The values that calls give."""

    known: Callable[[NormalForms, Any, Sequence[Any], Mapping[str, Any], Types], V | None] = lambda *_: None
    """What an op gives whose arithmetic is known (:mod:`.known_ops`)."""
    fakes: FakeCalls = field(default_factory=FakeCalls)
    _results: dict[Any, Any] = field(default_factory=dict)
    _moved: dict[Any, Any] = field(default_factory=dict)
    _depth: int = 0

    # ---- what a call gives ----------------------------------------------------------------------------------------

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> Any:
        """What an op gives of values (:class:`V`) and other arguments: a value, or a list of them."""
        if isinstance(op, torch._ops.OpOverload):
            args, kwargs = self._by_schema(op, args, kwargs)
            if draws(op) or op._schema.is_mutable or looks_at_memory(op):
                return self.each_apart(types())
        key = op, key_of(args), key_of(dict(kwargs))
        if key in self._results and not self._lacks(self._results[key], types):
            return self._results[key]
        apart = self.apart
        made = self._call(op, args, kwargs, types)
        if self.apart == apart:  # or else something in it is drawn, and another time next time
            self._results[key] = made
        return made

    def _lacks(self, made: Any, types: Types) -> bool:
        """Whether a call was asked for fewer of its results before."""
        return (
            isinstance(made, list)
            and None in made
            and any(mine is None and other is not None for mine, other in zip(made, types(), strict=False))
        )

    def _by_schema(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Any]:
        given = with_defaults(op, args, kwargs)
        named = {a.name: given[a.name] for a in op._schema.arguments if a.kwarg_only and a.name in given}
        usual = {a.name: a.default_value for a in op._schema.arguments if a.has_default_value()}
        named = {n: a for n, a in named.items() if n != "device" and not (n in usual and key_of(a) == key_of(usual[n]))}
        there = {n: a for n, a in given.items() if n not in named}
        return positional(op, {n: there.get(n, usual.get(n)) for n in [a.name for a in op._schema.arguments]}), named

    def _call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> Any:
        if op is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        tensors = list(values_in((args, kwargs)))
        if op in COPIES and len(tensors) == 1:
            return tensors[0]
        if moves(op) and tensors and len({self[t].dtype for t in tensors}) == 1:
            made = self.move(op, args, kwargs)
            if made is not None and self._is(made, types()):
                return made
        made = self.known(self, op, args, kwargs, types)
        if made is None:
            made = self._by_law(op, args, kwargs, types)
        if made is not None:
            return made
        return self._opaque(("op", op, key_of(args), key_of(dict(kwargs))), types())

    def _is(self, made: Any, types: Any) -> bool:
        """Whether values are of these types."""
        if isinstance(made, V):
            return bool(types == (self[made].shape, self[made].dtype))
        return isinstance(types, list) and len(types) == len(made) and all(map(self._is, made, types))

    def each_apart(self, types: Any) -> Any:
        """What equals nothing else, for each type of a nest."""
        if isinstance(types, list):
            return [self.each_apart(each) for each in types]
        return None if types is None else self.another(*types)

    def _opaque(self, what: Any, types: Any, place: tuple[int, ...] = ()) -> Any:
        if isinstance(types, list):
            return [self._opaque(what, each, (*place, i)) for i, each in enumerate(types)]
        return None if types is None else self.atom((*what, place) if place else what, *types)

    def _by_law(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> Any:
        implicit = isinstance(op, torch._ops.OpOverload) and op._can_decompose()
        law = LAWS.get(op) or (op if implicit else None)
        tensors = list(values_in((args, kwargs)))
        if law is None or not tensors or (op in ONLY and not ONLY[op](*args, **kwargs)):
            return None
        dtypes = {self[t].dtype for t in tensors} - {torch.bool}
        result = types()
        if isinstance(result, list) or len(dtypes) != 1 or not next(iter(dtypes)).is_floating_point:
            return None
        return self.traced(law, args, kwargs)

    def traced(self, function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function of tensors gives, by the ops that it calls."""
        tensors = list(values_in((args, kwargs)))

        def on(*made: torch.Tensor) -> Any:
            left = iter(made)
            return function(*put(args, lambda _: next(left)), **put(dict(kwargs), lambda _: next(left)))

        known = [TensorType(self[t].shape, self[t].dtype) for t in tensors]
        try:
            graph = trace_on_meta(on, known).graph
            return self.graph(graph, tensors)
        except (*DOES_NOT_RUN, Unfollowed):
            return None

    def graph(self, graph: fx.Graph, given: Sequence[V]) -> Any:
        """What a graph of calls on tensors without content gives; None where it holds anything else."""
        env: dict[fx.Node, Any] = {}
        left = iter(given)
        for node in graph.nodes:
            if node.op == "placeholder":
                env[node] = next(left)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            elif node.op == "call_function":
                args, kwargs = (fx.map_arg(a, env.__getitem__) for a in (node.args, node.kwargs))
                if node.target is operator.getitem:
                    env[node] = args[0][args[1]]
                    continue
                types = partial(self.types, node.target, args, kwargs)
                env[node] = self.call(node.target, args, kwargs, types)
                if env[node] is None:
                    return None
            else:
                return None
        return None

    def types(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives: a shape and a dtype, or a list of them.

        Raises:
            Unfollowed: it gives what is no tensor, or cannot be called so.
        """

        def layout(value: V) -> Layout:
            return Layout.dense(self[value].shape, self[value].dtype)

        def type_of(made: Any) -> Any:
            if isinstance(made, Result):
                return made.layout.shape, made.layout.dtype
            if isinstance(made, (list, tuple)):
                return [type_of(each) for each in made]
            if made is not None:
                raise Unfollowed
            return None

        try:
            made = self.fakes.made(op, put(list(args), layout), put(dict(kwargs), layout))
        except DOES_NOT_RUN as error:
            raise Unfollowed from error
        return type_of(made.results)

    # ---- moving elements ------------------------------------------------------------------------------------------

    def move(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives that moves elements only; None where that cannot be followed."""
        key = op, key_of(args), key_of(dict(kwargs))
        if key not in self._moved:
            self._moved[key] = self._move(op, args, kwargs)
        return self._moved[key]

    def _move(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        tensors = list(values_in((args, kwargs)))
        inside = [self.all_of(t) for t in tensors]
        adds_nothing = isinstance(op, torch._ops.OpOverload)  # what packs may pad
        if adds_nothing and self._depth < DEEPEST and all(isinstance(each, (Sum, Product, Each)) for each in inside):
            self._depth += 1
            made = self._move_operands(op, args, kwargs, tensors, inside)
            self._depth -= 1
            if made is not None:
                return made
        dtype = self[tensors[0]].dtype
        try:
            got = moved(
                op,
                put(list(args), lambda v: self[v].elements),
                put(dict(kwargs), lambda v: self[v].elements),
            )
        except DOES_NOT_RUN:
            return None
        return [self.value(each, dtype) for each in got] if isinstance(got, list) else self.value(got, dtype)

    def _move_operands(
        self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[V], inside: Sequence[Any]
    ) -> Any:
        """The same op of sums (products, ...) of moved values; None where these are not alike."""
        columns = [self.operands(each) for each in inside]
        shapes = {self._skeleton(each) for each in inside}
        if len(shapes) != 1 or len({self[t].dtype for t in tensors}) != 1:
            return None
        got = []
        for row in zip(*columns, strict=True):
            if len({self[v].dtype for v in row}) != 1:
                return None
            new = dict(zip(tensors, row, strict=True))
            made = self.move(op, put(list(args), new.__getitem__), put(dict(kwargs), new.__getitem__))
            if made is None:
                return None
            got.append(made)
        dtype = self[tensors[0]].dtype
        if got and isinstance(got[0], list):
            return [self.again(inside[0], each, dtype) for each in zip(*got, strict=True)]
        return self.again(inside[0], got, dtype) if got else None

    def operands(self, what: Any) -> list[V]:
        """The values that a sum, a product or an op that is done element by element is made of, in an order in which
        like stands beside like."""
        if isinstance(what, Sum):
            return [V(value) for value, _ in self._ordered(what)]
        if isinstance(what, Product):
            return [
                V(value)
                for side in (what.over, what.under)
                for value, _ in sorted(side, key=lambda each: (each[1], self._like(V(each[0]))))
            ]
        found = list(values_in(what.args))
        return sorted(found, key=self._like) if what.op in COMMUTE and not what.mixed else found

    def _ordered(self, what: Sum) -> list[tuple[int, Number]]:
        return sorted(what.parts, key=lambda each: (rounded(each[1]), self._like(V(each[0]))))

    def _like(self, of: V) -> Any:
        """Equal for values that differ in which elements they have of what; near one another, if of what is alike."""
        return str(self[of].dtype), self.built(of), self.sources(of), of.number

    @staticmethod
    def _skeleton(what: Any) -> Any:
        if isinstance(what, Sum):
            return "sum", rounded(what.constant), tuple(sorted(rounded(by) for _, by in what.parts))
        if isinstance(what, Product):
            return "product", *(tuple(sorted(n for _, n in side)) for side in (what.over, what.under))
        return what.op, key_of(put(what.args, lambda _: V(-1))), what.mixed

    def again(self, what: Any, operands: Sequence[V], dtype: torch.dtype) -> V:
        """A sum (product, ...) like another, of other values of one shape."""
        shape = self[operands[0]].shape
        if isinstance(what, Sum):
            found = [self.as_sum(v).times(by) for v, (_, by) in zip(operands, self._ordered(what), strict=True)]
            return self.sum(total([Sum(what.constant, ()), *found]), shape, dtype)
        if isinstance(what, Product):
            left = iter(operands)
            sides = [
                [(next(left), n) for _, n in sorted(side, key=lambda each: (each[1], self._like(V(each[0]))))]
                for side in (what.over, what.under)
            ]
            return self.product([v for v, n in sides[0] for _ in range(n)], [v for v, n in sides[1] for _ in range(n)])
        if what.op in COMMUTE and not what.mixed:
            operands = sorted(operands, key=lambda v: v.number)
        left = iter(operands)
        return self.atom(Each(what.op, put(what.args, lambda _: next(left)), what.mixed), shape, dtype)
