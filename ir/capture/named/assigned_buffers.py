"""A buffer that a forward replaces is written into instead: programs have the buffers that the model had.

    self.low = torch.min(self.low, x.amin())    ->    low.copy_(torch.min(low.clone(), x.amin()))

Torch's export sees that for buffers of the outermost module alone, and forgets what becomes of the others. What was
read of the old one may be kept for the backward, so that a forward reads a copy of it. So does a forward that writes a
value with a gradient in place: what is stored is no result of which there is a gradient.

    self.k.mul_(0.9).add_(y)                    ->    copy = k.clone(); copy.mul_(0.9).add_(y); k.copy_(copy.detach())
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardfx.ir.errors import Error


class AssignedBuffers:
    """Which buffers a program's forward replaces, or writes a value with a gradient to: known once it ran."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.with_history: set[str] = set()
        """Those that carry an autograd graph from one call to the next (:mod:`..carried.autograd_history`)."""

    @contextmanager
    def noting(self, program: nn.Module, *, written: bool) -> Iterator[None]:
        """Within, buffers may be replaced. ``written``: behind, they are those that there were, and those of which it
        was known hold what the new ones do.

        Raises:
            Error: a new one has another shape or dtype, or a gradient; there is none any more; or a parameter is
                another.
        """
        modules = [(path, each, dict(each._buffers), dict(each._parameters)) for path, each in program.named_modules()]
        known: list[tuple[nn.Module, str, Tensor]] = []
        copies: dict[Tensor, Tensor] = {}
        leaves = {
            was for _, _, were, _ in modules for was in were.values() if was is not None and not was.requires_grad
        }
        for path, module, were, _ in modules if written else ():
            for name, was in were.items():
                if was is not None and f"{path}.{name}" in self.names:
                    known.append((module, name, was))
                    module._buffers[name] = copies[was] = copies[was] if was in copies else was.clone()
        found: dict[str, tuple[Tensor, Tensor | None]] = {}
        try:
            yield
        finally:
            now = [(module._buffers.get(name), was) for module, name, was in known]
            for path, module, were, own in modules:  # what was None is looked at beside other attributes
                filled = {name: was for name, was in were.items() if was is not None}
                found |= {f"{path}.{name}": (was, module._buffers.get(name)) for name, was in filled.items()}
                held = dict(module._parameters)  # which may give others when they are asked for one
                found |= {f"{path}.{n}": (p, held.get(n)) for n, p in own.items() if p is not None}
                if written:
                    module._buffers.update(filled)
                    module._parameters.update(own)
        held_as = defaultdict[int, set[int]](set)
        for was, given in found.values():
            held_as[id(was)].add(id(given))
        for name, (was, given) in found.items():
            if given is copies.get(was, was):
                if was in leaves and given is not None and given.requires_grad:
                    self.names.add(name)
                    self.with_history.add(name)
            elif given is not was:
                _check(name.removeprefix("model."), was, given, len(held_as[id(was)]) == 1)
                self.names.add(name)
        with torch.no_grad():
            # Several may have changed places, and one may be a view of what it is written into.
            for was, given in [(was, given.clone()) for given, was in now if given is not None]:
                was.copy_(given)


def _check(name: str, was: Tensor, now: Tensor | None, everywhere: bool) -> None:
    alike = now is not None and (now.shape, now.dtype) == (was.shape, was.dtype) and not now.requires_grad
    if alike and not everywhere and not isinstance(was, nn.Parameter):
        raise Error(
            "the model puts something else in the place of a buffer that has other names too",
            where=name,
            expected="the same tensor under all of them",
            got="another one under this name alone",
            remedy="write into it under torch.no_grad() (buffer.copy_(...)), or register two buffers",
        )
    if alike and not isinstance(was, nn.Parameter):
        return
    if isinstance(was, nn.Parameter):
        raise Error(
            "the model puts something else in a parameter's place",
            where=name,
            expected="the parameter that it has",
            got="no such parameter" if now is None else "another one",
            remedy="compute with the new tensor, and let an optimizer change parameters",
        )
    both = was, was if now is None else now
    wanted, got = (f"{str(each.dtype).removeprefix('torch.')} {tuple(each.shape)}" for each in both)
    got = f"{got}, with a gradient" if now is not None and now.requires_grad else got
    raise Error(
        "the model puts something else in a buffer's place",
        where=name,
        expected=f"a tensor as it was, {wanted}, without a gradient",
        got="None, or no such buffer" if now is None else got,
        remedy="detach() what becomes a buffer; register it in the shape that it takes; what only this call needs is "
        "no buffer",
    )
