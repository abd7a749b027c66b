"""Specializations: the programs for each call signature (mode, batch size, number, which inputs need gradients).

A plan is captured for the example inputs, in the mode that the model was in. Another signature is planned when it is
first seen, under the same hints, from a copy of the model without weights, with the placements that the first plan
stores: all work on one store. The most recent few are kept. With ``Hints(guard=True)`` the copy has the current
weights, and the call's own tensors are the examples.

A Python number is part of a program: it is specialized on, and a script is warned once when one number keeps changing.
Python state that the code reads beside its inputs is numbered; ranks agree on the number, so that what a rank reads may
be its own if it leads to the plan of the others.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from shardfx.compile import capture_model
from shardfx.compiled import Compiled
from shardfx.gradients import is_pulled, product
from shardfx.hints import Hints
from shardfx.ir.capture.hidden_state import EarlierCapture
from shardfx.ir.capture.python_state.bytecode import CodeNames
from shardfx.ir.capture.python_state.python_state import PythonState
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import Graph, Input, InputKind, Output, OutputKind
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.module.call_signature import (
    TARGETS,
    CallSignature,
    InputQueries,
    ModuleCall,
    autocast_around,
    inputs_of,
    model_results,
    passing_of,
    rank_inputs,
)
from shardfx.module.grad_delivery import (
    ForwardSnapshot,
    attach,
    check_step,
    leaves,
    loss_with_grads,
    refuse,
    reject_part,
    reject_without_loss,
    tensors_with_grad,
    vjp_call,
)
from shardfx.module.grad_delivery import gradients as gradients_of
from shardfx.module.programs import BESIDE, INFER, LOSS, PULL, RUNS, STEP, TRAIN, Programs
from shardfx.passes import stages_as_planned
from shardfx.plan import as_said
from shardfx.runtime.distributed.peers import OtherSurroundings, Peers, RankInput
from shardfx.runtime.engine import Probe, seed_tensor
from shardfx.runtime.step import HELD, ProgramRunner, RunStart
from shardfx.runtime.verify.verdict import Verdict, together


class Build(Protocol):
    """Plans a model under hints, after calls of other signatures."""

    def __call__(self, model: nn.Module, hints: Hints, behind: Sequence[EarlierCapture] = ()) -> Compiled: ...


def earlier_capture(form: CallSignature, compiled: Compiled) -> EarlierCapture:
    """The call for which a plan was captured."""
    hints, keeps = compiled.hints, compiled.captured.keeps
    return EarlierCapture(hints.args, hints.kwargs, hints.targets, hints.loss, form.training, form.trainable, keeps)


UNSTEPPED: dict[str, Any] = {"optimizer": None, "clip_grad_norm": None}
"""The hints of a plan that has no step."""


def hints_of_signature(hints: Hints, ours: Mapping[str, Spec], form: CallSignature, call: ModuleCall) -> Hints:
    """The user's hints, with the inputs of a call; ``ours`` is how the first plan stores parameters and buffers."""
    hints = as_said(hints)
    specs = {**hints.specs, **ours}
    args, kwargs, targets = _examples(form, call, hints.guard)
    as_captured = call.has_targets or not hints.targets
    hints = replace(hints, args=args, kwargs=kwargs, targets=targets)
    if as_captured and not form.pulls:
        return replace(hints, specs=specs)
    specs = {name: spec for name, spec in specs.items() if not name.startswith(TARGETS)}
    if form.pulls:
        return replace(hints, loss=product, specs=specs, **UNSTEPPED)
    return replace(hints, targets=(), loss=None, specs=specs, **UNSTEPPED)


def _examples(form: CallSignature, call: ModuleCall, real: bool) -> Any:
    """Example inputs for a call signature: arguments by position and by name, and targets; those of the call itself if
    they are to be real, else without content.

    Raises:
        Error: they are to be real, and are only a rank's part of them.
    """
    leaves, tree = pytree.tree_flatten((call.args, dict(call.kwargs), call.targets))
    made, examples = [], form.asked.examples()
    for name, leaf in zip(call.leaves, leaves, strict=True):
        type = form.inputs[name]
        if isinstance(type, TensorType):
            if real and tuple(leaf.shape) != type.shape:
                raise Error(
                    "a call in a new form is an example of what the data decide, and must be of the global batch",
                    where="pm(...)",
                    expected=f"{name} of shape {type.shape}",
                    got=f"this rank's part, of shape {tuple(leaf.shape)}",
                    remedy="call pm once with the global batch in this form",
                )
            leaf = examples.make(name, type, leaf if real else None, name in form.trainable)
        made.append(leaf)
    return pytree.tree_unflatten(made, tree)


