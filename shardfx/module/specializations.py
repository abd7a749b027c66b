"""Specializations: the programs for each call signature (batch size, autocast, which inputs need gradients), and for
each state of what the code reads beside its inputs, as Dynamo's guards say.

A plan is captured for the example inputs. Another call is planned when it is first seen, under the same hints, with the
placements that the first plan stores: all work on one store. Ranks compare the number of the specialization before
anything runs; what a rank reads may be its own if it leads to one plan. A model that is not traced (``guard=True``, an
``ExportedProgram``) has the texts of its attributes in place of guards.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from shardfx.compile import Compiled, capture_model, trace_model, traced_call
from shardfx.gradients import is_pulled, product
from shardfx.hints import Hints
from shardfx.ir.capture.data_dependent import stored
from shardfx.ir.capture.frontend.dynamo import TracedCall, changing_number
from shardfx.ir.capture.frontend.loss_module import OwnLoss
from shardfx.ir.capture.frontend.model_preparation import attributes_of, reject_backward_hooks, without_weights
from shardfx.ir.capture.frontend.traced_program import without_loss
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, OutputKind
from shardfx.ir.spec import Spec, TensorType, dim_order_of, strides_of
from shardfx.ir.text import print_graph
from shardfx.ir.unfolding.unfold import unfolded
from shardfx.module.call_signature import (
    TARGETS,
    CallSignature,
    ModuleCall,
    autocast_around,
    first_signature,
    global_hooks,
    in_structure,
    inputs_of,
    passing_of,
    rank_inputs,
    result_tensors,
)
from shardfx.module.grad_delivery import (
    ForwardSnapshot,
    Wanted,
    attach,
    check_step,
    leaves,
    loss_with_grads,
    refuse,
    reject_part,
    reject_without_loss,
    trained,
    vjp_call,
)
from shardfx.module.grad_delivery import gradients as gradients_of
from shardfx.module.model_state import SourceModel
from shardfx.module.programs import BESIDE, INFER, LOSS, PULL, RUNS, STEP, TRAIN, Programs
from shardfx.module.sparse_steps import touch, touched_rows
from shardfx.passes import stages_as_planned
from shardfx.plan import as_said
from shardfx.runtime.distributed.peers import GUARDS, OtherStates, Peers
from shardfx.runtime.engine import Probe
from shardfx.runtime.step import HELD, STORED
from shardfx.runtime.verify.verdict import Verdict, together

Build = Callable[..., Compiled]
"""Plans a model under hints, from Dynamo's trace if there is one."""


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
    made = []
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
            strides = strides_of(type.shape, dim_order_of(leaf))
            empty = torch.empty_strided(type.shape, strides, dtype=type.dtype, device="meta")
            leaf = (leaf.detach() if real else empty).requires_grad_(name in form.trainable)
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
    """The stored placements of parameters and buffers."""
    return {g.name: g.value.spec for g in graph.inputs if g.kind in STORED and g.value.spec is not None}


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
CallContext = tuple[Peers, Make, Probe | None, bool]
"""The other ranks, the maker of programs, a probe, and whether the batch is local."""
Compute = Callable[[Mapping[str, torch.Tensor]], tuple[torch.Tensor | None, list[torch.Tensor] | None]]
"""Runs a call with the tensors that the code keeps; gives the loss and the tensors of the results, if asked for."""


log = logging.getLogger("shardfx")


