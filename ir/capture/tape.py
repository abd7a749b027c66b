"""What a model calls, written on a tape: each op, its arguments, the autograd node behind each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

HEAD, TAIL = 3, 2
"""How many blocks of a run are kept at its begin and at its end."""
LEAST = HEAD + TAIL + 2
"""The shortest run that is worth leaving blocks out."""


@dataclass(frozen=True)
class Repeat:
    """The blocks ``path.first`` to ``path.last``, which are equal; those between head and tail are left out."""

    path: str
    first: int
    last: int

    @property
    def left_out(self) -> range:
        """The indices of the blocks that are not traced."""
        return range(self.first + HEAD, self.last - TAIL + 1)

    def block(self, index: int) -> str:
        """The module path of one block."""
        return f"{self.path}.{index}"

    def within(self, name: str) -> int | None:
        """The index of the block that a module or parameter lies in, or None."""
        if not name.startswith(self.path + "."):
            return None
        index = name[len(self.path) + 1 :].partition(".")[0]
        return int(index) if index.isdigit() else None

    def __contains__(self, name: str) -> bool:
        index = self.within(name)
        return index is not None and self.first <= index <= self.last


MOST_CONSTANT = 4096
"""Constants of the code with more elements are not compared; then nothing is left out."""


class Unknown(Exception):
    """A tensor whose origin was not seen."""


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


def record(model: nn.Module, tensors: Sequence[torch.Tensor], forward: Forward, lists: Sequence[str]) -> Tape:
    """The tape of a model: it runs on fake tensors, and nothing of it changes."""
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    mode = next((t.fake_mode for t in (*given.values(), *tensors) if isinstance(t, FakeTensor)), FakeTensorMode())

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if isinstance(tensor, FakeTensor) else mode.from_tensor(tensor, static_shapes=True)

    stored = {name: fake(tensor) for name, tensor in given.items()}
    inputs = [fake(tensor) for tensor in tensors]
    tape = Tape(stored, inputs)
    handles = [
        module.register_forward_pre_hook(lambda *_, at=place: tape.enter(at))
        for path, module in model.named_modules()
        if (place := _place(path, lists)) is not None
    ]
    try:
        with mode, nn.utils.stateless._reparametrize_module(model, stored, tie_weights=True), tape:
            forward(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    return tape


def _place(path: str, lists: Sequence[str]) -> Place:
    for outer in lists:
        index = Repeat(outer, 0, 0).within(path)
        if index is not None:
            return outer, index
    return None


class Tape(TorchDispatchMode):
    """Writes down every op that is called, below autograd."""

    def __init__(self, stored: Mapping[str, torch.Tensor], inputs: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segments: dict[Place, list[TapedCall]] = {None: []}
        self.order: list[Place] = []
        self._at: Place = None
        self._stored = {id(tensor): name for name, tensor in stored.items()}
        self._inputs = {id(tensor): i for i, tensor in enumerate(inputs)}
        self._made: dict[int, tuple[Place, int, int]] = {}
        self._users: dict[Place, set[Place]] = {}
        self._before: dict[Place, Place] = {None: None}
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
        if func is torch.ops.prim.device.default:
            return func(*args, **kwargs)
        words = self._words((args, kwargs))
        out = func(*args, **kwargs)
        calls = self.segments[self._at]
        for i, tensor in enumerate(tree_leaves(out)):
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = (self._at, len(calls), i)
                self._alive.append(tensor)
        calls.append(TapedCall(func, words, _kinds(out), torch.is_grad_enabled()))
        return out

    def _words(self, arg: Any) -> object:
        if isinstance(arg, torch.Tensor):
            return self._word(arg), _kind(arg)
        if isinstance(arg, Mapping):
            return tuple((key, self._words(value)) for key, value in arg.items())
        if isinstance(arg, (list, tuple)):
            return tuple(self._words(a) for a in arg)
        return type(arg).__name__, repr(arg)

    def _word(self, tensor: torch.Tensor) -> object:
        if id(tensor) in self._made:
            place, call, result = self._made[id(tensor)]
            self._users.setdefault(place, set()).add(self._at)
            if place is not None and place in (self._at, self._before[self._at]):
                return Made(0 if place == self._at else -1, call, result)
            return place, call, result
        if id(tensor) in self._stored:
            name = self._stored[id(tensor)]
            block = ".".join(map(str, self._at)) + "." if self._at is not None else "."
            return ("own", name[len(block) :]) if name.startswith(block) else ("stored", name)
        if id(tensor) in self._inputs:
            return "input", self._inputs[id(tensor)]
        if isinstance(tensor, FakeTensor) or tensor.numel() > MOST_CONSTANT:
            raise Unknown
        with _disable_current_modes():
            return "constant", tensor.detach().cpu().numpy().tobytes()

    # ---- reading it ---------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[tuple[Place, list[TapedCall]]]:
        """What each block calls, in order."""
        return [(place, self.segments[place]) for place in (None, *self.order)]

    def without(self, runs: Sequence[Repeat]) -> list[tuple[Place, list[TapedCall]]]:
        """The calls that a model without the blocks that are left out must make."""
        kept = []
        for place, calls in self.calls:
            run = next((run for run in runs if place is not None and place[0] == run.path), None)
            if run is None or place is None or place[1] not in run.left_out:
                kept.append((place, calls))
        return kept

    def runs(self, path: str) -> Iterator[Repeat]:
        """The longest run of a list, if there is one that is long enough."""
        indices = [place[1] for place in self.order if place is not None and place[0] == path]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            return
        best = max(_stretches(path, {i: self.segments[path, i] for i in indices}), key=lambda run: run.last - run.first)
        if best.last - best.first + 1 >= LEAST and all(self._closed(path, i) for i in best.left_out):
            yield best

    def _closed(self, path: str, index: int) -> bool:
        """Whether only the next block uses what a block makes."""
        return self._users.get((path, index), set()) <= {(path, index), (path, index + 1)}


def _stretches(path: str, forms: Mapping[int, list[TapedCall]]) -> Iterator[Repeat]:
    """The stretches of equal blocks."""
    run: Repeat | None = None
    for index, form in forms.items():
        if run is not None and form == forms[run.first]:
            run = replace(run, last=index)
        else:
            if run is not None:
                yield run
            run = Repeat(path, index, index)
    if run is not None:
        yield run


def _kinds(tree: Any) -> object:
    return tuple(_kind(t) if isinstance(t, torch.Tensor) else repr(t) for t in tree_leaves(tree))


def _kind(tensor: torch.Tensor) -> object:
    made_by = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter), made_by