ENOUGH = 3
"""Plans that differ in a number alone, until it is said."""
READ = "what the code reads: "


class ReplanWarnings:
    """Warnings about repeated planning: the values for which programs were planned that differ in one number alone."""

    def __init__(self) -> None:
        self._values: dict[str, set[object]] = {}

    def see(self, form: CallSignature, known: Iterable[CallSignature]) -> None:
        """Record a signature that was planned; warns if it differs again from known ones in the same number alone."""
        for other in known:
            for name, (theirs, mine) in only_numbers_differ(form, other).items():
                values = self._values.setdefault(name, {theirs})
                if mine in values:
                    continue
                values.add(mine)
                if len(values) == ENOUGH:
                    warnings.warn(_said(name, mine), ShardfxWarning, stacklevel=2)


@contextmanager
def naming_call(first: CallSignature, form: CallSignature) -> Iterator[None]:
    """Add to errors within how a call's signature, for which a plan is made, differs from the first one."""
    try:
        yield
    except Error as error:
        if not first.serves(form):
            error.in_call(first.difference(form))
        raise


def only_numbers_differ(form: CallSignature, other: CallSignature) -> Mapping[str, tuple[object, object]]:
    """The numbers in which two signatures differ, theirs and its own, if they differ in nothing else."""
    names = [name for name in {**other.inputs, **form.inputs} if form.inputs.get(name) != other.inputs.get(name)]
    pairs = {name: (other.inputs.get(name), form.inputs.get(name)) for name in names}
    around = replace(form, inputs={}, state=0, changed=()) == replace(other, inputs={}, state=0, changed=())
    if not around or not all(_is_number(each) for pair in pairs.values() for each in pair):
        return {}
    if form.state == other.state:
        return pairs
    return {READ + ", ".join(form.changed[:3]): (other.state, form.state)} if not pairs and form.changed else {}


def _is_number(value: object) -> bool:
    return isinstance(value, tuple) and value[0] in ("int", "float")


def _said(name: str, value: object) -> str:
    what = name.removeprefix(READ)
    begun = f"programs were planned for {ENOUGH} values of {what}"
    if name.startswith(READ):
        return (
            f"{begun}, which the code reads, and each further one is planned anew: what changes at each step is better "
            "a tensor among the targets, or a buffer of the model"
        )
    number = value[1] if isinstance(value, tuple) else value
    return (
        f"{begun}, the last one {number}, and each further one is planned anew: pass torch.tensor({number}), which is "
        "an input of one program for all, where the code does not go by the number"
    )


class AgreedStates:
    """The numbers of Python states, agreed between ranks."""

    def __init__(self) -> None:
        self._said: dict[int, int] = {}
        self._times = 0

    def said(self, form: CallSignature) -> CallSignature:
        """The signature, with the state number agreed on by all ranks."""
        return replace(form, state=self._said[form.state]) if form.state in self._said else form

    def own(self, form: CallSignature) -> int:
        """This rank's number for a signature's state."""
        return next((own for own, said in self._said.items() if said == form.state), form.state)

    def join(self, own: int) -> None:
        """Agree on a new state number where ranks are in states of different ones, this one in its ``own``; no rank has
        programs for it yet."""
        self._times += 1
        self._said[own] = -self._times


def stored_specs(graph: Graph) -> Mapping[str, Spec]:
    """The stored placements of parameters, buffers and states."""
    return {g.name: g.value.spec for g in graph.inputs if g.kind in HELD and g.value.spec is not None}


def reject_stored_otherwise(first: Graph, other: Graph) -> None:
    """Refuse a plan whose stored placements differ from those of the module's first plan.

    Raises:
        Error: naming a parameter, buffer or state, and both places.
    """
    stored = {inp.name: inp for inp in first.inputs if inp.kind in HELD}
    written = {output.name for output in other.outputs if output.kind.is_kept}
    for inp in other.inputs:
        ours = stored.get(inp.name)
        if inp.kind not in HELD or ours is None:
            continue
        there, here = _places(ours, first), _places(inp, other)
        if ours.value.spec == inp.value.spec and (here == there or (here < there and inp.name not in written)):
            continue
        raise Error(
            f"{inp.name!r} would be stored otherwise for this call",
            where="pm(...)",
            expected=_text(ours, first),
            got=_text(inp, other),
            remedy="say in Hints(specs=...) how it is stored, and in Pipeline(stages=...) where; or parallelize the "
            "model for this call on its own, and move weights by full_state_dict()",
        )


def _places(inp: Input, graph: Graph) -> frozenset[int]:
    """The coordinates along the axis of stages at which an input is stored."""
    return frozenset(graph.pipeline.places(inp.at) if graph.pipeline is not None else ())


