"""Repeated blocks of a model: found by a trace of its ops and left out, so that capture costs by distinct block.

The model runs once on abstract tensors, and what it calls is recorded in an :class:`OpTrace`. A *repeat* is a range
of blocks of one list (``model.layers.3`` to ``model.layers.79``) with equal calls: parameters of the same place and
kind, and whatever comes from the block before comes from the same call of it. :func:`shorten` keeps four blocks around
those that are left out; the trace of what is left must then be the first trace without the others.
:mod:`shardfx.ir.unfolding.unfold` puts them back into the graph, when it is planned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from shardfx.ir.repeat import AROUND, Repeat

from .abstract_tensors import OutcomeCache, UnknownOrigin
from .model_and_loss import ModelAndLoss

TRACED_WHOLE = "repeated blocks were traced one by one, which takes longer"


@dataclass(frozen=True)
class FoldedModel:
    """The model with as few blocks as are needed, and the repeats that were left out. ``note`` says why a model with
    long lists is not folded."""

    model: nn.Module
    repeats: tuple[Repeat, ...] = ()
    note: str = ""
    outcomes: OutcomeCache | None = None
    """The results of its calls, where it was run."""


def find_repeats(
    model: nn.Module, tensors: Sequence[torch.Tensor], program: MakeProgram, aliases: Mapping[str, str]
) -> FoldedModel:
    """Find the equal blocks of a model, and leave out those that unfolding can restore.

    Args:
        program: makes the program of a model without the blocks of some repeats.
        aliases: for every parameter the first name of the same tensor; blocks that share one by
            two names are not equal.
    """
    lists = numbered(model)
    if not lists:
        return FoldedModel(model)
    try:
        outcomes = OutcomeCache((*model.parameters(), *model.buffers(), *tensors))
        trace = record(program(model, ()), tensors, lists, outcomes)
        repeats = [r for path in lists if (r := trace.repeat(path)) is not None and _untied(r, aliases)]
        if not repeats:
            return FoldedModel(model, outcomes=outcomes)
        short = shorten(model, repeats)
        if record(program(short, repeats), tensors, lists, outcomes).calls == trace.without(repeats):
            return FoldedModel(short, tuple(repeats), outcomes=outcomes)
        why = "without some of its equal blocks the model calls other ops"
    except Exception as error:  # the whole model is captured then, which says what stands in the way of that
        why = f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
    return FoldedModel(model, note=f"{TRACED_WHOLE} ({why})")


def numbered(model: nn.Module) -> list[str]:
    """The paths of the lists that are long enough, of lists within lists the outer ones."""
    found: list[str] = []
    for path, module in model.named_modules():
        numbers = [int(name) for name in module._modules if name.isdigit()]
        enough = len(numbers) >= 2 * AROUND + LEAST and numbers == sorted(numbers)
        if path and enough and not any(path.startswith(outer + ".") for outer in found):
            found.append(path)
    return found


def _untied(repeat: Repeat, aliases: Mapping[str, str]) -> bool:
    """Whether no tensor of the blocks that are alike has two names."""
    alike = range(repeat.first - 1, repeat.last + 2)
    return not any(
        name != first and (repeat.within(name) in alike or repeat.within(first) in alike)
        for name, first in aliases.items()
    )


def shorten(model: nn.Module, repeats: Sequence[Repeat]) -> nn.Module:
    """A copy of the model without the blocks that are left out; the others keep their names and tensors."""
    left_out = {repeat.block(index) for repeat in repeats for index in repeat.left_out}

    def twin(module: nn.Module, path: str) -> nn.Module:
        if not any(name.startswith(path) for name in left_out):
            return module
        made = copy.copy(module)
        made.__dict__["_modules"] = {
            name: child if child is None else twin(child, f"{path}{name}.")
            for name, child in module._modules.items()
            if path + name not in left_out
        }
        return made

    return twin(model, "")


LEAST = 2
"""The minimum number of blocks that are left out."""
MOST_CONSTANT = 4096
"""Constants of the code with more elements are not compared; then nothing is left out."""


MakeProgram = Callable[[nn.Module, Sequence[Repeat]], ModelAndLoss]


# ---- the trace --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockResult:
    """A tensor that a call of this block made (``delta`` 0), or of the block before (-1)."""

    delta: int
    call: int
    result: int


@dataclass(frozen=True)
class TracedOp:
    """One op that was called; equal for equal calls at the same place of equal blocks."""

    op: Any
    arguments: object
    results: object
    grad: bool


BlockIndex = tuple[str, int] | None
"""A list and the block in it; None outside of lists."""


def record(
    program: ModelAndLoss, tensors: Sequence[torch.Tensor], lists: Sequence[str], outcomes: OutcomeCache
) -> OpTrace:
    """The trace of a program, which runs on abstract tensors; its model is not changed."""
    model = program.model
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    abstract = {name: outcomes.abstract(tensor) for name, tensor in state.items()}
    inputs = [outcomes.abstract(tensor) for tensor in tensors]
    trace = OpTrace(abstract, inputs, outcomes, lists)

    def enter(path: str) -> None:
        if (place := _block_of(path, lists)) is not None:
            trace.enter(place)

    swapped = nn.utils.stateless._reparametrize_module(model, abstract, tie_weights=True, stack_weights=True)
    with program.entering(enter), outcomes.mode, swapped, trace:  # in the other order: a module may have several places
        program(*inputs)
    return trace


def _block_of(path: str, lists: Sequence[str]) -> BlockIndex:
    for outer in lists:
        head, _, rest = path.partition(outer + ".")
        index = rest.partition(".")[0]
        if not head and index.isdigit():
            return outer, int(index)
    return None


def content(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """A key of a constant: its type and bytes; None for a large one, or one without content."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.numel() > MOST_CONSTANT:
        return None
    with _disable_current_modes():
        flat = tensor.detach().cpu().reshape(-1).view(torch.uint8)  # numpy knows no bfloat16
        return tuple(tensor.shape), tensor.dtype, flat.numpy().tobytes()


