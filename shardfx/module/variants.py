"""The programs for each form of call: another mode, batch size, number or wish for gradients is another program.

A plan is captured for the example inputs, in the mode that the model was in. What comes in another form is planned when
it is first seen, under the same hints, from a copy of the model without weights, with the placements that the first
plan stores: all work on one store. The most recent few are kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from shardfx.compiled import Compiled
from shardfx.hints import Hints
from shardfx.ir.capture.intake.given import copied
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.spec import Spec, TensorType
from shardfx.plan import PlannedSpecs
from shardfx.runtime.step import STORED
from shardfx.runtime.verify.verdict import Verdict, together

from .call import TARGETS, Call, Form
from .programs import Programs

Build = Callable[[nn.Module, Hints], Compiled]
log = logging.getLogger("shardfx")


def without_weights(model: nn.Module) -> nn.Module:
    """A copy of the module tree on ``meta``: tied weights stay tied, nothing is stored."""
    memo: dict[int, object] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        made = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if is_parameter else made
    return copied(model, memo)


class Variants:
    """The programs of a module by form of call: those it was captured for, and the most recent others."""

    def __init__(self, skeleton: nn.Module, hints: Hints, build: Build) -> None:
        self.skeleton, self.hints, self.build = skeleton, hints, build
        self.known: list[tuple[Form, Programs]] = []
        """The first one, then the others, the one used last at the end."""

    @property
    def all(self) -> list[Programs]:
        """All programs there are."""
        return [programs for _, programs in self.known]

    def verify(
        self, modules: Mapping[int, fx.GraphModule] | None, run: bool, known: Mapping[str, torch.Tensor]
    ) -> Verdict:
        """Whether all programs compute what the model computes; ``modules`` are in the place of some of the first."""
        first, programs = self.known[0]
        found = [programs.verify(modules, run, known)]
        for form, programs in self.known[1:]:
            if found[-1]:
                found.append(programs.verify(None, run, known).said_of(first.difference(form)))
        return together(found)

    def serving(self, form: Form, call: Call, make: Callable[[Compiled], Programs]) -> Programs:
        """The programs for a call; planned, if there are none.

        Raises:
            Error: the model cannot be planned for such a call.
        """
        for i, (known, programs) in enumerate(self.known):
            if known.serves(form):
                if 0 < i < len(self.known) - 1:
                    self.known.append(self.known.pop(i))
                return programs
        first, programs = self.known[0]
        started = time.perf_counter()
        made = make(self._plan(programs.compiled.after, form, call))
        seconds = time.perf_counter() - started
        log.warning("planned in %.1f s for another form of call: %s", seconds, first.difference(form))
        if len(self.known) > self.hints.shapes:
            del self.known[1]
        self.known.append((form, made))
        return made

    def renew(self, make: Callable[[Compiled], Programs]) -> None:
        """Make all programs anew."""
        self.known = [(form, make(programs.compiled)) for form, programs in self.known]

    def _plan(self, first: Graph, form: Form, call: Call) -> Compiled:
        """The plan for a form of call, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        for path, module in self.skeleton.named_modules():
            module.training = path in form.training
        for name, parameter in self.skeleton.named_parameters():
            parameter.requires_grad_(name in form.gradients)
        ours = stored(first)
        made = self.build(self.skeleton, self._hints(ours, form, call))
        for name, theirs in stored(made.after).items():
            if ours.get(name, theirs) != theirs:
                raise Error(
                    f"{name!r} would be stored otherwise for this call",
                    where="pm(...)",
                    expected=str(ours[name]),
                    got=str(theirs),
                    remedy="say in Hints(specs=...) how it is stored; or parallelize the model for this call on its "
                    "own, and move weights by full_state_dict()",
                )
        return made

    def _hints(self, ours: Mapping[str, Spec], form: Form, call: Call) -> Hints:
        """The user's hints, for the inputs of a call."""
        hints = self.hints
        planned = hints.specs.plan.cuts if isinstance(hints.specs, PlannedSpecs) else {}
        specs = {**hints.specs, **ours}
        args, kwargs, targets = _examples(form, call)
        cuts = {**planned, **hints.cuts}
        if call.has_targets or not hints.targets:
            return replace(hints, args=args, kwargs=kwargs, targets=targets, specs=specs, cuts=cuts)
        specs = {name: spec for name, spec in specs.items() if not name.startswith(TARGETS)}
        return replace(hints, args=args, kwargs=kwargs, targets=(), loss=None, specs=specs, cuts=cuts)


def _examples(form: Form, call: Call) -> Any:
    """Example inputs for a form of call: arguments by position and by name, and targets, without content."""
    leaves, tree = pytree.tree_flatten((call.args, dict(call.kwargs), call.targets))
    made = []
    for name, leaf in zip(call.leaves, leaves, strict=True):
        type = form.inputs[name]
        if isinstance(type, TensorType):
            leaf = torch.empty(type.shape, dtype=type.dtype, device="meta", requires_grad=name in form.gradients)
        made.append(leaf)
    return pytree.tree_unflatten(made, tree)


def stored(graph: Graph) -> Mapping[str, Spec]:
    """The stored placements of parameters and buffers."""
    return {g.name: g.value.spec for g in graph.inputs if g.kind in STORED and g.value.spec is not None}