def _text(inp: Input, graph: Graph) -> str:
    if not inp.at:
        return str(inp.value.spec)
    return f"{inp.value.spec} in stages {list(inp.at)}, at {sorted(_places(inp, graph))} along their axis"


Fill = Callable[[nn.Module], nn.Module]
"""Gives a module without weights those that it has at the moment."""
Make = Callable[[Compiled], Programs]
Wanted = Mapping[str, list[torch.Tensor]]


class CallContext(NamedTuple):
    """The context of a call: other ranks, the maker of programs, a probe, and whether its batch is local."""

    peers: Peers
    make: Make
    watch: Probe | None
    local: bool


log = logging.getLogger("shardfx")


class Specializations:
    """The programs of a module by call signature: those it was captured for, and the most recent others."""

    def __init__(self, skeleton: nn.Module, hints: Hints, build: Build) -> None:
        self.skeleton, self.hints, self.build = skeleton, hints, build
        self.fill: Fill = lambda model: model
        self._surroundings = PythonState(skeleton, hints.loss)
        self._anew, self._states = ReplanWarnings(), AgreedStates()
        self.known: list[tuple[CallSignature, Programs]] = []
        """The first one, then the others, the one used last at the end."""

    def begin(self, form: CallSignature, programs: Programs, fill: Fill) -> None:
        """Set the first programs; ``fill`` gives a copy of the model its weights, where a capture asks for them."""
        self.known, self.fill = [(form, programs)], fill
        self._surroundings.settle(0)

    @property
    def names(self) -> CodeNames:
        """The names in the code of the model and its loss."""
        return self._surroundings.names

    @property
    def asks(self) -> InputQueries:
        """The queries of the code about tensors beside their types."""
        return InputQueries.of(self.names.named)

    @property
    def all(self) -> list[Programs]:
        """All specializations."""
        return [programs for _, programs in self.known]

    def verify(
        self, modules: Mapping[int, fx.GraphModule] | None, run: bool, known: Mapping[str, torch.Tensor]
    ) -> Verdict:
        """Verify all programs; ``modules`` are in the place of some of the first."""
        first, programs = self.known[0]
        found = [programs.verify(modules, run, known)]
        for form, programs in self.known[1:]:
            if found[-1]:
                found.append(programs.verify(None, run, known).said_of(first.difference(form)))
        return together(found)

    def run(
        self,
        call: ModuleCall,
        training: frozenset[str],
        peers: Peers,
        make: Make,
        watch: Probe | None,
        with_results: bool = False,
        options: Mapping[str, torch.Tensor] | None = None,
    ) -> Any:
        """Run a call on this process's ranks, these paths in training mode; the other ranks make the same call.
        ``with_results``: the loss, and the model's results. ``options``: a full step, with these optimizer's rates.

        Raises:
            Error: they do not; there is no loss where one is asked for; no plan for such a call; a rank fails.
        """
        around, draw = CallContext(peers, make, watch, False), cache(lambda: int(seed_tensor()))
        while True:
            try:
                return self._run(call, training, around, draw, with_results, options)
            except OtherSurroundings:  # nothing was run
                self._states.join(self._surroundings.state()[0])

    def _run(
        self,
        call: ModuleCall,
        training: frozenset[str],
        around: CallContext,
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
        wanted = tensors_with_grad(first.step.store, call) if torch.is_grad_enabled() and not steps else {}
        gradients = frozenset(wanted) if learns else frozenset[str]()
        if steps:
            gradients = frozenset(tensors_with_grad(first.step.store))
            check_step(first.compiled, first.step.store.parameters, gradients, call.has_targets)
        state, changed = self._surroundings.state()
        inputs = inputs_of(call, first.step)
        asked = self.asks.of_call(call.tensors, inputs, lambda: tensors_with_grad(first.step.store, call))
        form = CallSignature(training, inputs, gradients, autocast_around(), False, state, changed, asked)
        form = self._states.said(form)

        def words() -> dict[str, str]:
            watched = {"watched by": type(watch).__name__} if watch is not None else {}
            return {"runs": RUNS[kinds], **form.words(), **watched}

        key = (kinds, form.key, watch is not None)
        way, known = passing_of(first.step, call), self._known_for(form)
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
        with naming_call(self.known[0][0], form):
            results = step.run(kinds, {**call.tensors, **(options or {})}, watch, kept)
        self._used(programs)
        if not trains:
            return model_results(programs.compiled, step, local, results)
        learns = learns and not steps
        tensors = leaves(wanted) if learns else []
        loss = loss_with_grads(step, call, local, wanted, results) if learns else results[OutputKind.LOSS, "loss"][0]
        if not with_results:
            return loss
        out = model_results(programs.compiled, step, local, results)
        return loss, attach(out, refuse, tensors) if tensors else out

    def _alike(self, step: ProgramRunner, call: ModuleCall, key: Hashable, peers: Peers, local: bool) -> ModuleCall:
        """The call, with inputs that must be equal on all ranks: compared, or (if the hints say so) broadcast."""

        def given() -> list[RankInput]:
            return rank_inputs(step, call, local)

        if self.hints.check_inputs == "broadcast":
            return call.holding(peers.firsts(step.graph.mesh, given))
        peers.compare(key, given, bool(self.hints.check_inputs))
        return call

    def _onwards(
        self, programs: Programs, call: ModuleCall, form: CallSignature, around: CallContext, wanted: Wanted
    ) -> Any:
        """The model's results, with a VJP to ``wanted``. Where random numbers are drawn, forward and backward are
        programs of one plan, for ranks draw by what they hold."""
        peers, make, watch, local = around
        asked = frozenset(wanted)
        if programs.step.draws(INFER) and not local:
            zeros = [torch.zeros((), dtype=o.value.type.dtype).expand(o.value.shape) for o in _pulled(programs)]
            its_call, its_form = vjp_call(call, form, zeros, asked)
            programs = self.serving(its_form, its_call, peers, make)
        step, seed = programs.step, programs.step.seed(INFER)
        tensors = leaves(wanted)
        before = ForwardSnapshot.of(step, [*tensors, *call.tensors.values()], seed)
        results = step.run(INFER, call.tensors, watch, before.kept)
        self._used(programs)

        def pull(above: tuple[torch.Tensor, ...]) -> list[torch.Tensor | None]:
            with peers.calling():
                if local:
                    reject_part()
                before.check()
                its_call, its_form = vjp_call(call, form, above, asked)
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

    def serving(self, form: CallSignature, call: ModuleCall, peers: Peers, make: Make) -> Programs:
        """The programs for a call; planned on all ranks, if missing."""
        if (programs := self._known_for(form)) is not None:
            return programs
        first, ours = self.known[0][0], self.known[0][1].compiled.after
        started = time.perf_counter()
        with naming_call(first, form):
            made = make(peers.planned(lambda: self._plan(ours, form, call), Compiled.subjects))
        self._surroundings.settle(self._states.own(form))
        seconds = time.perf_counter() - started
        log.warning("planned in %.1f s for another call signature: %s", seconds, first.difference(form))
        self._anew.see(form, [known for known, _ in self.known])
        if len(self.known) > self.hints.max_specializations:
            del self.known[1]
        self.known.append((form, made))
        return made

    def _known_for(self, form: CallSignature) -> Programs | None:
        """The known programs for a signature, if any."""
        return next((programs for known, programs in self.known if known.serves(form)), None)

    def _used(self, programs: Programs) -> None:
        """Mark programs as the most recently used, on all ranks."""
        self.known[1:] = sorted(self.known[1:], key=lambda known: known[1] is programs)

    def trace(self, args: tuple[Any, ...], training: frozenset[str]) -> Graph:
        """The captured program of the model's results for other arguments, in a mode."""
        for path, module in self.skeleton.named_modules():
            module.training = path in training
        hints = replace(self.hints, args=args, targets=(), loss=None, **UNSTEPPED)
        return unfolded(capture_model(self.skeleton, self.known[0][1].compiled.after.mesh, hints).graph)

    def renew(self, make: Make) -> None:
        """Lower all programs again."""
        self.known = [(form, make(programs.compiled)) for form, programs in self.known]

    def _plan(self, first: Graph, form: CallSignature, call: ModuleCall) -> Compiled:
        """The plan for a call signature, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        for path, module in self.skeleton.named_modules():
            module.training = path in form.training
        model = self.fill(self.skeleton) if self.hints.guard else self.skeleton
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in form.trainable)
        states = {each.name for each in first.of_kind(InputKind.STATE)}
        specs = {name: spec for name, spec in stored_specs(first).items() if name not in states}
        hints = hints_of_signature(self.hints, specs, form, call)
        if hints.pipeline is not None:
            hints = replace(hints, pipeline=replace(hints.pipeline, stages=stages_as_planned(first)))
        with torch.set_grad_enabled(bool(form.gradients) or torch.is_grad_enabled()):
            made = self.build(
                model, hints, [earlier_capture(known, programs.compiled) for known, programs in self.known]
            )
        reject_stored_otherwise(first, made.after)
        return made


def _pulled(programs: Programs) -> list[Output]:
    """The differentiable results."""
    outputs = [o for o in programs.step.graph.outputs if o.kind is OutputKind.RESULT]
    return [o for o in outputs if is_pulled(o.value.type.dtype)]
