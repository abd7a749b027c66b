"""What a model's code asks of tensors beside their shapes, dtypes and content: a call that answers otherwise is another
form, and is planned from examples that answer as it does.

    a is b          x.is_contiguous()          h.requires_grad

Which of them the code asks is told by what it names (see :mod:`shardfx.ir.capture.python_state.bytecode`): of code that
does not, inputs that lie otherwise, or are one, are served by the same programs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from shardfx.ir.capture.python_state.bytecode import asks_which
from shardfx.ir.capture.python_state.python_state import ASKS_FOR_GRADIENTS
from shardfx.ir.spec import TensorType, laid_of, lying, strides_of

ASKS_HOW_IT_LIES = frozenset(
    "is_contiguous stride strides as_strided dim_order storage_offset is_non_overlapping_and_dense".split()
)
"""What code names that goes by how a tensor lies in memory."""


@dataclass(frozen=True)
class Laid:
    """How a tensor lies in memory: its dims from the slowest to the fastest, or its strides where there are gaps."""

    dims: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()

    @staticmethod
    def of(tensor: torch.Tensor, part: bool) -> Laid:
        """How an input lies; a ``part`` of it as the whole would, without the gaps that it has as a part."""
        dims = laid_of(tensor)
        if dims or tensor.stride() == strides_of(tensor.shape):
            return Laid(dims)
        strides = tensor.stride()
        order = tuple(sorted(range(len(strides)), key=lambda dim: -strides[dim]))
        if part:
            return Laid(order if order != tuple(range(tensor.dim())) else ())
        return Laid(order, strides)

    def example(self, type: TensorType, like: torch.Tensor | None) -> torch.Tensor:
        """A tensor that lies so: with the content of ``like``, or without any."""
        strides = self.strides or strides_of(type.shape, self.dims)
        if like is None:
            return torch.empty_strided(type.shape, strides, dtype=type.dtype, device="meta")
        return lying(like, strides)

    def __str__(self) -> str:
        if self.strides:
            return f"strides {self.strides}"
        return f"dims in memory in the order {self.dims}" if self.dims else "contiguous"


@dataclass(frozen=True)
class Asked:
    """What the code asks, and what the tensors of a call answer; nothing where it does not ask.

    ``trainable``: the parameters and inputs with ``requires_grad``; ``laid``: how inputs lie that are not contiguous;
    ``same``: inputs that are one tensor with an earlier one, and which.
    """

    trainable: frozenset[str] = frozenset()
    laid: frozenset[tuple[str, Laid]] = frozenset()
    same: frozenset[tuple[str, str]] = frozenset()

    @property
    def words(self) -> dict[str, str]:
        """The answers by subject."""
        found = {f"memory of {name}": str(laid) for name, laid in sorted(self.laid, key=str)}
        found |= {f"tensor of {name}": f"that of {first}" for name, first in sorted(self.same)}
        return found | {f"requires_grad of {name}": "yes" for name in sorted(self.trainable)}

    def differences(self, other: Asked) -> Iterator[str]:
        """In what another call answers otherwise, in words."""
        mine, theirs = self.words, other.words
        usual = {"memory": "contiguous", "tensor": "another one", "requires_grad": "no"}
        for subject in sorted(mine.keys() | theirs.keys()):
            if mine.get(subject) != theirs.get(subject):
                yield f"{subject} is {theirs.get(subject, usual[subject.split()[0]])}, for which the code asks"

    def examples(self) -> Examples:
        """Tensors that answer alike."""
        return Examples(dict(self.laid), dict(self.same), {})


NOTHING = Asked()


@dataclass(frozen=True)
class Examples:
    """Makes example inputs for a form of call, that lie as its inputs do, and are one where they are."""

    laid: Mapping[str, Laid]
    same: Mapping[str, str]
    made: dict[str, torch.Tensor]

    def make(self, name: str, type: TensorType, like: torch.Tensor | None, wants: bool) -> torch.Tensor:
        """One, with the content of ``like`` or without any."""
        first = self.same.get(name, name)
        if first not in self.made:
            self.made[first] = self.laid.get(name, Laid()).example(type, like).requires_grad_(wants)
        return self.made[first]


@dataclass(frozen=True)
class Asks:
    """What code asks, by what it names."""

    gradients: bool
    memory: bool
    identity: bool

    @staticmethod
    def of(named: Collection[str]) -> Asks:
        """What code asks that names these."""
        gradients, memory = (not each.isdisjoint(named) for each in (ASKS_FOR_GRADIENTS, ASKS_HOW_IT_LIES))
        return Asks(gradients, memory, asks_which(named))

    def of_call(
        self,
        tensors: Mapping[str, torch.Tensor],
        types: Mapping[str, object],
        trainable: Callable[[], Collection[str]],
    ) -> Asked:
        """What the tensors of a call answer, which are given whole where they are of these types."""
        laid = frozenset[tuple[str, Laid]]()
        if self.memory:
            parts = {name: TensorType(tuple(each.shape), each.dtype) != types[name] for name, each in tensors.items()}
            every = ((name, Laid.of(each, parts[name])) for name, each in tensors.items())
            laid = frozenset((name, laid) for name, laid in every if laid != Laid())
        same = frozenset[tuple[str, str]]()
        if self.identity:
            first: dict[int, str] = {}
            pairs = ((name, first.setdefault(id(each), name)) for name, each in tensors.items())
            same = frozenset((name, other) for name, other in pairs if name != other)
        return Asked(frozenset(trainable()) if self.gradients else frozenset(), laid, same)
