"""The update of parameters of equal blocks that a graph leaves out (:mod:`shardfx.ir.repeat`).

It is written for the blocks that are there; those that are left out are stepped as the one that they are like. So the
optimizer must have all of them alike: each parameter in the same group.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import replace

from shardfx.ir.repeat import Repeat
from shardfx.ir.unfolding.regular import Irregular

from .made_groups import Group
from .stepped import HeldState


def like(name: str, repeats: Iterable[Repeat]) -> str:
    """The parameter that one of a left-out block is like; another one itself."""
    for repeat in repeats:
        if repeat.within(name) in repeat.left_out:
            return repeat.moved(name, repeat.first - 1)
    return name


def stepped_names(group: Group, trained: Container[str], repeats: Iterable[Repeat]) -> tuple[str, ...]:
    """The names of a group's parameters that have gradients, in its order, also of those that are left out."""
    return tuple(name for name in group.names if like(name, repeats) in trained)


def check_alike(groups: Sequence[Group], repeats: Iterable[Repeat]) -> None:
    """Whether what is left out is in the groups of what it is like.

    Raises:
        Irregular: the optimizer tells blocks apart.
    """
    number = {name: group.number for group in groups for name in group.names}
    for repeat in repeats:
        for name in (name for name in number if repeat.within(name) in repeat.left_out):
            other = repeat.moved(name, repeat.first - 1)
            if number[name] != number.get(other):
                raise Irregular(
                    "equal blocks are stepped otherwise",
                    where=f"repeat {repeat}",
                    expected=f"{name!r} and {other!r} in one group of the optimizer",
                    got=f"groups {number[name]} and {number.get(other)}",
                )


def states_of_all(
    names: Iterable[str], states: Mapping[str, tuple[HeldState, ...]], repeats: Sequence[Repeat]
) -> dict[str, tuple[HeldState, ...]]:
    """The states of the parameters ``names``, of which those are known that are there."""
    return {name: tuple(_of(name, state, repeats) for state in states[like(name, repeats)]) for name in names}


def _of(name: str, state: HeldState, repeats: Sequence[Repeat]) -> HeldState:
    """A state of the parameter that ``name`` is like, as ``name`` has it."""
    own = state.name == f"{like(name, repeats)}.{state.key}"
    return replace(state, name=f"{name}.{state.key}") if own else state
