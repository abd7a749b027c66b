"""Value numbering: tensors identified by the op and operands that made them, down to the inputs.

    x.mean() + self.bias    ->    add(mean(args.0), bias)

Two tensors of the same term hold the same numbers, whatever the inputs are. Terms are of storages, and a tensor is a
view into one: what is written into a tensor is written into all that share its storage. Terms that differ (a table, and
the first rows of a longer one) are computed from random inputs and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardfx.ir.ops.traits import draws

from .eager_comparison import is_close

Term = int
"""The number of a term; equal terms have equal numbers."""


class TensorView(NamedTuple):
    """A tensor: the term of its storage, and where in it its elements are."""

    term: Term
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool


@dataclass(frozen=True)
class ConstantArg:
    """An argument that is no tensor: ``1`` is not ``1.0``."""

    said: str
    value: object = field(compare=False)


class ArgTree(NamedTuple):
    """A list, tuple or dict of arguments."""

    kind: type
    names: tuple[str, ...]
    inside: tuple[Hashable, ...]


class OpTerm(NamedTuple):
    """The term of an op: its result of this ``number``; or the new content of a storage that it writes into, of term
    ``was``, which is that of the operand of this ``number``. ``draw``: the call and the number of a draw of random
    numbers."""

    op: Any
    args: ArgTree
    kwargs: ArgTree
    number: int
    was: Term | None = None
    draw: tuple[str, int] | None = None


class InputTerm(NamedTuple):
    """An input, by name and size in bytes."""

    name: str
    dtype: torch.dtype
    size: int


class ConstantBytes(NamedTuple):
    """A tensor of the code: the bytes of its storage."""

    bytes: bytes


@dataclass
class StorageTerm:
    """The current term of a storage. ``kept``: the storage, alive so that no other gets its address."""

    kept: object
    term: Term


class ValueNumbering(TorchDispatchMode):
    """Within, the term of each tensor is recorded."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._draws = "", 0
        self._numbers: dict[Hashable, Term] = {}
        self.made: list[OpTerm | InputTerm | ConstantBytes] = []
        """The definition of each term."""
        self._memories: dict[int, StorageTerm] = {}

    def begin(self, call: str) -> None:
        """Begin a call of this name, which has draws of its own."""
        self._call, self._draws = call, 0

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """Make these tensors inputs, by name."""
        for name, tensor in tensors.items():
            self._memory(tensor).term = self._term(_given(name, tensor))

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """Let a tensor share the storage of another one."""
        self._memories[_key(tensor)] = memory = self._memory(other)
        memory.kept = (memory.kept, _kept(tensor))

    def of(self, tensor: Tensor) -> TensorView:
        """The term of a tensor."""
        strided = _is_strided(tensor)
        strides, offset = (tensor.stride(), int(tensor.storage_offset())) if strided else ((), 0)
        flipped = tensor.is_conj(), tensor.is_neg()
        return TensorView(self._memory(tensor).term, tuple(tensor.shape), strides, offset, tensor.dtype, *flipped)

    def made_of(self, places: Iterable[Hashable]) -> set[str]:
        """The inputs of these by name, and the calls that drew random numbers for them."""
        front, found, met = [*_terms(tuple(places))], set[str](), set[Term]()
        while front:
            term = front.pop()
            if term in met:
                continue
            met.add(term)
            how = self.made[term]
            if isinstance(how, InputTerm):
                found.add(how.name)
            elif isinstance(how, OpTerm):
                found |= {how.draw[0]} if how.draw is not None else set()
                front += operands(how)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = self._several(args), self._several(kwargs)
        order = [id(each) for each in filter(is_tensor, tree_leaves((args, kwargs)))]
        draw = None
        if draws(func):
            self._draws += 1
            draw = self._call, self._draws
        out = func(*args, **kwargs)
        first: Tensor | None = None
        for number, said in enumerate(func._schema.arguments):
            if said.alias_info is not None:
                value = args[number] if number < len(args) else kwargs.get(said.name)
                for each in filter(is_tensor, tree_leaves(value)):
                    first = each if first is None else first
                    if said.alias_info.is_write:
                        memory = self._memory(each)
                        memory.term = self._term(OpTerm(func, *known, order.index(id(each)), memory.term, draw))
        for number, each in enumerate(filter(is_tensor, tree_leaves(out))):
            if _key(each) in self._memories:
                continue  # it is that of an operand
            if first is not None:  # of which torch made a fake one first
                self.stands_for(each, first)
            else:
                self._memories[_key(each)] = StorageTerm(
                    _kept(each), self._term(OpTerm(func, *known, number, None, draw))
                )
        return out

    def _flat(self, value: Any) -> Hashable:
        """Arguments, with terms in place of tensors."""
        if isinstance(value, Tensor):
            return self.of(value)
        return self._several(value) if isinstance(value, (list, tuple, dict)) else ConstantArg(repr(value), value)

    def _several(self, value: Any) -> ArgTree:
        inside, names = (value.values(), tuple(value)) if isinstance(value, dict) else (value, ())
        return ArgTree(type(value), names, tuple([self._flat(each) for each in inside]))

    def _memory(self, tensor: Tensor) -> StorageTerm:
        key = _key(tensor)
        if key not in self._memories:
            self._memories[key] = StorageTerm(_kept(tensor), self._term(_content(tensor)))
        return self._memories[key]

    def _term(self, how: OpTerm | InputTerm | ConstantBytes) -> Term:
        if how not in self._numbers:
            self._numbers[how] = len(self.made)
            self.made.append(how)
        return self._numbers[how]


