"""Specializations: the programs for each call signature (mode, batch size, number, which inputs need gradients).

A plan is captured for the example inputs, in the mode that the model was in. Another signature is planned when it is
first seen, under the same hints, from a copy of the model without weights, with the placements that the first plan
stores: all work on one store. With ``Hints(guard=True)`` the copy has the current
weights, and the call's own tensors are the examples.

A Python number is part of a program: it is specialized on. Python state that the code reads beside its inputs is
numbered: by values, or, where Dynamo traces a model that keeps something from call to call, by the specialization whose
guards hold. Ranks compare the number before anything runs; what a rank reads may be its own if it leads to one plan.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from shardfx.compile import capture_model
from shardfx.compiled import Compiled
from shardfx.gradients import is_pulled, product
from shardfx.hints import Hints
from shardfx.ir.capture.frontend.dynamo import TracedCall, changing_number, trace_call
from shardfx.ir.capture.hidden_state import EarlierCapture
from shardfx.ir.capture.python_state.bytecode import CodeNames
from shardfx.ir.capture.python_state.python_state import PythonState
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Output, OutputKind
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.module.call_signature import (
    TARGETS,
    CallSignature,
    InputQueries,
    ModuleCall,
    autocast_around,
    in_structure,
    inputs_of,
    passing_of,
    rank_inputs,
    result_tensors,
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
from shardfx.runtime.distributed.peers import OtherStates, Peers, RankInput
from shardfx.runtime.engine import Probe
from shardfx.runtime.step import HELD, ProgramRunner
from shardfx.runtime.verify.verdict import Verdict, together

Build = Callable[..., Compiled]
"""Plans a model under hints, after calls of other signatures, from Dynamo's trace if there is one."""


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


@contextmanager
def naming_call(first: CallSignature, form: CallSignature) -> Iterator[None]:
    """Add to errors within how a call's signature, for which a plan is made, differs from the first one."""
    try:
        yield
    except Error as error:
        if not first.serves(form):
            error.in_call(first.difference(form))
        raise


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
CallContext = tuple[Peers, Make, Probe | None, bool]
"""The other ranks, the maker of programs, a probe, and whether the batch is local."""
Compute = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor | None, list[torch.Tensor] | None]]
"""Runs a call with the tensors that the code keeps; gives the loss and the tensors of the results, if asked for."""


log = logging.getLogger("shardfx")


