"""The programs for each form of call: another mode, batch size, number or wish for gradients is another program.

A plan is captured for the example inputs, in the mode that the model was in. What comes in another form is planned when
it is first seen, under the same hints, from a copy of the model without weights, with the placements that the first
plan stores: all work on one store. The most recent few are kept. With ``Hints(guard=True)`` the copy has the weights of
the moment, and the call's own tensors are the examples.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from shardfx.compile import capture_model
from shardfx.compiled import Compiled
from shardfx.gradients import is_pulled
from shardfx.hints import Hints
from shardfx.ir.capture.python_state.bytecode import CodeNames
from shardfx.ir.capture.python_state.python_state import PythonState
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind
from shardfx.ir.unfolding.unfold import whole
from shardfx.passes import stages_as_planned
from shardfx.runtime.engine import Probe, seed_tensor
from shardfx.runtime.peers import OtherSurroundings, Peers, RankInput
from shardfx.runtime.step import ProgramRunner, RunStart
from shardfx.runtime.verify.verdict import Verdict, together

from .call import Call, Form, autocast_around, contents, inputs_of, model_results, passed
from .forms.asked_of_inputs import Asks
from .forms.earlier_calls import Build, earlier_call
from .forms.hints_of_form import UNSTEPPED, hints_of_form
from .forms.planned_anew import PlannedAnew, said_of
from .forms.states_as_one import StatesAsOne
from .hand_out import check_step, leaves, trained, wanting
from .hand_out import gradients as gradients_of
from .held.one_store import reject_stored_otherwise, stored
from .programs import BESIDE, INFER, LOSS, PULL, RUNS, STEP, TRAIN, Programs
from .pull_back import AsItWas, attach, pulling, refuse, reject_part, reject_without_loss

Fill = Callable[[nn.Module], nn.Module]
"""Gives a module without weights those that it has at the moment."""
Make = Callable[[Compiled], Programs]
Wanted = Mapping[str, list[torch.Tensor]]


class Around(NamedTuple):
    """What a call is made with."""

    peers: Peers
    make: Make
    watch: Probe | None
    local: bool


log = logging.getLogger("shardfx")


class Variants:
    """The programs of a module by form of call: those it was captured for, and the most recent others."""

    def __init__(self, skeleton: nn.Module, hints: Hints, build: Build) -> None:
        self.skeleton, self.hints, self.build = skeleton, hints, build
        self.fill: Fill = lambda model: model
        self._surroundings = PythonState(skeleton, hints.loss)
        self._anew, self._states = PlannedAnew(), StatesAsOne()
        self.known: list[tuple[Form, Programs]] = []
        """The first one, then the others, the one used last at the end."""

    def begin(self, form: Form, programs: Programs, fill: Fill) -> None:
        """The first programs; ``fill`` gives a copy of the model its weights, where a capture asks for them."""
        self.known, self.fill = [(form, programs)], fill
        self._surroundings.settle(0)

    @property
    def names(self) -> CodeNames:
        """What the code of the model and its loss names."""
        return self._surroundings.names

    @property
    def asks(self) -> Asks:
        """What the code asks of tensors beside their types."""
        return Asks.of(self.names.named)

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

    def run(
        self,
        call: Call,
        training: frozenset[str],
        peers: Peers,
        make: Make,
        watch: Probe | None,
        with_results: bool = False,
        options: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Run a call on this process's ranks, these paths in training mode; the other ranks make the same call.
        ``with_results``: the loss, and the model's results. ``options``: a whole step, with these optimizer's rates.

        Raises:
            Error: they do not; there is no loss where one is asked for; no plan for such a call; a rank fails.
        """
        around, draw = Around(peers, make, watch, False), cache(lambda: int(seed_tensor()))
        while True:
            try:
                return self._run(call, training, around, draw, with_results, options)
            except OtherSurroundings:  # nothing was run
                self._states.join(self._surroundings.state()[0])

    def _run(
        self,
        call: Call,
        training: frozenset[str],
        around: Around,
        draw: Callable[[], int],
        with_results: bool,
        options: Mapping[str, torch.Tensor] | None,
    ) -> Any:
        peers, make, watch, _ = around
        first = self.known[0][1]
        trains = call.has_targets and first.trains
        steps, learns = options is not None, trains and torch.is_grad_enabled()
        kinds = STEP if steps else INFER if not trains else TRAIN if learns else LOSS
        if with_results:
            reject_without_loss(trains)
            kinds |= BESIDE
        wanted = wanting(first.step.store, call) if torch.is_grad_enabled() and not steps else {}
        gradients = frozenset(wanted) if learns else frozenset[str]()
        if steps:
            gradients = frozenset(wanting(first.step.store))
            check_step(first.compiled, first.step.store.parameters, gradients, call.has_targets)
        state, changed = self._surroundings.state()
        inputs = inputs_of(call, first.step)
        asked = self.asks.of_call(call.tensors, inputs, lambda: wanting(first.step.store, call))
        form = Form(training, inputs, gradients, autocast_around(), False, state, changed, asked)
        form = self._states.said(form)

        def words() -> dict[str, str]:
            watched = {"watched by": type(watch).__name__} if watch is not None else {}
            return {"runs": RUNS[kinds], **form.words(), **watched}

        key = (kinds, form.key, watch is not None)
        way, known = passed(first.step, call), self._known_for(form)
        onwards = kinds is INFER and bool(wanted)
        mine = draw() if known is not None and known.step.draws(kinds) and not onwards else None
        local, drawn = peers.agree(key, words, way, mine, options)
        programs = self.serving(form, call, peers, make)
        call = self._alike(programs.step, call, key, peers, local)
        if onwards:
            return self._onwards(programs, call, form, around._replace(local=local), wanted)
        step = programs.step
        kept = None if drawn is None else RunStart(step.on_device(drawn), {})
        first.say_unused(programs, kinds)
        with said_of(self.known[0][0], form):
            results = step.run(kinds, {**call.tensors, **(options or {})}, watch, kept)
        self._used(programs)
        if not trains:
            return model_results(programs.compiled, step, local, results)
        learns = learns and not steps
        tensors = leaves(wanted) if learns else []
        loss = trained(step, call, local, wanted, results) if learns else results[OutputKind.LOSS, "loss"][0]
        if not with_results:
            return loss
        out = model_results(programs.compiled, step, local, results)
        return loss, attach(out, refuse, tensors) if tensors else out

    def _alike(self, step: ProgramRunner, call: Call, key: Hashable, peers: Peers, local: bool) -> Call:
        """The call, whose inputs are the same where they should: compared, or (if the hints say so) made so."""

        def given() -> list[RankInput]:
            return contents(step, call, local)

        if self.hints.check_inputs == "broadcast":
            return call.holding(peers.firsts(step.graph.mesh, given))
        peers.compare(key, given, bool(self.hints.check_inputs))
        return call

    def _onwards(self, programs: Programs, call: Call, form: Form, around: Around, wanted: Wanted) -> Any:
        """The model's results, whose gradients come back to ``wanted``. Where random numbers are drawn, forward and
        backward are programs of one plan, for ranks draw by what they hold."""
        peers, make, watch, local = around
        asked = frozenset(wanted)
        if programs.step.draws(INFER) and not local:
            zeros = [torch.zeros((), dtype=o.value.type.dtype).expand(o.value.shape) for o in _pulled(programs)]
            its_call, its_form = pulling(call, form, zeros, asked)
            programs = self.serving(its_form, its_call, peers, make)
        step, seed = programs.step, programs.step.seed(INFER)
        tensors = leaves(wanted)
        before = AsItWas.of(step, [*tensors, *call.tensors.values()], seed)
        results = step.run(INFER, call.tensors, watch, before.kept)
        self._used(programs)

        def pull(above: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
            with peers.calling():
                if local:
                    reject_part()
                before.check()
                its_call, its_form = pulling(call, form, above, asked)
                key = (PULL, its_form.key, watch is not None)
                peers.agree(key, lambda: {"runs": "a backward of results", **its_form.words()})
                pulled = self.serving(its_form, its_call, peers, make)
                step = pulled.step
                its_call = self._alike(step, its_call, key, peers, False)
                made = step.run(PULL, its_call.tensors, watch, before.kept)
                self._used(pulled)
                return gradients_of(step, its_call, False, wanted, made)

        out = model_results(programs.compiled, step, local, results)
        return attach(out, pull, tensors)

    def serving(self, form: Form, call: Call, peers: Peers, make: Make) -> Programs:
        """The programs for a call; planned on all ranks, if there are none."""
        if (programs := self._known_for(form)) is not None:
            return programs
        first, ours = self.known[0][0], self.known[0][1].compiled.after
        started = time.perf_counter()
        with said_of(first, form):
            made = make(peers.planned(lambda: self._plan(ours, form, call), Compiled.subjects))
        self._surroundings.settle(self._states.own(form))
        seconds = time.perf_counter() - started
        log.warning("planned in %.1f s for another form of call: %s", seconds, first.difference(form))
        self._anew.see(form, [known for known, _ in self.known])
        if len(self.known) > self.hints.max_specializations:
            del self.known[1]
        self.known.append((form, made))
        return made

    def _known_for(self, form: Form) -> Programs | None:
        """The programs for a form, if there are some."""
        return next((programs for known, programs in self.known if known.serves(form)), None)

    def _used(self, programs: Programs) -> None:
        """These are the ones used last, on all ranks."""
        self.known[1:] = sorted(self.known[1:], key=lambda known: known[1] is programs)

    def trace(self, args: tuple[Any, ...], training: frozenset[str]) -> Graph:
        """The captured program of the model's results for other arguments, in a mode."""
        for path, module in self.skeleton.named_modules():
            module.training = path in training
        hints = replace(self.hints, args=args, targets=(), loss=None, **UNSTEPPED)
        return whole(capture_model(self.skeleton, self.known[0][1].compiled.after.mesh, hints).graph)

    def renew(self, make: Make) -> None:
        """Make all programs anew."""
        self.known = [(form, make(programs.compiled)) for form, programs in self.known]

    def _plan(self, first: Graph, form: Form, call: Call) -> Compiled:
        """The plan for a form of call, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        for path, module in self.skeleton.named_modules():
            module.training = path in form.training
        model = self.fill(self.skeleton) if self.hints.guard else self.skeleton
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in form.trainable)
        states = {each.name for each in first.of_kind(InputKind.STATE)}
        specs = {name: spec for name, spec in stored(first).items() if name not in states}
        hints = hints_of_form(self.hints, specs, form, call)
        if hints.pipeline is not None:
            hints = replace(hints, pipeline=replace(hints.pipeline, stages=stages_as_planned(first)))
        with torch.set_grad_enabled(bool(form.gradients) or torch.is_grad_enabled()):
            made = self.build(model, hints, [earlier_call(known, programs.compiled) for known, programs in self.known])
        reject_stored_otherwise(first, made.after)
        return made


def _pulled(programs: Programs) -> list[Output]:
    """The results that may have a gradient."""
    outputs = [o for o in programs.step.graph.outputs if o.kind is OutputKind.RESULT]
    return [o for o in outputs if is_pulled(o.value.type.dtype)]
