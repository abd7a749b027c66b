"""Does a model carry something from call to call, beside its buffers? A program keeps nothing else.

    if self.mean is None: self.mean = x.mean()        self.noise = torch.randn(4), drawn once        self.calls += 1

Where a forward changes what its modules or its code hold, it is called again behind another call, without numbers: what
it makes there, of another batch, is to be made as in a first call. So may be kept what is the same at each call, such
as a mask by its size, and what others look at.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.capture.decisions import with_numbers
from shardfx.ir.capture.intake.contents import Contents
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.model_and_loss import ModelAndLoss
from shardfx.ir.capture.named.left_as_found import left_as_found
from shardfx.ir.errors import Error
from shardfx.ir.spec import as_it_lies

from .earlier import Earlier
from .how_made import Place, Terms
from .kept import MODEL, attributes, keeps, not_known
from .same_numbers import alike

FIRST, SECOND = "first", "second"
"""The calls: what goes into each has its name in front."""


class Called(NamedTuple):
    """A program, and what it is called with; ``form``, if that is not the one in which the model is."""

    program: ModelAndLoss
    given: Sequence[Tensor]
    form: Earlier | None = None


@dataclass(frozen=True)
class Gave:
    """What a call gives: tensors by name, and the rest of its results as text; after it buffers, by name, and what is
    kept, by name and as text."""

    tensors: dict[str, Place]
    others: str
    buffers: dict[str, Place]
    kept: dict[str, str]


class Seen(NamedTuple):
    """What a call gives alone, and behind another one, or what it raises there. ``changed`` is what that one changed,
    with what went into it; ``counts`` what of it this one changed again."""

    alone: Gave
    behind: Gave | Exception
    changed: Mapping[str, set[str]]
    counts: Sequence[str]


def reject_carried(
    call: Called, around: Surroundings, behind: Called | None = None, trained: Collection[str] = ()
) -> None:
    """Raise if a call gives something else behind another one than alone.

    Args:
        behind: the call in front of it, if that is one in another form.
        trained: the names of parameters that change between calls, beside those that this one trains.

    Raises:
        Error: it does, or it cannot be known whether it does.
    """
    guarded = call.program.guard
    with ExitStack() as stack:
        stack.enter_context(with_numbers() if guarded else nullcontext())
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if guarded else None, static_shapes=True)
        stack.enter_context(mode)
        calls = Calls(mode, call, behind or call, around, trained)
        stack.enter_context(_reparametrize_module(call.program, calls.own))
        stack.enter_context(calls.terms)
        try:
            seen = calls.run()
        except Exception as error:  # which the capture did not meet
            raise not_known(error, call.program.model) from error
        calls.compare(seen)


class Calls:
    """Two calls of a model whose tensors have no content."""

    def __init__(
        self, mode: FakeTensorMode, call: Called, behind: Called, around: Surroundings, trained: Collection[str]
    ) -> None:
        self._mode, self._call, self._behind, self._around = mode, call, behind, around
        self.terms = Terms()
        made: dict[int, Tensor] = {}
        program = call.program
        stored = (*program.named_parameters(remove_duplicate=False), *program.named_buffers(remove_duplicate=False))
        self.own = {name: made.setdefault(id(each), fake_of(each, mode)) for name, each in stored}
        """Parameters and buffers without content."""
        for name, each in stored:  # which lists may hold, too
            self.terms.stands_for(each, self.own[name])
        self._changing = {MODEL + name for name in trained}
        if call.program.loss is not None or behind.program.loss is not None:
            self._changing |= {name for name, each in self.own.items() if each.requires_grad}

    def run(self) -> Seen:
        """Run the call, behind the other one and alone."""
        for each in (self._behind, self._call) if self._call is not self._behind else ():
            with left_as_found(self._around):
                self._run(each, FIRST)  # and it is known which buffers it replaces
        with left_as_found(self._around):
            kept, before = self._kept(), self._begin(FIRST)
            first = self._run(self._behind, FIRST)
            self._changing |= {name for name, each in before.items() if self._held(name) != each}
            names = [n for n, text in first.kept.items() if kept.get(n) != text and MODEL + n not in self.own]
            changed, numbers = {name: self._inputs_of(name) for name in names}, self._attributes()
            try:
                behind: Gave | Exception = self._second()
            except Exception as error:
                behind = error
            now = self._attributes()
        with left_as_found(self._around):
            alone = self._second()
        return Seen(alone, behind, changed, [name for name in changed if numbers.get(name) != now.get(name)])

    def compare(self, seen: Seen) -> None:
        """Raise if the call gives something else behind the other one.

        Raises:
            Error: it does.
        """
        alone, behind, changed, counts = seen
        if isinstance(behind, Exception):
            got = f"{type(behind).__name__}: {behind}"[:300]
            raise self._error(changed, changed, f"a call behind another one raises {got}") from behind
        if counts and self._call is self._behind:
            raise self._error(counts, changed, "another value after each call on the same input")
        other = self._difference(alone, behind)
        if other:
            blamed = self._blamed(other, behind, changed)
            way = "another one" if self._call is self._behind else "one in another form"
            raise self._error(blamed, changed, f"another {other} in a call behind {way} than in a first call")

    def _begin(self, call: str) -> dict[str, Place]:
        """A call begins: what optimizers and forwards change between calls is its own."""
        self.terms.begin(call)
        own = {}
        for name, each in self.own.items():
            own[f"{call} {name}" if name in self._changing else name] = each
        self.terms.give(own)
        return {name: self.terms.of(each) for name, each in self.own.items()}

    def _held(self, name: str) -> Place:
        return self.terms.of(self.own[name])

    def _second(self) -> Gave:
        self._begin(SECOND)
        return self._run(self._call, SECOND)

    def _run(self, call: Called, name: str) -> Gave:
        with nullcontext() if call.form is None else call.form.taken_by(call.program.model):
            return self._gave(call, name)

    def _gave(self, call: Called, name: str) -> Gave:
        """What a call gives, and which gradients."""
        program, given, _ = call
        fakes = [fake_of(each, self._mode) for each in given]
        self.terms.give({f"{name} input {number}": each for number, each in enumerate(fakes)})
        was, program.exported = program.exported, True
        try:
            outs = program(*fakes)
        finally:
            program.exported = was
        tensors = {f"result {number}": self.terms.of(each) for number, each in enumerate(outs)}
        if program.loss is not None:
            tensors = {"loss": tensors.pop("result 0"), **tensors}
        trained = {f"gradient {n}": each for n, each in self.own.items() if each.requires_grad}
        trained |= {f"gradient of input {n}": each for n, each in enumerate(fakes) if each.requires_grad}
        if program.loss is not None and outs[0].requires_grad and trained:
            found = torch.autograd.grad(outs[0], [*trained.values()], allow_unused=True)
            made = zip(trained, found, strict=True)
            tensors |= {name: self.terms.of(each) for name, each in made if each is not None}
        others = Contents().said([program.results.leaves, str(program.results.tree)])
        buffers = {f"buffer {n.removeprefix(MODEL)}": self._held(n) for n, e in self.own.items() if not _trained(e)}
        return Gave(tensors, others, buffers, self._kept())

    def _kept(self) -> dict[str, str]:
        """What there is beside parameters and buffers, and which tensors."""
        return attributes(self._call.program, self._around, Contents())

    def _attributes(self) -> dict[str, str]:
        return attributes(self._call.program, self._around)

    def _inputs_of(self, name: str) -> set[str]:
        """What went into the tensors that are kept under a name."""
        path, _, attribute = (MODEL + name).rpartition(".")
        module = dict(self._call.program.named_modules()).get(path)
        held = (vars(module) | module._buffers).get(attribute) if module is not None else None
        tensors = [each for each in Contents().walk(held) if isinstance(each, Tensor)]
        return self.terms.made_of([self.terms.of(each) for each in tensors])

    def _difference(self, alone: Gave, behind: Gave) -> str:
        """The first that two calls do not give alike."""
        ours, theirs = alone.tensors | alone.buffers, behind.tensors | behind.buffers
        for name in dict.fromkeys((*ours, *theirs)):
            mine, other = ours.get(name), theirs.get(name)
            if mine is None or other is None or not alike(mine, other, self.terms):
                return name
        return "" if alone.others == behind.others else "result that is no tensor"

    def _blamed(self, other: str, behind: Gave, changed: Mapping[str, set[str]]) -> list[str]:
        """What was kept that makes a difference: what holds something of the first call, or else no tensor."""
        made = (behind.tensors | behind.buffers).get(other)
        carried = {n for n in self.terms.made_of([made] if made else []) if n == FIRST or n.startswith(FIRST + " ")}
        return [name for name, inputs in changed.items() if carried & inputs] or [
            name for name, inputs in changed.items() if not inputs
        ]

    def _error(self, blamed: Sequence[str] | Mapping[str, object], changed: Mapping[str, object], got: str) -> Error:
        return keeps([*(blamed or changed)], got, self._call.program, self._around)


def _trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def fake_of(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """The same on the CPU without content; with it, if it is to go along."""
    if isinstance(tensor, FakeTensor) or tensor.device.type != "cpu":
        with mode:
            made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    else:
        with _disable_current_modes():  # else it is a fake one already, without its numbers
            real = tensor.detach() if isinstance(tensor, nn.Parameter) else as_it_lies(tensor)
        made = mode.from_tensor(real, static_shapes=True)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)