class Specializations:
    """The programs of a module by call signature: those it was captured for, and the most recent others."""

    def __init__(self, skeleton: nn.Module, hints: Hints, build: Build) -> None:
        self.skeleton, self.hints, self.build = skeleton, hints, build
        self.fill: Fill = lambda model: model
        self._surroundings = PythonState(skeleton, hints.loss)
        self._last_state = self._joins = 0
        self._joined: dict[int, int] = {}
        self._changing, self._fixed = list[str](), set[str]()
        """The sources of numbers that are inputs of plans, and of those that cannot be."""
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
        first, trace = self.known[0][1], self.known[0][1].compiled.captured.trace
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
        inputs = inputs_of(call, first.step)
        asked = self.asks.of_call(call.tensors, inputs, lambda: tensors_with_grad(first.step.store, call))
        form = self._in_state(CallSignature(training, inputs, gradients, autocast_around(), asked=asked), call)

        def words() -> dict[str, str]:
            watched = {"watched by": type(watch).__name__} if watch is not None else {}
            guards = {"guards": ", ".join(form.changed) or f"those of state {form.state} hold"} if trace else {}
            return {"runs": RUNS[kinds], **form.words(), **guards, **watched}

        key = (kinds, form.key, watch is not None)
        try:
            local = peers.agree(key, words, passing_of(first.step, call), options)
        except OtherStates:  # on all ranks, and nothing was run: no rank has programs for this state
            self._joins += 1
            self._joined[self._surroundings.state()[0]] = -self._joins
            return self.run(call, training, peers, make, watch, with_results, options)
        programs = self.serving(form, call, peers, make)
        call = self._alike(programs.step, call, key, peers, local)
        if kinds is INFER and wanted:
            return self._onwards(programs, call, form, (peers, make, watch, local), wanted)
        step = programs.step
        first.say_unused(programs, kinds)
        learns = learns and not steps
        tensors = leaves(wanted) if learns else []

        def compute(others: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor | None, list[torch.Tensor] | None]:
            kept_too = programs.compiled.captured.trace
            runs = kinds if kept_too is None or not kept_too.keeps else kinds | BESIDE
            with naming_call(self.known[0][0], form):
                made = step.run(runs, {**call.tensors, **others, **(options or {})}, watch)
            loss = made[OutputKind.LOSS, "loss"][0] if trains else None
            if learns:
                loss = loss_with_grads(step, call, local, wanted, made)
            results = result_tensors(programs.compiled, step, local, made) if OutputKind.RESULT in runs else None
            return loss, attach(results, refuse, tensors) if tensors and results else results

        loss, out = self._replayed(programs, call, compute)
        return (loss, out) if with_results else loss if trains else out

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
        (peers, make, watch, local), asked = around, frozenset(wanted)
        if programs.step.draws(INFER) and not local:
            zeros = [torch.zeros((), dtype=o.value.type.dtype).expand(o.value.shape) for o in _pulled(programs)]
            its_call, its_form = vjp_call(call, form, zeros, asked)
            programs = self.serving(its_form, its_call, peers, make)
        step, seed = programs.step, programs.step.seed(INFER)
        tensors = leaves(wanted)
        before = ForwardSnapshot.of(step, [*tensors, *call.tensors.values()], seed)

        def compute(others: Mapping[str, torch.Tensor]) -> tuple[None, list[torch.Tensor]]:
            kept.update(others)
            results = step.run(INFER, {**call.tensors, **others}, watch, before.kept)
            return None, attach(result_tensors(programs.compiled, step, local, results), pull, tensors)

        kept = dict[str, torch.Tensor]()

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
                made = step.run(PULL, {**its_call.tensors, **kept}, watch, before.kept)
                return gradients_of(step, its_call, False, wanted, made)

        return self._replayed(programs, call, compute)[1]

    def _replayed(self, programs: Programs, call: ModuleCall, compute: Compute) -> tuple[torch.Tensor | None, Any]:
        """The loss and the results of a call, in the model's own objects, with the effects on Python state."""
        captured = programs.compiled.captured
        if captured.trace is None:
            loss, tensors = compute({})
            return loss, None if tensors is None else in_structure(captured, tensors)
        trace = captured.trace

        def run(others: Mapping[str, torch.Tensor]) -> list[torch.Tensor | None]:
            loss, tensors = compute(others)
            numbers = trace.results[trace.has_loss :]
            results = [
                each.detach() if i >= trace.count and number not in trace.trained else each
                for i, (number, each) in enumerate(zip(numbers, tensors or (), strict=False))
            ]
            return [*[loss][: trace.has_loss], *results, *[None] * (len(numbers) - len(results))]

        *losses, out = trace.replay(self._traced_call(programs, call), run)
        return losses[0] if losses and call.has_targets else None, out

    def _traced_call(self, programs: Programs, call: ModuleCall) -> TracedCall:
        """A call as programs were traced: without targets, it has those of the trace."""
        hints = programs.compiled.hints
        targets = call.targets if call.has_targets else hints.targets
        return TracedCall(self.skeleton, hints.loss, call.args, dict(call.kwargs), targets)

    def _in_state(self, form: CallSignature, call: ModuleCall) -> CallSignature:
        """The signature, with the number of the specialization whose guards hold, or of a new one, and why."""
        if self.known[0][1].compiled.captured.trace is None:
            state, changed = self._surroundings.state()
            return replace(form, state=self._joined.get(state, state), changed=changed)
        self._set_modes(form.training)
        failed = ""
        for known, programs in self.known:
            trace = programs.compiled.captured.trace
            if trace is None or not replace(known, state=0, changed=()).serves(form):
                continue
            traced = self._traced_call(programs, call)
            if trace.is_valid(traced):
                return replace(form, state=known.state)
            failed = trace.reason(traced)
        return replace(form, state=self._last_state + 1, changed=(failed,) if failed else ())

    def serving(self, form: CallSignature, call: ModuleCall, peers: Peers, make: Make) -> Programs:
        """The programs for a call; planned on all ranks, if missing."""
        for known, programs in self.known:
            if known.serves(form):
                return programs
        first, ours = self.known[0][0], self.known[0][1].compiled.after
        if len(self.known) > (most := self.hints.max_specializations):
            raise Error(
                "a call of another signature, and there are as many plans as the hints allow",
                where="pm(...)",
                expected=f"at most {most} beside the first: Hints(max_specializations={most})",
                got=first.difference(form),
                remedy="pad batches to few sizes, make what changes each step an argument or a buffer, or allow more",
            )
        started = time.perf_counter()
        with naming_call(first, form):
            made = make(peers.planned(lambda: self._plan(ours, form, call), Compiled.subjects))
        self._surroundings.settle({said: own for own, said in self._joined.items()}.get(form.state, form.state))
        self._last_state = max(self._last_state, form.state)
        seconds = time.perf_counter() - started
        log.warning("planned in %.1f s for another call signature: %s", seconds, first.difference(form))
        self.known.append((form, made))
        return made

    def trace(self, args: tuple[Any, ...], training: frozenset[str]) -> Graph:
        """The captured program of the model's results for other arguments, in a mode."""
        self._set_modes(training)
        hints = replace(self.hints, args=args, targets=(), loss=None, **UNSTEPPED)
        return unfolded(capture_model(self.skeleton, self.known[0][1].compiled.after.mesh, hints).graph)

    def renew(self, make: Make) -> None:
        """Lower all programs again."""
        self.known = [(form, make(programs.compiled)) for form, programs in self.known]

    def _built(self, model: nn.Module, hints: Hints, behind: Sequence[EarlierCapture], form: CallSignature) -> Compiled:
        """The plan for a signature. Where Dynamo traces the model, a backward of results has the trace of its forward,
        and numbers that have changed are inputs of the plan, if they can be."""
        if self.known[0][1].compiled.captured.trace is None:
            return self.build(model, hints, behind)
        same = (p.compiled.captured.trace for known, p in self.known if known.state == form.state and not known.pulls)
        if form.pulls and (trace := next(same, None)) is not None:
            return self.build(model, hints, behind, trace.without_loss())
        call = TracedCall(self.skeleton, hints.loss, hints.args, dict(hints.kwargs), hints.targets)
        number = next(filter(None, map(changing_number, form.changed)), "")
        if number and number not in self._fixed:
            try:
                made = self.build(model, hints, behind, trace_call(call, [*self._changing, number]))
                self._changing.append(number)
                return made
            except Error as error:
                log.info("%s is a constant of each plan: %s", number, error)
                self._fixed.add(number)
        return self.build(model, hints, behind, trace_call(call, self._changing))

    def _set_modes(self, training: frozenset[str]) -> None:
        """Set the modes of the twin's modules."""
        for path, module in self.skeleton.named_modules():
            module.training = path in training

    def _plan(self, first: Graph, form: CallSignature, call: ModuleCall) -> Compiled:
        """The plan for a call signature, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        self._set_modes(form.training)
        model = self.fill(self.skeleton) if self.hints.guard else self.skeleton
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in form.trainable)
        states = {each.name for each in first.of_kind(InputKind.STATE)}
        specs = {name: spec for name, spec in stored_specs(first).items() if name not in states}
        hints = hints_of_signature(self.hints, specs, form, call)
        if hints.pipeline is not None:
            hints = replace(hints, pipeline=replace(hints.pipeline, stages=stages_as_planned(first)))
        with torch.set_grad_enabled(bool(form.gradients) or torch.is_grad_enabled()):
            behind = [earlier_capture(known, programs.compiled) for known, programs in self.known]
            made = self._built(model, hints, behind, form)
        reject_stored_otherwise(first, made.after)
        return made


def _pulled(programs: Programs) -> list[Output]:
    """The differentiable results."""
    outputs = [o for o in programs.step.graph.outputs if o.kind is OutputKind.RESULT]
    return [o for o in outputs if is_pulled(o.value.type.dtype)]
