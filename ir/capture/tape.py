"""What a model calls, written on a tape: each op, its arguments, the autograd node behind each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardfx.ir.repeat import Repeat

from .shells import Outcomes, Unknown

LEAST = 2
"""So few blocks are worth leaving out."""
MOST_CONSTANT = 4096
"""Constants of the code with more elements are not compared; then nothing is left out."""


Forward = Callable[[nn.Module, Sequence[torch.Tensor]], Any]
"""Runs a model on the tensors of an example."""


# ---- what a model calls --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Made:
    """A tensor that a call of this block made (``delta`` 0), or of the block before (-1)."""

    delta: int
    call: int
    result: int


@dataclass(frozen=True)
class TapedCall:
    """One op that was called; equal for equal calls at the same place of equal blocks."""

    op: Any
    arguments: object
    results: object
    grad: bool


Place = tuple[str, int] | None
"""In which block of which list, or in none."""


def record(
    model: nn.Module, tensors: Sequence[torch.Tensor], forward: Forward, lists: Sequence[str], outcomes: Outcomes
) -> Tape:
    """The tape of a model: it runs on shells, and nothing of it changes."""
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    stored = {name: outcomes.shell(tensor) for name, tensor in given.items()}
    inputs = [outcomes.shell(tensor) for tensor in tensors]
    tape = Tape(stored, inputs, outcomes)
    handles = [
        module.register_forward_pre_hook(lambda *_, at=place: tape.enter(at))
        for path, module in model.named_modules()
        if (place := _place(path, lists)) is not None
    ]
    try:
        swapped = nn.utils.stateless._reparametrize_module(model, stored, tie_weights=True, stack_weights=True)
        with outcomes.mode, swapped, tape:  # put back in the other order: a module may stand in several places
            forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return tape


def _place(path: str, lists: Sequence[str]) -> Place:
    for outer in lists:
        head, _, rest = path.partition(outer + ".")
        index = rest.partition(".")[0]
        if not head and index.isdigit():
            return outer, int(index)
    return None


def content(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """What makes two constants the same: type and bytes; None for a large one, and for one without content."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > MOST_CONSTANT:
        return None
    with _disable_current_modes():
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)  # numpy knows no bfloat16
        return tuple(tensor.shape), tensor.dtype, flat.numpy().tobytes()


class Tape(TorchDispatchMode):
    """Writes down every op that is called, below autograd."""

    def __init__(self, stored: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor], outcomes: Outcomes) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outcomes = outcomes
        self.segments: dict[Place, list[TapedCall]] = {None: []}
        self.order: list[Place] = []
        self._at: Place = None
        self._stored = {id(tensor): name for name, tensor in stored.items()}
        self._inputs = {id(tensor): i for i, tensor in enumerate(inputs)}
        self._made: dict[int, tuple[Place, int, int]] = {}
        self._users: dict[Place, set[Place]] = {}
        self._before: dict[Place, Place] = {None: None}
        self._sharing: set[Place] = set()
        self._alive: list[torch.Tensor] = []

    def enter(self, place: Place) -> None:
        """A module of a block is called: up to the next block all belongs to it."""
        if place != self._at:
            same_list = [other for other in self.order[-1:] if other and place and other[0] == place[0]]
            self._before[place] = same_list[0] if same_list else None
            self._at = place
            self.order.append(place)
            self.segments.setdefault(place, [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        words = self._words((args, kwargs))
        out = self._outcomes.of(func, args, kwargs)
        calls = self.segments[self._at]
        leaves = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
        for i, tensor in enumerate(leaves):
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = (self._at, len(calls), i)
                self._alive.append(tensor)
        calls.append(TapedCall(func, words, _kinds(leaves), torch.is_grad_enabled()))
        return out

    def _words(self, arg: Any) -> object:
        if isinstance(arg, torch.Tensor):
            return self._word(arg), _kind(arg)
        if isinstance(arg, (list, tuple)):
            return tuple([self._words(a) for a in arg])
        if isinstance(arg, dict):
            return tuple([(key, self._words(value)) for key, value in arg.items()])
        return type(arg).__name__, repr(arg)

    def _word(self, tensor: torch.Tensor) -> object:
        if id(tensor) in self._made:
            place, call, result = self._made[id(tensor)]
            self._users.setdefault(place, set()).add(self._at)
            if place is not None and place in (self._at, self._before[self._at]):
                return Made(0 if place == self._at else -1, call, result)
            self._note_shared(tensor)
            return place, call, result
        if id(tensor) in self._stored:
            name = self._stored[id(tensor)]
            block = ".".join(map(str, self._at)) + "." if self._at is not None else "."
            if name.startswith(block):
                return "own", name[len(block) :]
            self._note_shared(tensor)
            return "stored", name
        if id(tensor) in self._inputs:
            return "input", self._inputs[id(tensor)]
        known = content(tensor)
        if known is None:
            raise Unknown
        return "constant", known

    def _note_shared(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            self._sharing.add(self._at)

    # ---- reading it ---------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[tuple[Place, list[TapedCall]]]:
        """What each block calls, in order."""
        return [(place, self.segments[place]) for place in (None, *self.order)]

    def without(self, repeats: Sequence[Repeat]) -> list[tuple[Place, list[TapedCall]]]:
        """The calls that a model without the blocks that are left out must make."""
        kept = []
        for place, calls in self.calls:
            if place is None or not any(place[0] == each.path and place[1] in each.left_out for each in repeats):
                kept.append((place, calls))
        return kept

    def repeat(self, path: str) -> Repeat | None:
        """The most equal blocks of a list that may be left out, if there are enough.

        Of a stretch of equal blocks the first and the last stay, and what stands beside these: a block that calls the
        same ops (as the first one of a model does, on other tensors), or else one more of the stretch. Where all use
        one value that has a gradient, the last block of all begins its sum, and is not like those before it.
        """
        indices = [place[1] for place in self.order if place is not None and place[0] == path]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            return None
        ops = {index: [call.op for call in self.segments[path, index]] for index in indices}
        found = []
        for first, last in _stretches({i: self.segments[path, i] for i in indices}):
            own = ops[first]
            first += ops.get(first - 1) != own
            last -= self._shares(path, last) or ops.get(last + 1, [])[: len(own)] != own
            if last - first > LEAST:
                found.append(Repeat(path, first + 1, last - 1))
        best = max(found, key=lambda repeat: len(repeat.left_out), default=None)
        return best if best is not None and all(self._closed(path, i) for i in best.left_out) else None

    def _shares(self, path: str, index: int) -> bool:
        """Whether a block uses a value with a gradient that is neither its own nor of the block before."""
        return (path, index) in self._sharing

    def _closed(self, path: str, index: int) -> bool:
        """Whether only the next block uses what a block makes."""
        return self._users.get((path, index), set()) <= {(path, index), (path, index + 1)}


def _stretches(forms: Mapping[int, list[TapedCall]]) -> Iterator[tuple[int, int]]:
    """The first and the last block of each stretch of equal ones."""
    for _, group in groupby(forms, key=lambda index: next(other for other in forms if forms[other] == forms[index])):
        indices = list(group)
        yield indices[0], indices[-1]


def _kinds(leaves: Sequence[Any]) -> object:
    return tuple([_kind(t) if isinstance(t, torch.Tensor) else repr(t) for t in leaves])


def _kind(tensor: torch.Tensor) -> object:
    made_by = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter), made_by
