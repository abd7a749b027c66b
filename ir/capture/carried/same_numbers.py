"""Whether two tensors hold the same though they are made otherwise: a table, and the first rows of a longer one.

Their terms are followed down to what differs, and that is computed, of random numbers in the place of what goes in.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardfx.ir.capture.compared.rounding import SHARE, is_rounding, unit

from .how_made import Content, Given, Made, Place, Several, Term, Terms, is_tensor, operands, places

MOST = 2**26
"""Bytes of a memory that is computed: what is as large is no table."""
Hows = Sequence[Made | Given | Content]


def alike(one: Place, other: Place, terms: Terms) -> bool:
    """Whether two tensors hold the same, whatever goes in."""
    front, met = [(one, other)], set[tuple[Place, Place]]()
    ways = [Computed(terms.made, draw) for draw in (torch.randn, torch.rand)]
    while front:
        pair = front.pop()
        if pair[0] == pair[1] or pair in met:
            continue
        met.add(pair)
        inside = _inside(*pair, terms.made)
        if inside is not None:
            front += inside
        elif terms.made_of(pair[:1]) != terms.made_of(pair[1:]) or not all(way.alike(*pair) for way in ways):
            return False
    return True


def _inside(one: Place, other: Place, made: Hows) -> list[tuple[Place, Place]] | None:
    """The operands that are to be alike for two tensors to be; None, if they are not made by one op of such forms."""
    ours, theirs = made[one.term], made[other.term]
    if one[1:] != other[1:] or not isinstance(ours, Made) or not isinstance(theirs, Made):
        return None
    if _form(ours) != _form(theirs):
        return None
    return [*zip(places(ours), places(theirs), strict=True)] if ours.was is None or theirs.was == ours.was else None


def _form(how: Made) -> Hashable:
    """An op, and what it is given, but for what its operands hold."""
    forms = _formed(how.args), _formed(how.kwargs)
    return how.op, forms, how.number, how.was is None, how.draw


def _formed(value: Hashable) -> Hashable:
    if isinstance(value, Place):
        return value[1:]
    if isinstance(value, Several):
        return value._replace(inside=tuple([_formed(each) for each in value.inside]))
    return value


class Computed:
    """Memories of random numbers in the place of what goes in, by ``draw``, and of what is made of these."""

    def __init__(self, made: Hows, draw: Callable[..., Tensor]) -> None:
        self._made, self._draw = made, draw
        self._known: dict[Term, Any] = {}

    def alike(self, one: Place, other: Place) -> bool:
        """Whether two tensors hold the same numbers."""
        if (one.shape, one.dtype) != (other.shape, other.dtype):
            return False
        try:
            with _disable_current_modes(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                ours, theirs = (_read(each, self._up_to(each.term)) for each in (one, other))
                known = self._draw is torch.randn or not ours.isnan().any()  # of a root, that is one in another draw
                return bool(known) and is_rounding(ours, theirs, unit(one.dtype) ** SHARE)
        except Exception:  # of what cannot be computed nothing is known
            return False

    def _up_to(self, term: Term) -> Mapping[Term, Any]:
        """The memories, with this one: what one is made of has a lower number."""
        front, needed = [term], set[Term]()
        while front:
            each = front.pop()
            if each not in needed and each not in self._known:
                needed.add(each)
                how = self._made[each]
                front += operands(how) if isinstance(how, Made) else []
        for each in sorted(needed):
            self._known[each] = memory = self._memory(each, self._made[each])
            if memory.nbytes() > MOST:
                raise MemoryError(f"{memory.nbytes()} bytes")
        return self._known

    def _memory(self, term: Term, how: Made | Given | Content) -> Any:
        if isinstance(how, Content):
            return torch.frombuffer(bytearray(how.bytes or b"0"), dtype=torch.uint8).untyped_storage()
        if isinstance(how, Given):
            return self._given(term, how)
        own = {each: self._known[each] for each in operands(how)}
        if how.op._schema.is_mutable:
            own = {each: memory.clone() for each, memory in own.items()}
        torch.default_generator.manual_seed(hash(how.draw) % 2**31)
        args, kwargs = _arguments(how.args, own), _arguments(how.kwargs, own)
        out = how.op(*args, **kwargs)
        found = [*filter(is_tensor, tree_leaves(out if how.was is None else (args, kwargs)))]
        return found[how.number].untyped_storage()

    def _given(self, term: Term, how: Given) -> Any:
        if how.size > MOST:
            raise MemoryError(f"{how.size} bytes")
        count, numbers = how.size // how.dtype.itemsize, torch.Generator().manual_seed(term)
        if how.dtype is torch.bool or not (how.dtype.is_floating_point or how.dtype.is_complex):
            drawn = torch.randint(0, 2 if how.dtype.itemsize == 1 else 8, (count,), generator=numbers)
        else:
            drawn = self._draw(count, generator=numbers, dtype=torch.float64)
        return drawn.to(how.dtype).untyped_storage()


def _arguments(value: Any, memories: Mapping[Term, Any]) -> Any:
    if isinstance(value, Place):
        return _read(value, memories)
    if not isinstance(value, Several):
        return value.value
    inside = [_arguments(each, memories) for each in value.inside]
    return dict(zip(value.names, inside, strict=True)) if value.names else value.kind(inside)


def _read(place: Place, memories: Mapping[Term, Any]) -> Tensor:
    """A tensor that lies in a memory."""
    made = torch.empty(0, dtype=place.dtype).set_(memories[place.term], place.offset, place.shape, place.strides)
    made = torch._conj(made) if place.conjugate else made
    return torch._neg_view(made) if place.negative else made