def is_tensor(value: object) -> bool:
    """Whether it is one."""
    return isinstance(value, Tensor)


def _is_strided(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested


def _kept(tensor: Tensor) -> Any:
    return tensor.untyped_storage() if _is_strided(tensor) else tensor


def _key(tensor: Tensor) -> int:
    """A key of the storage of a tensor."""
    return tensor.untyped_storage()._cdata if _is_strided(tensor) else -id(tensor)


def _content(tensor: Tensor) -> ConstantBytes | InputTerm:
    """The term of a tensor that no recorded op made."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not _is_strided(tensor):
        return _given(f"a tensor {id(tensor)}", tensor)
    with _disable_current_modes():
        full = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().cpu().untyped_storage())
        return ConstantBytes(full.numpy().tobytes())


def _given(name: str, tensor: Tensor) -> InputTerm:
    return InputTerm(name, tensor.dtype, tensor.untyped_storage().nbytes() if _is_strided(tensor) else 0)


def operands(how: OpTerm) -> list[Term]:
    """The operands of a term."""
    return [*_terms((how.args, how.kwargs)), *([] if how.was is None else [how.was])]


def places(how: OpTerm) -> list[TensorView]:
    """The tensors that an op is given."""
    return [*_places((how.args, how.kwargs))]


def _places(value: Hashable) -> Iterator[TensorView]:
    if isinstance(value, TensorView):
        yield value
    elif isinstance(value, tuple):
        for each in value.inside if isinstance(value, ArgTree) else value:
            yield from _places(each)


def _terms(value: Hashable) -> list[Term]:
    return [place.term for place in _places(value)]


MOST = 2**26
"""Bytes of the largest storage that is computed: what is larger is no table."""
Hows = Sequence[OpTerm | InputTerm | ConstantBytes]


def same_values(one: TensorView, other: TensorView, terms: ValueNumbering) -> bool:
    """Whether two tensors are equal, whatever the inputs."""
    front, met = [(one, other)], set[tuple[TensorView, TensorView]]()
    ways = [TermEvaluator(terms.made, draw) for draw in (torch.randn, torch.rand)]
    while front:
        pair = front.pop()
        if pair[0] == pair[1] or pair in met:
            continue
        met.add(pair)
        inside = _inside(*pair, terms.made)
        if inside is not None:
            front += inside
        elif terms.made_of(pair[:1]) != terms.made_of(pair[1:]) or not all(way.same(*pair) for way in ways):
            return False
    return True


def _inside(one: TensorView, other: TensorView, made: Hows) -> list[tuple[TensorView, TensorView]] | None:
    """The pairs of operands that must be equal for two tensors to be; None, if their ops differ."""
    ours, theirs = made[one.term], made[other.term]
    if one[1:] != other[1:] or not isinstance(ours, OpTerm) or not isinstance(theirs, OpTerm):
        return None
    if _form(ours) != _form(theirs):
        return None
    return [*zip(places(ours), places(theirs), strict=True)] if ours.was is None or theirs.was == ours.was else None


def _form(how: OpTerm) -> Hashable:
    """A term without the content of its operands."""
    forms = _formed(how.args), _formed(how.kwargs)
    return how.op, forms, how.number, how.was is None, how.draw


def _formed(value: Hashable) -> Hashable:
    if isinstance(value, TensorView):
        return value[1:]
    if isinstance(value, ArgTree):
        return value._replace(inside=tuple([_formed(each) for each in value.inside]))
    return value


class TermEvaluator:
    """An evaluation of terms, with random numbers, by ``draw``, as inputs."""

    def __init__(self, made: Hows, draw: Callable[..., Tensor]) -> None:
        self._made, self._draw = made, draw
        self._known: dict[Term, Any] = {}

    def same(self, one: TensorView, other: TensorView) -> bool:
        """Whether two tensors hold the same numbers."""
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        try:
            with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                ours, theirs = (_read(each, self._up_to(each.term)) for each in (one, other))
                known = self._draw is torch.randn or not ours.isnan().any()  # of a root, that is one in another draw
                return bool(known) and is_close(ours, theirs)
        except Exception:  # of what cannot be computed nothing is known
            return False

    def _up_to(self, term: Term) -> Mapping[Term, Any]:
        """The storages up to this term: operands have lower numbers."""
        front, needed = [term], set[Term]()
        while front:
            each = front.pop()
            if each not in needed and each not in self._known:
                needed.add(each)
                how = self._made[each]
                front += operands(how) if isinstance(how, OpTerm) else []
        for each in sorted(needed):
            self._known[each] = memory = self._memory(each, self._made[each])
            if memory.nbytes() > MOST:
                raise MemoryError(f"{memory.nbytes()} bytes")
        return self._known

    def _memory(self, term: Term, how: OpTerm | InputTerm | ConstantBytes) -> Any:
        if isinstance(how, ConstantBytes):
            return torch.frombuffer(bytearray(how.bytes or b"0"), dtype=torch.uint8).untyped_storage()
        if isinstance(how, InputTerm):
            return self._given(term, how)
        own = {each: self._known[each] for each in operands(how)}
        if how.op._schema.is_mutable:
            own = {each: memory.clone() for each, memory in own.items()}
        torch.default_generator.manual_seed(hash(how.draw) % 2**31)
        args, kwargs = _arguments(how.args, own), _arguments(how.kwargs, own)
        out = how.op(*args, **kwargs)
        found = [*filter(is_tensor, tree_leaves(out if how.was is None else (args, kwargs)))]
        return found[how.number].untyped_storage()

    def _given(self, term: Term, how: InputTerm) -> Any:
        if how.size > MOST:
            raise MemoryError(f"{how.size} bytes")
        count, numbers = how.size // how.dtype.itemsize, torch.Generator().manual_seed(term)
        if how.dtype is torch.bool or not (how.dtype.is_floating_point or how.dtype.is_complex):
            drawn = torch.randint(0, 2 if how.dtype.itemsize == 1 else 8, (count,), generator=numbers)
        else:
            drawn = self._draw(count, generator=numbers, dtype=torch.float64)
        return drawn.to(how.dtype).untyped_storage()


def _arguments(value: Any, memories: Mapping[Term, Any]) -> Any:
    if isinstance(value, TensorView):
        return _read(value, memories)
    if not isinstance(value, ArgTree):
        return value.value
    inside = [_arguments(each, memories) for each in value.inside]
    return dict(zip(value.names, inside, strict=True)) if value.names else value.kind(inside)


def _read(place: TensorView, memories: Mapping[Term, Any]) -> Tensor:
    """A tensor in its storage."""
    made = torch.empty(0, dtype=place.dtype).set_(memories[place.term], place.offset, place.shape, place.strides)
    made = torch._conj(made) if place.conjugate else made
    return torch._neg_view(made) if place.negative else made
