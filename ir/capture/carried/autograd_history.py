"""Buffers that carry an autograd graph from one call to the next, where the backward of the next call needs it.

    self.k.mul_(0.9).add_(y)         behind the call, self.k has a grad_fn that leads to y
    return y + self.k                the next backward goes through self.k into this call, whose graph is freed by then

A program has the graph of one call. Where the loss depends on the old content of such a buffer by a detached read
alone, or not at all, that is what torch does; else torch raises at the second backward, or, where no saved tensor was
freed, adds the gradients of all earlier calls: such a model is refused.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack, nullcontext

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module

from shardfx.ir.capture.decisions import with_numbers
from shardfx.ir.capture.intake.refusals import said
from shardfx.ir.capture.intake.surroundings import Surroundings
from shardfx.ir.capture.named.left_as_found import left_as_found
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind

from .kept import MODEL, not_known
from .two_calls import Called, fake_of

ALL_CALLS = "a gradient that is the sum over all calls so far: torch goes back through {} into each of them"


def reject_history(call: Called, graph: Graph, around: Surroundings) -> None:
    """Raise if the backward of a call goes through a buffer into the call before.

    Raises:
        Error: it does, with what torch says of the second backward.
    """
    names = call.program.assigned.with_history
    if not names or call.program.loss is None:
        return
    guarded = call.program.guard
    with ExitStack() as stack:
        stack.enter_context(with_numbers() if guarded else nullcontext())
        mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv() if guarded else None, static_shapes=True)
        stack.enter_context(mode)
        stack.enter_context(left_as_found(around))
        try:
            found = _through(call, names, mode)
        except Exception as error:  # which the capture did not meet
            raise not_known(error, call.program.model) from error
    if found is None:
        return
    name, got = found
    name = name.removeprefix(MODEL)
    written = next((o.value.where for o in graph.outputs if (o.kind, o.name) == (OutputKind.BUFFER, name)), None)
    raise Error(
        "a buffer carries an autograd graph from one call to the next, on one device as well",
        where="  ".join(filter(None, (name, said(written) if written is not None else ""))),
        expected="a backward that ends in its own call",
        got=got,
        remedy=f"self.{name.rpartition('.')[2]}.detach_() in forward, in front of its first use",
    )


def _through(call: Called, names: Collection[str], mode: FakeTensorMode) -> tuple[str, str] | None:
    """The first buffer through which the backward of a call leaves it, and what a second call makes of that."""
    program = call.program
    stored = (*program.named_parameters(remove_duplicate=False), *program.named_buffers(remove_duplicate=False))
    made: dict[int, Tensor] = {}
    own = {name: made.setdefault(id(each), fake_of(each, mode)) for name, each in stored}
    begins = {name: own[name].detach().requires_grad_() for name in sorted(names)}
    for name, leaf in begins.items():
        history = leaf.clone()
        own.update({other: history for other, each in own.items() if each is own[name]})
    given = [fake_of(each, mode) for each in call.given]
    trained = [each for each in {id(each): each for each in (*own.values(), *given)}.values() if each.is_leaf]
    inputs = [*begins.values(), *(each for each in trained if each.requires_grad)]
    with _reparametrize_module(program, own):
        loss = program(*given)[0]
        if not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        reached = next((name for name, grad in zip(begins, found, strict=False) if grad is not None), None)
        if reached is None:
            return None
        try:
            torch.autograd.grad(program(*given)[0], inputs, allow_unused=True)
        except RuntimeError as error:
            return reached, f"{type(error).__name__} in the second backward: {str(error).splitlines()[0]}"
        return reached, ALL_CALLS.format(reached.removeprefix(MODEL))
