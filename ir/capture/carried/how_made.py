"""What a tensor holds, known by how it was made: of which op, of which operands, down to what went in.

    x.mean() + self.bias    ->    add(mean(args.0), bias)

Two tensors of the same term hold the same numbers, whatever these are, so that nothing is computed. It is a memory that
has a term, and a tensor is a place in one: what is written into a tensor is written into all that share its memory.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardfx.ir.ops.traits import draws

Term = int
"""The number of how a memory was made; what is made alike has one number."""


class Place(NamedTuple):
    """A tensor: the term of its memory, and where in it its elements are."""

    term: Term
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    conjugate: bool
    negative: bool


@dataclass(frozen=True)
class Plain:
    """An argument that is no tensor: ``1`` is not ``1.0``."""

    said: str
    value: object = field(compare=False)


class Several(NamedTuple):
    """A list, tuple or dict of arguments."""

    kind: type
    names: tuple[str, ...]
    inside: tuple[Hashable, ...]


class Made(NamedTuple):
    """How a memory is made: by an op, as its result of this ``number``; or as what the op leaves in a memory that it
    writes into, ``was``, which is that of the tensor of this ``number`` among its operands. ``draw`` is the number of a
    draw of random numbers, and of which call."""

    op: Any
    args: Several
    kwargs: Several
    number: int
    was: Term | None = None
    draw: tuple[str, int] | None = None


class Given(NamedTuple):
    """What goes in, by name; and how many bytes it has."""

    name: str
    dtype: torch.dtype
    size: int


class Content(NamedTuple):
    """A tensor that the code holds: what there is in its memory."""

    bytes: bytes


@dataclass
class Memory:
    """What is in a tensor's memory now. ``kept``: which is not let go, so that no other takes its place."""

    kept: object
    term: Term


class Terms(TorchDispatchMode):
    """Within, it is noted how each tensor is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._call, self._draws = "", 0
        self._numbers: dict[Hashable, Term] = {}
        self.made: list[Made | Given | Content] = []
        """How, by term."""
        self._memories: dict[int, Memory] = {}

    def begin(self, call: str) -> None:
        """A call of this name begins; what it draws is its own."""
        self._call, self._draws = call, 0

    def give(self, tensors: Mapping[str, Tensor]) -> None:
        """What is in these tensors goes in, by name."""
        for name, tensor in tensors.items():
            self._memory(tensor).term = self._term(_given(name, tensor))

    def stands_for(self, tensor: Tensor, other: Tensor) -> None:
        """The memory of a tensor is that of another one."""
        self._memories[_key(tensor)] = memory = self._memory(other)
        memory.kept = (memory.kept, _kept(tensor))

    def of(self, tensor: Tensor) -> Place:
        """What a tensor holds."""
        strided = _is_strided(tensor)
        strides, offset = (tensor.stride(), int(tensor.storage_offset())) if strided else ((), 0)
        flipped = tensor.is_conj(), tensor.is_neg()
        return Place(self._memory(tensor).term, tuple(tensor.shape), strides, offset, tensor.dtype, *flipped)

    def made_of(self, places: Iterable[Hashable]) -> set[str]:
        """What goes into these, by name; and the calls that drew random numbers for them."""
        front, found, met = [*_terms(tuple(places))], set[str](), set[Term]()
        while front:
            term = front.pop()
            if term in met:
                continue
            met.add(term)
            how = self.made[term]
            if isinstance(how, Given):
                found.add(how.name)
            elif isinstance(how, Made):
                found |= {how.draw[0]} if how.draw is not None else set()
                front += operands(how)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = self._several(args), self._several(kwargs)
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
                        memory.term = self._term(Made(func, *given, order.index(id(each)), memory.term, draw))
        for number, each in enumerate(filter(is_tensor, tree_leaves(out))):
            if _key(each) in self._memories:
                continue  # it is that of an operand
            if first is not None:  # of which torch made a fake one first
                self.stands_for(each, first)
            else:
                self._memories[_key(each)] = Memory(_kept(each), self._term(Made(func, *given, number, None, draw)))
        return out

    def _flat(self, value: Any) -> Hashable:
        """Arguments, with what tensors hold in their place."""
        if isinstance(value, Tensor):
            return self.of(value)
        return self._several(value) if isinstance(value, (list, tuple, dict)) else Plain(repr(value), value)

    def _several(self, value: Any) -> Several:
        inside, names = (value.values(), tuple(value)) if isinstance(value, dict) else (value, ())
        return Several(type(value), names, tuple([self._flat(each) for each in inside]))

    def _memory(self, tensor: Tensor) -> Memory:
        key = _key(tensor)
        if key not in self._memories:
            self._memories[key] = Memory(_kept(tensor), self._term(_content(tensor)))
        return self._memories[key]

    def _term(self, how: Made | Given | Content) -> Term:
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
    """The same for tensors that share their memory."""
    return tensor.untyped_storage()._cdata if _is_strided(tensor) else -id(tensor)


def _content(tensor: Tensor) -> Content | Given:
    """What is in the memory of a tensor that was met before it was made."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or not _is_strided(tensor):
        return _given(f"a tensor {id(tensor)}", tensor)
    with _disable_current_modes():
        whole = torch.empty(0, dtype=torch.uint8).set_(tensor.detach().cpu().untyped_storage())
        return Content(whole.numpy().tobytes())


def _given(name: str, tensor: Tensor) -> Given:
    return Given(name, tensor.dtype, tensor.untyped_storage().nbytes() if _is_strided(tensor) else 0)


def operands(how: Made) -> list[Term]:
    """The terms of which a memory is made."""
    return [*_terms((how.args, how.kwargs)), *([] if how.was is None else [how.was])]


def places(how: Made) -> list[Place]:
    """The tensors that an op is given."""
    return [*_places((how.args, how.kwargs))]


def _places(value: Hashable) -> Iterator[Place]:
    if isinstance(value, Place):
        yield value
    elif isinstance(value, tuple):
        for each in value.inside if isinstance(value, Several) else value:
            yield from _places(each)


def _terms(value: Hashable) -> list[Term]:
    return [place.term for place in _places(value)]