class Specializations:
    """The programs of a module by call signature: those it was captured for, and the most recent others."""

    def __init__(self, source: SourceModel, skeleton: nn.Module, hints: Hints, build: Build, traces: bool) -> None:
        self.source, self.skeleton, self.hints, self.build, self.traces = source, skeleton, hints, build, traces
        self.fill: Fill = lambda model: model
        self._last_state = self._joins = 0
        self._attributes = list[dict[str, str]]()
        self._changing, self._fixed = list[str](), set[str]()
        """The sources of numbers that are inputs of plans, and of those that cannot be."""
        self.known: list[tuple[CallSignature, Programs]] = []
        """The first one, then the others, the one used last at the end."""

    def begin(self, form: CallSignature, programs: Programs, fill: Fill) -> None:
        """Set the first programs; ``fill`` gives a copy of the model its weights, where a capture asks for them."""
        self.known, self.fill = [(form, programs)], fill
        self._attributes = [] if self.traces else [attributes_of(self.source.module)]
        if isinstance(self.hints.loss, OwnLoss):
            self.hints.loss.settle()

    def first_signature(self, compiled: Compiled, trainable: Mapping[str, bool]) -> CallSignature:
        """The signature of the first programs."""
        return first_signature(compiled.hints, self._training, trainable, _asks(compiled))

    @property
    def notes(self) -> tuple[str, ...]:
        """The reason of each specialization beside the first."""
        return tuple(f"planned for another call: {self.known[0][0].difference(form)}" for form, _ in self.known[1:])

    @property
    def _training(self) -> frozenset[str]:
        """The modules in training mode, where guards do not say what the code reads of that."""
        return frozenset() if self.traces else self.source.training

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
        peers: Peers,
        make: Make,
        watch: Probe | None,
        with_results: bool = False,
        options: Mapping[str, torch.Tensor] | None = None,
        joined: int = 0,
    ) -> Any:
        """Run a call on this process's ranks; the other ranks make the same call. ``joined``: the number of a state
        for which all ranks plan, as what their code reads is not alike.
        ``with_results``: the loss, and the model's results. ``options``: a full step, with these optimizer's rates.

        Raises:
            Error: they do not; there is no loss where one is asked for; no plan for such a call; a rank fails.
        """
        if isinstance(self.hints.loss, OwnLoss):
            self.hints.loss.check()
        if self.traces and self.known[0][1].compiled.captured.trace is None:
            self._trace_first(make)
        first, trace = self.known[0][1], self.known[0][1].compiled.captured.trace
        trains = call.has_targets and first.compiled.trains
        steps, learns = options is not None, trains and torch.is_grad_enabled()
        kinds = STEP if steps else INFER if not trains else TRAIN if learns else LOSS
        if with_results:
            reject_without_loss(trains)
            kinds |= BESIDE
        parameters = trained(first.step.store)
        every = {**parameters, **{name: each for name, each in call.tensors.items() if each.requires_grad}}
        wanted = every if torch.is_grad_enabled() and not steps else {}
        gradients = frozenset(parameters if steps else wanted if learns else ())
        if steps:
            check_step(first.compiled, first.step.store.parameters, gradients, call.has_targets)
        inputs = inputs_of(call, first)
        form = CallSignature(self._training, inputs, gradients, autocast_around(), hooks=global_hooks())
        form = self._in_state(form, call, every)
        form = replace(form, state=joined) if joined else form

        def words() -> dict[str, str]:
            return {"runs": RUNS[kinds], **form.words(), **({"watched by": type(watch).__name__} if watch else {})}

        def beside() -> dict[str, str]:
            modes = {f"training mode of {path or 'the model'}": "yes" for path in sorted(self.source.training)}
            guards = f"{', '.join(form.changed)} fails" if form.changed else f"those of state {form.state} hold"
            return {**modes, GUARDS: guards} if trace is not None else {}

        key = (kinds, form.key, watch is not None)
        try:
            local = peers.agree(key, words, passing_of(first, call), options, beside=beside)
        except OtherStates:  # on all ranks, and nothing was run
            self._joins += 1
            return self.run(call, peers, make, watch, with_results, options, -self._joins)
        programs = self.serving(form, call, peers, make)
        call = self._alike(programs, call, key, peers, local)
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

    def _alike(self, programs: Programs, call: ModuleCall, key: Hashable, peers: Peers, local: bool) -> ModuleCall:
        """The call, with inputs that must be equal on all ranks: compared, or (if the hints say so) broadcast."""
        given = partial(rank_inputs, programs, call, local)
        if self.hints.check_inputs == "broadcast":
            return call.holding(peers.firsts(programs.step.graph.mesh, given))
        peers.compare(key, given, bool(self.hints.check_inputs))
        return call

    def _trace_first(self, make: Make) -> None:
        """Trace the model of a plan that was made without weights, for its first call, and plan again where the graph
        is another one."""
        form, programs = self.known[0]
        compiled, model = programs.compiled, self.skeleton
        with torch.enable_grad():
            trace = trace_model(self.source.module, compiled.hints, trainable=form.trainable)
            captured = capture_model(model, compiled.captured.graph.mesh, compiled.hints, trace)
            if print_graph(captured.graph, sources=False) == print_graph(compiled.captured.graph, sources=False):
                programs.compiled = replace(compiled, captured=replace(compiled.captured, trace=trace))
            else:
                specs = {**as_said(compiled.hints).specs, **stored_specs(compiled.after)}
                made = self.build(model, replace(compiled.hints, specs=specs), trace)
                reject_stored_otherwise(compiled.after, made.after)
                programs = make(made)
        trainable = dict.fromkeys(form.trainable, True)
        self.known[0] = self.first_signature(programs.compiled, trainable), programs

    def _onwards(
        self, programs: Programs, call: ModuleCall, form: CallSignature, around: CallContext, wanted: Wanted
    ) -> Any:
        """The model's results, with a VJP to ``wanted``. Where random numbers are drawn, forward and backward are
        programs of one plan, for ranks draw by what they hold."""
        (peers, make, watch, local), asked = around, frozenset(wanted)
        if programs.step.draws(INFER) and not local:
            results = (o.value for o in programs.step.graph.outputs if o.kind is OutputKind.RESULT)
            pulled = [value for value in results if is_pulled(value.type.dtype)]
            zeros = [torch.zeros((), dtype=value.type.dtype).expand(value.shape) for value in pulled]
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
                its_call = self._alike(pulled, its_call, key, peers, False)
                made = step.run(PULL, {**its_call.tensors, **kept}, watch, before.kept)
                touch(touched_rows(step, made))
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
        return traced_call(self.source.module, hints, call.args, call.kwargs, targets)

    def _in_state(self, form: CallSignature, call: ModuleCall, trainable: Wanted) -> CallSignature:
        """The signature, with what the code asks of the tensors, and the number of the specialization whose guards
        hold, or of a new one, and why."""
        failed = tuple[str, ...]()
        for known, programs in reversed(self.known):  # the newest first, which other ranks may have joined
            form = replace(form, asks=frozenset(trainable) if _asks(programs.compiled) else frozenset())
            trace = programs.compiled.captured.trace
            if trace is None and not self.traces:
                return self._by_attributes(form)
            if trace is None or not known.serves_in_state(form):
                continue
            traced = self._traced_call(programs, call)
            if trace.is_valid(traced):
                return replace(form, state=known.state)
            failed = failed or trace.reasons(traced)
        return replace(form, state=self._last_state + 1, changed=failed)

    def _by_attributes(self, form: CallSignature) -> CallSignature:
        """The signature of a call of a model that is not traced: its attributes are part of it."""
        now = attributes_of(self.source.module)
        if now not in self._attributes:
            self._attributes.append(now)
        first, state = self._attributes[0], self._attributes.index(now)
        return replace(form, state=state, changed=tuple(n for n in now if now[n] != first.get(n))[:3])

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
        self._last_state = max(self._last_state, form.state)
        seconds = time.perf_counter() - started
        log.warning("planned in %.1f s for another call signature: %s", seconds, first.difference(form))
        self.known.append((form, made))
        return made

    def trace(self, args: tuple[Any, ...]) -> Graph:
        """The captured program of the model's results for other arguments."""
        hints = replace(self.hints, args=args, targets=(), loss=None, **UNSTEPPED)
        model = without_weights(self.source.with_loss)
        return unfolded(capture_model(model, self.known[0][1].compiled.after.mesh, hints).graph)

    def renew(self, make: Make) -> None:
        """Lower all programs again."""
        self.known = [(form, make(programs.compiled)) for form, programs in self.known]

    def _built(self, model: nn.Module, hints: Hints, form: CallSignature) -> Compiled:
        """The plan for a signature. Where Dynamo traces the model, a backward of results has the trace of its forward,
        and numbers that have changed are inputs of the plan, if they can be."""
        if not self.traces:
            return self.build(model, hints)
        same = (p.compiled.captured.trace for known, p in self.known if known.state == form.state and not known.pulls)
        if form.pulls and (forward := next(same, None)) is not None:
            return self.build(model, hints, without_loss(forward))
        self._check_parameters()
        reject_backward_hooks(self.source.module)
        trace = partial(trace_model, self.source.module, hints, trainable=form.trainable, known=stored(self.skeleton))
        changed = [number for number in map(changing_number, form.changed) if number and number not in self._fixed]
        for numbers in [changed, *([each] for each in changed if len(changed) > 1)] if changed else []:
            try:
                changing = [*self._changing, *numbers]
                made = self.build(model, hints, trace(changing))
                self._changing = changing
                return made
            except Error as error:
                log.info("%s: constants of each plan: %s", ", ".join(numbers), error)
        self._fixed |= {*changed}
        try:
            found = trace(self._changing)
        except Error:  # torch.export may say more of why
            capture_model(model, self.known[0][1].compiled.captured.graph.mesh, hints)
            raise
        return self.build(model, hints, found)

    def _check_parameters(self) -> None:
        """Raise where the model has got other parameters.

        Raises:
            Error: one is new, or has another shape.
        """
        known = dict(self.skeleton.named_parameters(remove_duplicate=False))
        for name, each in self.source.module.named_parameters(remove_duplicate=False):
            if name not in known or known[name].shape != each.shape:
                raise Error(
                    "the model has got other parameters since it was parallelized",
                    where=name,
                    expected=f"shape {tuple(known[name].shape)}" if name in known else "the parameters that it had",
                    got=f"a new one of shape {tuple(each.shape)}",
                    remedy="parallelize it again; pm.full_state_dict() has the trained weights of the others",
                )

    def _plan(self, first: Graph, form: CallSignature, call: ModuleCall) -> Compiled:
        """The plan for a call signature, which stores what ``first`` stores.

        Raises:
            Error: it would store a parameter otherwise.
        """
        model = self.skeleton
        if not self.traces:
            model = (self.fill if self.hints.guard else without_weights)(self.source.with_loss)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in form.trainable)
        hints = hints_of_signature(self.hints, stored_specs(first), form, call)
        if hints.pipeline is not None:
            hints = replace(hints, pipeline=replace(hints.pipeline, stages=stages_as_planned(first)))
        with torch.set_grad_enabled(bool(form.gradients) or torch.is_grad_enabled()):
            made = self._built(model, hints, form)
        reject_stored_otherwise(first, made.after)
        return made


def _asks(compiled: Compiled) -> bool:
    """Whether the code asks which tensors require a gradient, as far as that is known."""
    trace = compiled.captured.trace
    return trace is None or trace.asks_for_gradients