class OpTrace(TorchDispatchMode):
    """Records every op that is called, below autograd. A cast of a block's parameter, made before the first block as
    mixed precision does it, belongs to that block."""

    def __init__(
        self,
        stored: Mapping[str, torch.Tensor],
        inputs: Sequence[torch.Tensor],
        outcomes: OutcomeCache,
        lists: Sequence[str],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outcomes, self._lists = outcomes, lists
        self.segments: dict[BlockIndex, list[TracedOp]] = {None: []}
        self.order: list[BlockIndex] = []
        self._at: BlockIndex = None
        self._stored = {id(tensor): name for name, tensor in stored.items()}
        self._inputs = {id(tensor): i for i, tensor in enumerate(inputs)}
        self._made: dict[int, tuple[BlockIndex, int, int]] = {}
        self._users: dict[BlockIndex, set[BlockIndex]] = {}
        self._before: dict[BlockIndex, BlockIndex] = {None: None}
        self._sharing: set[BlockIndex] = set()
        self._alive: list[torch.Tensor] = []

    def enter(self, place: BlockIndex) -> None:
        """A module of a block is called: up to the next block all belongs to it."""
        if place != self._at:
            same_list = [other for other in self.order[-1:] if other and place and other[0] == place[0]]
            self._before[place] = same_list[0] if same_list else None
            self._at = place
            self.order.append(place)
            self.segments.setdefault(place, [])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and self._at is None and id(args[0]) in self._stored:
            self._at = _block_of(self._stored[id(args[0])], self._lists)
            try:
                return self._called(func, args, kwargs or {})
            finally:
                self._at = None
        return self._called(func, args, kwargs or {})

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        words = self._words((args, kwargs))
        out = self._outcomes.of(func, args, kwargs)
        calls = self.segments.setdefault(self._at, [])
        leaves = [out] if isinstance(out, torch.Tensor) else tree_leaves(out)
        for i, tensor in enumerate(leaves):
            if isinstance(tensor, torch.Tensor):
                self._made[id(tensor)] = (self._at, len(calls), i)
                self._alive.append(tensor)
        calls.append(TracedOp(func, words, _kinds(leaves), torch.is_grad_enabled()))
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
                return BlockResult(0 if place == self._at else -1, call, result)
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
            raise UnknownOrigin
        return "constant", known

    def _note_shared(self, tensor: torch.Tensor) -> None:
        if tensor.requires_grad:
            self._sharing.add(self._at)

    # ---- repeats ---------------------------------------------------------------------------------------

    @property
    def calls(self) -> list[tuple[BlockIndex, list[TracedOp]]]:
        """The ops that each block calls, in order."""
        return [(place, self.segments[place]) for place in (None, *self.order)]

    def without(self, repeats: Sequence[Repeat]) -> list[tuple[BlockIndex, list[TracedOp]]]:
        """The calls of a model without the blocks that are left out."""
        kept = []
        for place, calls in self.calls:
            if place is None or not any(place[0] == each.path and place[1] in each.left_out for each in repeats):
                kept.append((place, calls))
        return kept

    def repeat(self, path: str) -> Repeat | None:
        """The most equal blocks of a list that may be left out, if there are enough.

        Of a range of equal blocks the first and the last are kept, and their neighbours: a block that calls the same
        ops (as the first one of a model does, on other tensors), or else one more of the range. Where all use
        one value that has a gradient, the last block of all begins its sum, and is not like those before it.
        """
        indices = [place[1] for place in self.order if place is not None and place[0] == path]
        if not indices or indices != list(range(indices[0], indices[0] + len(indices))):
            return None
        ops = {index: [call.op for call in self.segments[path, index]] for index in indices}
        found = []
        for first, last in _segments({i: self.segments[path, i] for i in indices}):
            own = ops[first]
            first += ops.get(first - 1) != own
            last -= (path, last) in self._sharing or ops.get(last + 1, [])[: len(own)] != own
            if last - first > LEAST:
                found.append(Repeat(path, first + 1, last - 1))
        best = max(found, key=lambda repeat: len(repeat.left_out), default=None)
        return best if best is not None and all(self._closed(path, i) for i in best.left_out) else None

    def _closed(self, path: str, index: int) -> bool:
        """Whether only the next block uses what a block makes."""
        return self._users.get((path, index), set()) <= {(path, index), (path, index + 1)}


def _segments(forms: Mapping[int, list[TracedOp]]) -> Iterator[tuple[int, int]]:
    """The first and the last block of each contiguous range of equal ones."""
    for _, group in groupby(forms, key=lambda index: next(other for other in forms if forms[other] == forms[index])):
        indices = list(group)
        yield indices[0], indices[-1]


def _kinds(leaves: Sequence[Any]) -> object:
    return tuple([_kind(t) if isinstance(t, torch.Tensor) else repr(t) for t in leaves])


def _kind(tensor: torch.Tensor) -> object:
    made_by = type(tensor.grad_fn).__name__ if tensor.grad_fn is not None else ""
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad, isinstance(tensor, nn.Parameter), made_by
