"""Normal forms: tensors that calls give, numbered so that those that are equal by a few laws have one number.

A value is a tensor whose elements are elements of *atoms*, each at its place (:class:`.elements.Elements`): a transpose
of a transpose, a cat of the parts of a split, or a slice of all there is, *are* what they were made of. An atom is an
input, or what an op gives of values::

    linear    constant + factor * value + ...    in any order, linear forms of linear forms among them
    product   value * value * ...                in any order; what is divided by is a reciprocal
    dot       a product of batches of matrices, or of their transposes the other way round
    op        any other op

An op for which torch, or a rule, has a decomposition is what that gives, once compared with the op on random numbers
(:mod:`..decomposition`): ``addmm`` a product and a sum, ``silu(x)`` is ``x * sigmoid(x)``. What is equal so is equal
for real numbers: up to rounding, and where nothing overflows. Nothing is cancelled: of infinities and NaN ``x - x`` is
not 0, and ``x / x`` not 1.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx
from torch._decomp import core_aten_decompositions, decomposition_table

from shardfx.ir.cost.fake_calls import FakeCalls, Result, TensorLayout, leaves, map_nest
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.rings import ring
from shardfx.ir.ops.traits import COPIES, base_name_of, draws, gives_alias, positional, with_defaults
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.spec import TensorType
from shardfx.runtime.verify.data_movement import ATEN_MOVES, PACKING
from shardfx.runtime.verify.decomposition import Unjustified, justified, widened

from .elements import BITS, Elements, read

aten = torch.ops.aten
Number = int | float
Types = Callable[[], Any]
"""What an op gives, nested as it gives it: a shape and a dtype for each tensor."""
DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    op: decomposition_table[op]
    for op in (*core_aten_decompositions(), aten.addmm.default, aten.addmv.default, aten.gelu.default)
    if op in decomposition_table
}
DIGITS = 13
"""Factors that differ by rounding are one: ``x / sqrt(2)`` is ``x * sqrt(0.5)``."""
WRITTEN_OUT = 1 << 18
"""Moves that are not done on loops are done on up to so many elements."""
COPIED = {
    ring,
    *(getattr(aten, name).default for name in "cat stack flip roll repeat view_copy permute_copy".split()),
    aten.transpose_copy.int,
}
"""Ops that move elements into memory of their own, besides :data:`ON_LOOPS`; those that give a view say so in their
schema."""
ON_LOOPS: Mapping[Any, Callable[..., Any]] = {
    **{op: move for op, move in (ATEN_MOVES | PACKING).items() if op is not aten.narrow.default},
    aten._unsafe_view.default: Elements.reshape,
    aten.expand.default: lambda x, shape, implicit=False: _expanded(x, shape),
}
"""Moves that are done on loops, however large a tensor is; the others on elements that are written out."""
COMMUTE = {
    *(getattr(aten, name).default for name in "maximum minimum logical_and logical_or logical_xor".split()),
    *(getattr(aten, name).Tensor for name in "eq ne bitwise_and bitwise_or bitwise_xor".split()),
}
"""Ops of two operands whose order does not matter; sums and products have none anyway."""


class Unfollowed(Exception):
    """A call that gives what is no value."""


@dataclass(frozen=True)
class NormalValue:
    """A value, by number."""

    number: int


@dataclass(frozen=True, eq=False)
class LinearForm:
    """``constant + factor * value + ...``; a value stands twice where its factors have other signs.

    It has its factors as they are, and they are rounded where it is compared: what is rounded again and again ends
    elsewhere, as twice 1/12 and 1/6.
    """

    constant: Number
    parts: tuple[tuple[int, Number], ...] = ()

    @cached_property
    def _compared(self) -> tuple[Number, tuple[tuple[int, Number], ...]]:
        return rounded(self.constant), tuple(sorted((value, rounded(by)) for value, by in self.parts))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LinearForm) and self._compared == other._compared

    def __hash__(self) -> int:
        return hash(self._compared)

    def times(self, factor: Number) -> LinearForm:
        """All of it by a factor."""
        return LinearForm(self.constant * factor, tuple((value, by * factor) for value, by in self.parts))

    def plus(self, other: LinearForm) -> LinearForm:
        """The sum of both."""
        parts: dict[tuple[int, bool], Number] = {}
        for value, by in (*self.parts, *other.parts):
            parts[value, by > 0] = parts.get((value, by > 0), 0) + by
        return LinearForm(self.constant + other.constant, tuple((v, by) for (v, _), by in sorted(parts.items())))


def rounded(number: Number) -> Number:
    """A number as it is compared."""
    return number if isinstance(number, int) else float(f"{number:.{DIGITS - 1}e}")


@dataclass
class NormalForms:
    """All values of one comparison."""

    fakes: FakeCalls = field(default_factory=FakeCalls)
    book: RuleBook | None = None
    """Ops may have decompositions of their own in it."""
    values: list[tuple[Elements, torch.dtype]] = field(default_factory=list)
    atoms: list[Any] = field(default_factory=list)
    """What each atom is, by number from 1."""
    unrelated: int = 0
    """How many values there are that equal nothing else."""
    _numbers: dict[Any, NormalValue] = field(default_factory=dict)
    _atoms: dict[Any, int] = field(default_factory=dict)
    _results: dict[Any, Any] = field(default_factory=dict)
    _within: list[Any] = field(default_factory=list)
    """The ops whose decompositions are read."""

    # ---- values and atoms -----------------------------------------------------------------------------------------

    def value(self, elements: Elements, dtype: torch.dtype) -> NormalValue:
        """The value of these elements."""
        if len(elements.runs) > 1 and elements.numel() <= WRITTEN_OUT >> 4:  # one writing of equal patterns
            elements = read(elements.written_out())
        key = elements.shape, elements.runs, dtype
        if key not in self._numbers:
            self.values.append((elements, dtype))
            self._numbers[key] = NormalValue(len(self.values) - 1)
        return self._numbers[key]

    def atom(self, what: Any, shape: Sequence[int], dtype: torch.dtype) -> NormalValue:
        """The value that is all of an atom."""
        key = what, tuple(shape), dtype
        if key not in self._atoms:
            self.atoms.append(what)
            self._atoms[key] = len(self.atoms)
        return self.value(Elements.of(shape, self._atoms[key] << BITS, ((math.prod(shape), 1),)), dtype)

    def another(self, types: Any) -> Any:
        """What equals nothing else, for each type of a nest."""
        if isinstance(types, list):
            return [self.another(each) for each in types]
        self.unrelated += 1
        return None if types is None else self.atom(("another", self.unrelated), *types)

    def constant(self, number: Any, shape: Sequence[int], dtype: torch.dtype) -> NormalValue:
        """A number, everywhere."""
        stored = torch.tensor(number, dtype=dtype).item()
        number = number if isinstance(stored, float) and plain(stored) and plain(number) else stored
        zero = type(number) in (int, float) and repr(abs(number)) == repr(number) == repr(0 * number)
        one = self.atom(LinearForm(number) if plain(number) or zero else ("number", repr(number)), (), dtype)
        return self.value(_expanded(self.values[one.number][0], shape), dtype)

    def shape(self, of: NormalValue) -> tuple[int, ...]:
        """The shape of a value."""
        return self.values[of.number][0].shape

    def dtype(self, of: NormalValue) -> torch.dtype:
        """The dtype of a value."""
        return self.values[of.number][1]

    def all_of(self, of: NormalValue) -> Any:
        """What a value is all elements of, in order; None: it is made of elements of several atoms, or moved."""
        elements, dtype = self.values[of.number]
        runs = elements.runs
        if len(runs) != 1 or not runs[0].source or runs[0].loops not in (((elements.numel(), 1),), ()):
            return None
        what = self.atoms[runs[0].source - 1]
        return what if self._atoms.get((what, elements.shape, dtype), 0) << BITS == runs[0].base else None

    def number(self, of: NormalValue) -> Number | None:
        """The finite number that a value is everywhere, if it is."""
        runs = self.values[of.number][0].runs
        what = self.atoms[runs[0].source - 1] if len(runs) == 1 and runs[0].source else None
        if what == ("number", "-0.0"):
            return -0.0
        return what.constant if isinstance(what, LinearForm) and not what.parts else None

    # ---- linear forms and products --------------------------------------------------------------------------------

    def linear(self, of: NormalValue) -> LinearForm:
        """A value as a linear form."""
        what, number = self.all_of(of), self.number(of)
        if isinstance(what, LinearForm):
            return what
        return LinearForm(0, ((of.number, 1),)) if number is None else LinearForm(number)

    def of_linear(self, of: LinearForm, shape: Sequence[int], dtype: torch.dtype) -> NormalValue:
        """The value of a linear form."""
        if not of.parts:
            return self.constant(of.constant, shape, dtype)
        alone = of.constant == 0 and len(of.parts) == 1 and rounded(of.parts[0][1]) == 1
        return NormalValue(of.parts[0][0]) if alone else self.atom(of, shape, dtype)

    def scaled(self, of: NormalValue) -> tuple[Number, NormalValue | None]:
        """A factor, and the value that is multiplied by it; or the number alone."""
        found = self.linear(of)
        if not found.parts and plain(found.constant):
            return found.constant, None
        alone = found.constant == 0 and len(found.parts) == 1
        return (found.parts[0][1], NormalValue(found.parts[0][0])) if alone else (1, of)

    def product(self, values: Sequence[NormalValue]) -> NormalValue | None:
        """The product of values of one shape and dtype."""
        shape, dtype = self.shape(values[0]), self.dtype(values[0])
        scaled = [self.scaled(each) for each in values]
        factor = math.prod(by for by, _ in scaled)
        if not plain(factor):
            return None
        found: list[int] = []
        for _, one in scaled:
            if one is not None:
                what = self.all_of(one)
                found += what[1:] if isinstance(what, tuple) and what[0] == "product" else [one.number]
        if not found:
            return self.constant(factor, shape, dtype)
        made = NormalValue(found[0]) if len(found) == 1 else self.atom(("product", *sorted(found)), shape, dtype)
        return self.of_linear(self.linear(made).times(factor), shape, dtype)

    # ---- calls ----------------------------------------------------------------------------------------------------

    def call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types) -> Any:
        """What an op gives of values and other arguments: a value, or a list of them."""
        if isinstance(op, torch._ops.OpOverload):
            args, kwargs = _by_schema(op, args, kwargs)
            drawn = draws(op) and with_defaults(op, args, kwargs).get("dropout_p") != 0
            if drawn or op._schema.is_mutable or _looks_at_memory(op):
                return self.another(types())
        key = op, key_of(args), key_of(dict(kwargs))
        known = self._results.get(key)
        if known is not None and not (isinstance(known, list) and None in known):  # of which more may be asked now
            return known
        unrelated = self.unrelated
        made = self._call(op, args, kwargs, types, key)
        if self.unrelated == unrelated:  # or else something in it is drawn, and another time next time
            self._results[key] = made
        return made

    def _call(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], types: Types, key: Any) -> Any:
        if op is operator.getitem and isinstance(args[0], (list, tuple)):
            return args[0][args[1]]
        tensors = list(values_in((args, kwargs)))
        if op in COPIES and len(tensors) == 1:
            return tensors[0]
        result = types()
        made = None
        if _moves(op) and tensors and len({self.dtype(each) for each in tensors}) == 1:
            made = self.move(op, args, kwargs)
        elif isinstance(op, torch._ops.OpOverload):
            one = op in KNOWN and isinstance(result, tuple)
            made = KNOWN[op](self, with_defaults(op, args, kwargs), *result) if one else None
            made = self._decomposed(op, args, kwargs, result) if made is None else made
        if made is not None and self._is(made, result):
            return made
        if op in COMMUTE and len({self.dtype(each) for each in tensors}) == 1:
            key = op, tuple(sorted(each.number for each in tensors))
        return self._opaque(("op", *key), result)

    def _is(self, made: Any, types: Any) -> bool:
        if isinstance(made, (list, tuple)):
            return isinstance(types, list) and len(types) == len(made) and all(map(self._is, made, types))
        return bool(types == (None if made is None else (self.shape(made), self.dtype(made))))

    def _opaque(self, what: Any, types: Any, place: tuple[int, ...] = ()) -> Any:
        if isinstance(types, list):
            return [self._opaque(what, each, (*place, i)) for i, each in enumerate(types)]
        return None if types is None else self.atom((*what, *place), *types)

    def _decomposed(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Any:
        """What an op's decomposition gives, if there is one. It is traced in float64, in which it computes without a
        cast, whatever the dtype of its operands."""
        entry = self.book.entry(op) if self.book is not None and op not in DECOMPOSITIONS else None
        own = entry.expand if entry is not None else False
        decomposition = DECOMPOSITIONS.get(op) or own or (op if op._can_decompose() else None)
        tensors = list(values_in((args, kwargs)))
        if decomposition is None or not tensors or op in self._within:
            return None
        if 0 in (kwargs.get("alpha"), kwargs.get("beta")):  # the op looks at nothing that it takes zero times
            return None

        def operand(of: NormalValue) -> Value:
            return Value(TensorType(self.shape(of), widened(self.dtype(of))))

        every = result if isinstance(result, list) else [result]
        results = [None if each is None else Value(TensorType(each[0], widened(each[1]))) for each in every]
        wide, named = (map_nest(widened(each), operand, NormalValue) for each in (list(args), dict(kwargs)))
        node = Node(op, tuple(wide), named, results)
        self._within.append(op)
        try:
            traced = justified(node, decomposition).graph
            made = None if _writes(traced) else self.graph(traced, tensors)
        except (Unjustified, Unfollowed, Error, *DOES_NOT_RUN):
            return None
        finally:
            self._within.pop()
        if made is None:
            return None
        return list(made) if isinstance(result, list) else made[0]

    def graph(self, graph: fx.Graph, given: Sequence[NormalValue]) -> Any:
        """What a graph of calls gives.

        Raises:
            Unfollowed: it has anything else.
        """
        env: dict[fx.Node, Any] = {}
        left = iter(given)
        for node in graph.nodes:
            args, kwargs = (fx.map_arg(each, env.__getitem__) for each in (node.args, node.kwargs))
            if node.op == "placeholder":
                env[node] = next(left)
            elif node.op == "output":
                return args[0]
            elif node.op == "call_function":
                env[node] = self.call(node.target, args, kwargs, partial(self.types, node.target, args, kwargs))
            else:
                raise Unfollowed(node.op)
        return None

    def types(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives: a shape and a dtype, or a list of them; None for what is no tensor.

        Raises:
            Unfollowed: it cannot be called so.
        """

        def layout(value: NormalValue) -> TensorLayout:
            return TensorLayout.dense(self.shape(value), self.dtype(value))

        def type_of(made: Any) -> Any:
            if isinstance(made, (list, tuple)):
                return [type_of(each) for each in made]
            return (made.layout.shape, made.layout.dtype) if isinstance(made, Result) else None

        try:
            made = self.fakes.made(op, *(map_nest(each, layout, NormalValue) for each in (list(args), dict(kwargs))))
        except DOES_NOT_RUN as error:
            raise Unfollowed from error
        return type_of(made.results)

    def move(self, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an op gives that moves elements only, as a value or a list of values; None where that cannot be
        followed."""
        dtype = next(self.dtype(each) for each in values_in((args, kwargs)))
        if dtype.is_complex and op not in COPIED | ON_LOOPS.keys():  # perhaps its conjugate
            return None

        def elements(of: NormalValue) -> Any:
            found = self.values[of.number][0]
            if op not in ON_LOOPS and found.numel() > WRITTEN_OUT:
                raise RuntimeError("too many elements")
            return found if op in ON_LOOPS else found.written_out()

        try:
            given, named = map_nest(list(args), elements, NormalValue), map_nest(dict(kwargs), elements, NormalValue)
            made = ON_LOOPS.get(op, op)(*given, **named)
        except DOES_NOT_RUN:
            return None
        every = list(made) if isinstance(made, (list, tuple)) else [made]
        written = [each for each in every if isinstance(each, torch.Tensor)]
        if any(each.dtype != torch.int64 or each.numel() > WRITTEN_OUT or (each < 0).any() for each in written):
            return None
        found = [self.value(read(each) if isinstance(each, torch.Tensor) else each, dtype) for each in every]
        return found if isinstance(made, (list, tuple)) else found[0]

    def wider(self, of: Any, shape: Sequence[int], dtype: torch.dtype) -> NormalValue | None:
        """An operand as a value of a shape and dtype: broadcast, or a number everywhere; None where it is no such."""
        if isinstance(of, NormalValue):
            if self.dtype(of) != dtype:
                return None
            return of if self.shape(of) == tuple(shape) else self.move(aten.expand.default, (of, list(shape)), {})
        held = type(of) in ((int, float) if dtype.is_floating_point else (int,)) and _holds(dtype, of)
        return self.constant(of, shape, dtype) if held else None


# ---- ops whose arithmetic is known --------------------------------------------------------------------------------

Given = Mapping[str, Any]
Known = Callable[[NormalForms, Given, tuple[int, ...], torch.dtype], "NormalValue | None"]
"""Makes the value of a shape and dtype from arguments by name."""


def plain(number: object) -> bool:
    """Whether values may be multiplied by a number, whatever they are: what is 0 or infinite makes NaN of some."""
    return type(number) in (int, float) and math.isfinite(number) and number != 0  # type: ignore[arg-type]


def _holds(dtype: torch.dtype, number: Number) -> bool:
    if dtype.is_floating_point or dtype is torch.bool:
        return True
    return not dtype.is_complex and math.isfinite(number) and torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max


def _ring(dtype: torch.dtype) -> bool:
    return dtype is not torch.bool and not dtype.is_complex


def _added(first: str, second: str, sign: int) -> Known:
    def known(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
        alpha = given.get("alpha", 1)
        a, b = (forms.wider(given[name], shape, dtype) for name in (first, second))
        if a is None or b is None or not _ring(dtype) or not plain(alpha):
            return None
        if not dtype.is_floating_point and type(alpha) is not int:
            return None
        return forms.of_linear(forms.linear(a).plus(forms.linear(b).times(sign * alpha)), shape, dtype)

    return known


def _neg(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    return forms.of_linear(forms.linear(given["self"]).times(-1), shape, dtype) if _ring(dtype) else None


def _mul(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    a, b = (forms.wider(given[name], shape, dtype) for name in ("self", "other"))
    return forms.product([a, b]) if a is not None and b is not None and _ring(dtype) else None


def _div(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    a, b = (forms.wider(given.get(name, 1), shape, dtype) for name in ("self", "other"))
    if a is None or b is None or not dtype.is_floating_point or given.get("rounding_mode") is not None:
        return None
    by, one = forms.scaled(b)
    over = [] if one is None else [forms.atom(("reciprocal", one), shape, dtype)]
    return forms.product([a, forms.constant(1 / by, shape, dtype), *over]) if plain(1 / by) else None


def _reciprocal(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    return _div(forms, {"self": 1, "other": given["self"]}, shape, dtype)


def _pow(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    times, of = given["exponent"], forms.wider(given["self"], shape, dtype)
    whole = type(times) in (int, float) and 0 < times <= 16 and times == int(times)
    return forms.product([of] * int(times)) if whole and of is not None and dtype.is_floating_point else None


def _filled(name: str | Number) -> Known:
    def known(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
        number = given[name] if isinstance(name, str) else name
        held = isinstance(number, (bool, int, float)) and not dtype.is_complex and _holds(dtype, number)
        return forms.constant(number, shape, dtype) if held else None

    return known


def _cast(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    of: NormalValue = given["self"]
    return of if forms.dtype(of) == dtype else None


def _where(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    a, b = (forms.wider(given[name], shape, dtype) for name in ("self", "other"))
    return a if a == b else None


def _padded(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    of: Any = given["self"]
    for place, size in enumerate(given["pad"]):
        held, dim = list(forms.shape(of)), len(shape) - 1 - place // 2
        if size > 0:
            filled = forms.constant(given["value"], [*held[:dim], size, *held[dim + 1 :]], dtype)
            of = forms.move(aten.cat.default, ([of, filled] if place % 2 else [filled, of], dim), {})
        elif size < 0:
            of = forms.move(aten.slice.Tensor, (of, dim, *((0, held[dim] + size) if place % 2 else (-size,))), {})
        if of is None:
            return None
    return of  # type: ignore[no-any-return]


def _dot(forms: NormalForms, given: Given, shape: tuple[int, ...], dtype: torch.dtype) -> NormalValue | None:
    """A product of matrices or of batches of them: by the factors of the operands, and of two ways to write it the
    first by number."""
    (by, a), (times, b) = (forms.scaled(given[name]) for name in ("self", "mat2"))
    if a is None or b is None or not forms.dtype(a) == forms.dtype(b) == dtype or not dtype.is_floating_point:
        return None

    def turned(of: NormalValue) -> NormalValue | None:
        made: NormalValue | None = forms.move(aten.transpose.int, (of, 1, 2), {})
        return made

    a, b = (forms.move(aten.reshape.default, (each, [-1, *forms.shape(each)[-2:]]), {}) for each in (a, b))
    if not math.prod(shape) or a is None or b is None or (of_b := turned(b)) is None or (of_a := turned(a)) is None:
        return None
    back = (of_b.number, of_a.number) < (a.number, b.number)
    batch, rows, columns = forms.shape(a)[0], *shape[-2:]
    if back:
        made = turned(forms.atom(("dot", of_b, of_a), (batch, columns, rows), dtype))
    else:
        made = forms.atom(("dot", a, b), (batch, rows, columns), dtype)
    made = None if made is None else forms.move(aten.reshape.default, (made, list(shape)), {})
    return None if made is None else forms.of_linear(forms.linear(made).times(by * times), shape, dtype)


KNOWN: Mapping[Any, Known] = {
    **dict.fromkeys((aten.add.Tensor, aten.add.Scalar), _added("self", "other", 1)),
    **dict.fromkeys((aten.sub.Tensor, aten.sub.Scalar), _added("self", "other", -1)),
    **dict.fromkeys((aten.rsub.Tensor, aten.rsub.Scalar), _added("other", "self", -1)),
    aten.neg.default: _neg,
    **dict.fromkeys((aten.mul.Tensor, aten.mul.Scalar), _mul),
    **dict.fromkeys((aten.div.Tensor, aten.div.Scalar), _div),
    aten.reciprocal.default: _reciprocal,
    aten.pow.Tensor_Scalar: _pow,
    **dict.fromkeys((aten.full.default, aten.full_like.default, aten.new_full.default), _filled("fill_value")),
    aten.scalar_tensor.default: _filled("s"),
    **dict.fromkeys((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default), _filled(0)),
    **dict.fromkeys((aten.ones.default, aten.ones_like.default, aten.new_ones.default), _filled(1)),
    aten._to_copy.default: _cast,
    aten.where.self: _where,
    aten.constant_pad_nd.default: _padded,
    **dict.fromkeys((aten.mm.default, aten.bmm.default), _dot),
}


# ---- arguments and elements ---------------------------------------------------------------------------------------


def values_in(nest: Any) -> Iterator[NormalValue]:
    """The values in a nest of arguments, in order."""
    return leaves(nest, NormalValue)


def key_of(arg: Any) -> Any:
    """A nest of arguments as a key: 1, 1.0 and True differ, and 0.0 and -0.0."""
    if isinstance(arg, (list, tuple)):
        return tuple(key_of(each) for each in arg)
    if isinstance(arg, dict):
        return tuple(sorted((name, key_of(each)) for name, each in arg.items()))
    return arg if isinstance(arg, NormalValue) else (type(arg).__name__, repr(arg))


def _by_schema(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments, defaults among them, written in one way; a device is no part of what is computed."""
    given, schema = with_defaults(op, args, kwargs), op._schema.arguments
    usual = {a.name: a.default_value for a in schema if a.has_default_value()}
    named = {a.name: given[a.name] for a in schema if a.kwarg_only and a.name in given and a.name != "device"}
    named = {n: a for n, a in named.items() if n not in usual or key_of(a) != key_of(usual[n])}
    there = {name: arg for name, arg in given.items() if name not in named}
    return positional(op, {a.name: there.get(a.name, usual.get(a.name)) for a in schema}), named


def _writes(graph: fx.Graph) -> bool:
    """Whether a decomposition writes in place, and draws nothing: what it gives is better known as the op's result."""
    ops = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return any(op._schema.is_mutable for op in ops) and not any(map(draws, ops))


def _looks_at_memory(op: Any) -> bool:
    """Whether what an op gives depends on how its operand lies, or on what was in memory before."""
    names = {argument.name for argument in op._schema.arguments}
    return "storage_offset" in names or (gives_alias(op) and "stride" in names) or "empty" in base_name_of(op)


def _moves(op: Any) -> bool:
    """Whether an op moves elements only."""
    return op in ON_LOOPS or op in COPIED or (isinstance(op, torch._ops.OpOverload) and gives_alias(op))


def _expanded(x: Elements, shape: Sequence[int]) -> Elements:
    """The elements broadcast to a shape, in which -1 is a size as it is.

    Raises:
        RuntimeError: it is no shape of theirs, or they are too irregular.
    """
    own = (1,) * (len(shape) - x.dim()) + x.shape
    shape = tuple(mine if size == -1 else size for size, mine in zip(shape, own, strict=False))
    if len(own) != len(shape) or any(a not in (1, b) for a, b in zip(own, shape, strict=True)):
        raise RuntimeError(f"{x.shape} is not broadcast to {shape}")
    loops = x.runs[0].by_dim(own) if len(x.runs) == 1 else None
    if loops is None:
        if math.prod(shape) > WRITTEN_OUT:
            raise RuntimeError("too irregular")
        return read(x.written_out().expand(shape))
    each = (loop if a == b else ((b, 0),) for loop, a, b in zip(loops, own, shape, strict=True))
    return Elements.of(shape, x.runs[0].base, (pair for loop in each for pair in loop))
