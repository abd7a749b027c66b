"""Provenance of shardings: each sharding of a value is a decision that records its cause.

No pass goes by them: they are for who asks why. A graph carries them, and its text has them on request
(:mod:`shardfx.ir.text.reason_lines`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from .dim_sharding import DimSharding
from .node import NOWHERE, Value, Where


class Carrier(NamedTuple):
    """The tensor and dim from which an op propagated an axis."""

    axis: str
    value: Value
    dim: int


class Refused(NamedTuple):
    """A rejected alternative, in words, and perhaps the value that they are about."""

    text: str
    value: Value | None = None


@dataclass(eq=False)
class ShardingDecision:
    """The decision to shard a dim of a value: its cause, and what was rejected.

    ``op`` is the op that carried the sharding on (empty: none did), ``where`` its source, ``carriers`` the tensors from
    which it came, ``causes`` the decisions that gave it to them; a hint has none of these.
    """

    value: Value
    dim: int
    sharding: DimSharding
    level: str = ""
    hint: str = ""
    refused: tuple[Refused, ...] = ()
    op: str = ""
    where: Where = NOWHERE
    carriers: tuple[Carrier, ...] = ()
    causes: tuple[ShardingDecision, ...] = ()

    @property
    def how(self) -> str:
        """The hint, or through which kind of op, or by which pass."""
        return f"the hint {self.hint!r}" if self.hint else self.level

    @cached_property
    def step(self) -> int:
        """One for a hint; else one more than the steps of its causes, so that it is behind them."""
        open_ = [self]
        while "step" not in vars(self):  # a walk, for a chain of causes goes through all blocks of a model
            made = open_[-1]
            missing = [each for each in made.causes if "step" not in vars(each)]
            open_ += missing
            if not missing:
                vars(open_.pop())["step"] = 1 + max((each.step for each in made.causes), default=0)
        return self.step

    @property
    def values(self) -> Iterator[Value]:
        """All values that the decision refers to."""
        yield self.value
        yield from (each.value for each in self.carriers)
        yield from (each.value for each in self.refused if each.value is not None)

    def down(self, name: Callable[[Value], str]) -> str:
        """The rejected alternatives, in words."""
        return ", ".join(text + (f" of {name(value)}" if value is not None else "") for text, value in self.refused)

    def moved(self, change: Callable[[Value], Value]) -> ShardingDecision:
        """The same decision about other values; its causes are still the old ones."""
        return replace(
            self,
            value=change(self.value),
            refused=tuple([Refused(text, value and change(value)) for text, value in self.refused]),
            carriers=tuple([Carrier(axis, change(value), dim) for axis, value, dim in self.carriers]),
        )


ByValue = dict[Value, list[ShardingDecision]]


class Reasons:
    """The decisions of a graph by value, each value's in the order in which they were made.

    What is to be said of many values alike is put off until somebody asks: planning does not.
    """

    def __init__(self, made: Mapping[Value, Sequence[ShardingDecision]] | None = None) -> None:
        self._made: ByValue = {value: list(each) for value, each in (made or {}).items()}
        self._later: list[Callable[[ByValue], None]] = []

    def of(self, value: Value) -> Sequence[ShardingDecision]:
        """Why a value is sharded as it is."""
        return self._all().get(value, ())

    def __iter__(self) -> Iterator[ShardingDecision]:
        """All decisions, those of one value together."""
        return (each for several in self._all().values() for each in several)

    @property
    def values(self) -> Iterator[Value]:
        """All values that the decisions refer to."""
        return (value for each in self for value in each.values)

    def __bool__(self) -> bool:
        return bool(self._made or self._later)

    def add(self, made: ShardingDecision) -> None:
        """A decision behind those that there are."""
        self._later.append(lambda all_: all_.setdefault(made.value, []).append(made))

    def later(self, change: Callable[[ByValue], None]) -> None:
        """Change the decisions by value, when somebody asks."""
        if self:
            self._later.append(change)

    def moved(self, change: Callable[[Value], Value]) -> Reasons:
        """The same decisions about the values of another graph, mapped lazily."""
        found = Reasons()
        if self:
            found._made = dict(self._made)

            def take(made: ByValue) -> None:
                copies = {each: each.moved(change) for each in self}
                for each in copies.values():
                    each.causes = tuple([copies.get(cause, cause) for cause in each.causes])
                made.clear()
                for each in copies.values():
                    made.setdefault(each.value, []).append(each)

            found._later.append(take)
        return found

    def _all(self) -> ByValue:
        while self._later:
            self._later.pop(0)(self._made)
            for made in (each for several in self._made.values() for each in several):
                vars(made).pop("step", None)  # there are other causes now
        return self._made
