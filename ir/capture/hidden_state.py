"""Hidden state: what a model carries from call to call beside its buffers, which programs do not.

    if self.mean is None: self.mean = x.mean()        self.noise = torch.randn(4), drawn once        self.calls += 1

Where a forward changes what its modules or its code hold, it is called again behind another call, on fake tensors: what
it computes there, of another batch, must be computed as in a first call (by :mod:`.value_numbering`). So a forward may
keep what is the same at each call, such as a mask by its size. The other call may be of another specialization.

A buffer may carry an autograd graph, too (``self.k.mul_(0.9).add_(y)``). Where the loss depends on the old content of
such a buffer by more than a detached read, torch raises at the second backward, or adds the gradients of all earlier
calls: such a model is refused.
"""

from __future__ import annotations

import dis
import linecache
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind, Where
from shardfx.ir.spec import as_it_lies

from .data_dependent import stored, with_real_tensors
from .frontend.capture_errors import user_frame
from .model_and_loss import ModelAndLoss, TraceResults
from .python_state.bytecode import CodeNames, codes, led_to, one_where_asked
from .python_state.python_state import PythonState
from .python_state.python_values import STATE, ValueReader
from .python_state.state_snapshot import state_restored
from .source_locations import describe
from .value_numbering import TensorView, ValueNumbering, same_values

FIRST, SECOND = "first", "second"
"""The calls, whose names prefix those of their inputs."""


class StatefulModel(Error):
    """A model keeps something from call to call beside its buffers."""


class ProgramCall(NamedTuple):
    """A program and its inputs; ``form`` where that is not the specialization that the model is in."""

    program: ModelAndLoss
    given: Sequence[Tensor]
    form: EarlierCapture | None = None


@dataclass(frozen=True)
class CallOutcome:
    """The results of a call: tensors by name and the rest as text; buffers after it, by name; and the Python state
    after it, by name and as text."""

    tensors: dict[str, TensorView]
    others: str
    buffers: dict[str, TensorView]
    kept: dict[str, str]


class PairOutcome(NamedTuple):
    """A call alone, and after another one, or what it raises there. ``changed`` is the state that the first one
    changed, with the inputs of that; ``counts`` what of it the second one changed again."""

    alone: CallOutcome
    behind: CallOutcome | Exception
    changed: Mapping[str, set[str]]
    counts: Sequence[str]


def reject_hidden_state(
    call: ProgramCall, around: PythonState, behind: ProgramCall | None = None, trained: Collection[str] = ()
) -> None:
    """Raise if a call computes something else after another one than alone.

    Args:
        behind: the call before it, if that is of another specialization.
        trained: the names of parameters that change between calls, beside those that this one trains.

    Raises:
        Error: it does, or it cannot be known whether it does.
    """
    with _fake_mode(call.program) as mode:
        calls = CallPair(mode, call, behind or call, around, trained)
        with _reparametrize_module(call.program, calls.own), calls.terms:
            seen = calls.run()
    calls.compare(seen)


@contextmanager
def _fake_mode(program: ModelAndLoss) -> Iterator[FakeTensorMode]:
    """Within, a program runs on fake tensors. What it raises there, and did not in its capture, is an Error."""
    guarded = program.guard
    try:
        with with_real_tensors() if guarded else nullcontext():
            shapes = ShapeEnv() if guarded else None
            with FakeTensorMode(allow_non_fake_inputs=True, shape_env=shapes, static_shapes=True) as mode:
                yield mode
    except Exception as error:
        raise unknown_hidden_state(error, program.model) from error


def _fakes(program: nn.Module, mode: FakeTensorMode) -> dict[str, Tensor]:
    """Fakes of parameters and buffers, by name; tied ones are one."""
    made: dict[int, Tensor] = {}
    return {name: made.setdefault(id(each), fake_like(each, mode)) for name, each in stored(program).items()}


class CallPair:
    """Two calls of a model on fake tensors."""

    def __init__(
        self,
        mode: FakeTensorMode,
        call: ProgramCall,
        behind: ProgramCall,
        around: PythonState,
        trained: Collection[str],
    ) -> None:
        self._mode, self._call, self._behind, self._around = mode, call, behind, around
        self.terms = ValueNumbering()
        self.own = _fakes(call.program, mode)
        for name, each in stored(call.program).items():  # which lists may contain, too
            self.terms.stands_for(each, self.own[name])
        self._changing = {MODEL + name for name in trained}
        if call.program.loss is not None or behind.program.loss is not None:
            self._changing |= {name for name, each in self.own.items() if each.requires_grad}

    def run(self) -> PairOutcome:
        """Run the call, after the other one and alone."""
        for each in (self._behind, self._call) if self._call is not self._behind else ():
            with state_restored(self._around):
                self._run(each, FIRST)  # and it is known which buffers it replaces
        with state_restored(self._around):
            kept, before = self._kept(), self._begin(FIRST)
            first = self._run(self._behind, FIRST)
            self._changing |= {name for name, each in before.items() if self._held(name) != each}
            names = [n for n, text in first.kept.items() if kept.get(n) != text and MODEL + n not in self.own]
            changed, numbers = {name: self._inputs_of(name) for name in names}, self._attributes()
            try:
                behind: CallOutcome | Exception = self._second()
            except Exception as error:
                behind = error
            now = self._attributes()
        with state_restored(self._around):
            alone = self._second()
        return PairOutcome(alone, behind, changed, [name for name in changed if numbers.get(name) != now.get(name)])

    def compare(self, seen: PairOutcome) -> None:
        """Raise if the call computes something else after the other one.

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
            way = "another one" if self._call is self._behind else "one of another specialization"
            raise self._error(blamed, changed, f"another {other} in a call behind {way} than in a first call")

    def _begin(self, call: str) -> dict[str, TensorView]:
        """Begin a call: what optimizers and forwards change between calls has its prefix."""
        self.terms.begin(call)
        own = {}
        for name, each in self.own.items():
            own[f"{call} {name}" if name in self._changing else name] = each
        self.terms.give(own)
        return {name: self.terms.of(each) for name, each in self.own.items()}

    def _held(self, name: str) -> TensorView:
        return self.terms.of(self.own[name])

    def _second(self) -> CallOutcome:
        self._begin(SECOND)
        return self._run(self._call, SECOND)

    def _run(self, call: ProgramCall, name: str) -> CallOutcome:
        with nullcontext() if call.form is None else call.form.applied_to(call.program.model):
            return self._outcome(call, name)

    def _outcome(self, call: ProgramCall, name: str) -> CallOutcome:
        """The results and gradients of a call."""
        program, inputs, _ = call
        fakes = [fake_like(each, self._mode) for each in inputs]
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
        others = ValueReader().said([program.results.leaves, str(program.results.tree)])
        buffers = {f"buffer {n.removeprefix(MODEL)}": self._held(n) for n, e in self.own.items() if not _trained(e)}
        return CallOutcome(tensors, others, buffers, self._kept())

    def _kept(self) -> dict[str, str]:
        """The Python state beside parameters and buffers, with the identity of tensors."""
        return attributes(self._call.program, self._around, ValueReader())

    def _attributes(self) -> dict[str, str]:
        return attributes(self._call.program, self._around)

    def _inputs_of(self, name: str) -> set[str]:
        """The inputs of the tensors that are stored under a name."""
        path, _, attribute = (MODEL + name).rpartition(".")
        module = dict(self._call.program.named_modules()).get(path)
        content = (vars(module) | module._buffers).get(attribute) if module is not None else None
        tensors = [each for each in ValueReader().walk(content) if isinstance(each, Tensor)]
        return self.terms.made_of([self.terms.of(each) for each in tensors])

    def _difference(self, alone: CallOutcome, behind: CallOutcome) -> str:
        """The first result that differs between two calls."""
        ours, theirs = alone.tensors | alone.buffers, behind.tensors | behind.buffers
        for name in dict.fromkeys((*ours, *theirs)):
            mine, other = ours.get(name), theirs.get(name)
            if mine is None or other is None or not same_values(mine, other, self.terms):
                return name
        return "" if alone.others == behind.others else "result that is no tensor"

    def _blamed(self, other: str, behind: CallOutcome, changed: Mapping[str, set[str]]) -> list[str]:
        """The hidden state that makes a difference: what depends on the first call, or else what is no tensor."""
        made = (behind.tensors | behind.buffers).get(other)
        carried = {n for n in self.terms.made_of([made] if made else []) if n == FIRST or n.startswith(FIRST + " ")}
        return [name for name, inputs in changed.items() if carried & inputs] or [
            name for name, inputs in changed.items() if not inputs
        ]

    def _error(self, blamed: Sequence[str] | Mapping[str, object], changed: Mapping[str, object], got: str) -> Error:
        return hidden_state_error([*(blamed or changed)], got, self._call.program, self._around)


def _trained(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter)


def fake_like(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake of a tensor, on the CPU; with its content, if real tensors go along."""
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


MODEL = "model."
"""The path of the model in a program of it and its loss."""


def attributes(program: nn.Module, around: PythonState, contents: ValueReader | None = None) -> dict[str, str]:
    """The attributes of modules beside parameters and modules, as text (of a tensor, that there is one), and what else
    the code reads."""
    said = (contents or ValueReader(CodeNames())).said
    own = {
        f"{path}.{name}".removeprefix(MODEL): said(value)
        for path, module in program.named_modules()
        for name, value in (vars(module) | module._buffers).items()
        if name not in STATE
    }
    return own | around.named()


def hidden_state_error(names: Sequence[str], got: str, program: nn.Module, around: PythonState) -> Error:
    """The error of a program with hidden state under these names."""
    line = _line(names[0], program, around) if names else ""
    return StatefulModel(
        "the model keeps something from call to call",
        where=", ".join(names) + (f": {line}" if line else ""),
        expected="a forward that changes no attributes of modules, or none that the next call sees",
        got=got,
        remedy="make it a buffer: self.register_buffer(name, torch.tensor(0)), and self.name.add_(1) in forward; or "
        "hand it in as an argument, and give it back with the results",
    )


def unknown_hidden_state(error: Exception, model: nn.Module) -> Error:
    """The error of a model that cannot be called once more on fake tensors."""
    return StatefulModel(
        "the model changes what it holds, and it cannot be known whether the next call sees it",
        where=user_frame(error, model),
        expected="a forward that changes no attributes of modules, or that runs without numbers once more",
        got=f"{type(error).__name__}: {error}"[:300],
        remedy="hold what is the same at each call before parallelize, as a buffer, and leave the rest out",
    )


SETS = ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF", "DELETE_ATTR")


def _line(name: str, program: nn.Module, around: PythonState) -> str:
    """The line of code that sets an attribute or a variable, or else the first one that names it."""
    path, _, own = (MODEL + name).rpartition(".")
    module = dict(program.named_modules()).get(path)
    functions = [*led_to(type(module))] if module is not None else []
    functions += [each for each in around.walk() if isinstance(each, FunctionType)]
    every = [each for function in functions for each in codes(function.__code__)]
    found = [
        (ins.opname not in SETS, code.co_filename, ins.positions.lineno)
        for code in every
        for ins in dis.get_instructions(code)
        if ins.argval == own and ins.positions is not None and ins.positions.lineno
    ]
    if not found:
        return ""
    _, file, line = min(found, key=lambda each: each[0])
    return describe(Where("", file, line, linecache.getline(file, line).strip()))


def trained_by(forms: Sequence[EarlierCapture]) -> frozenset[str]:
    """The names of the parameters that these specializations train."""
    return frozenset(name for each in forms if each.loss is not None for name in each.gradients)


def reject_hidden_state_between(call: ProgramCall, forms: Sequence[EarlierCapture]) -> None:
    """Raise if hidden state passes between a call and those of other specializations.

    Raises:
        Error: it does, or that cannot be known.
    """
    program = call.program
    trained = trained_by(forms)
    for form in forms:
        if not form.keeps and not program.results.keeps:
            continue
        leaves, tree = pytree.tree_flatten((form.args, dict(form.kwargs), form.targets))
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        around = PythonState(program.model, form.loss if form.loss is not None else program.loss)
        further = (
            TraceResults(),
            program.guard,
            program.compute,
            program.by_example,
            one_where_asked(tensors, around.names.named),
        )
        other = ModelAndLoss(program.model, tree, leaves, form.loss, len(form.targets), *further)
        earlier = ProgramCall(other, tensors, form)
        if form.keeps:
            reject_hidden_state(call, around, earlier, trained)
            if program.loss is not None and not trained:  # now there is something that changes between its calls
                own = program.model.named_parameters()
                reject_hidden_state(earlier, around, None, {name for name, each in own if each.requires_grad})
        if program.results.keeps:
            reject_hidden_state(earlier, around, call, trained)


@dataclass(frozen=True)
class EarlierCapture:
    """A specialization that a model was captured for before: its inputs, the paths of modules in training mode, and the
    names of what has a gradient. ``keeps``: the trace changed Python state of the model."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    loss: Callable[..., Tensor] | None
    training: frozenset[str]
    gradients: frozenset[str]
    keeps: bool

    @contextmanager
    def applied_to(self, model: nn.Module) -> Iterator[None]:
        """Within, a model is in the modes of the call, and its parameters require gradients as there."""
        modes = [(module, module.training) for module in model.modules()]
        wants = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
        for path, module in model.named_modules():
            module.training = path in self.training
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.gradients)
        try:
            with torch.set_grad_enabled(bool(self.gradients)):
                yield
        finally:
            for module, mode in modes:
                module.training = mode
            for parameter, wanted in wants:
                parameter.requires_grad_(wanted)


ALL_CALLS = "a gradient that is the sum over all calls so far: torch goes back through {} into each of them"


def reject_history(call: ProgramCall, graph: Graph, around: PythonState) -> None:
    """Raise if the backward of a call goes through a buffer into the call before.

    Raises:
        Error: it does, with what torch says of the second backward.
    """
    names = call.program.assigned.with_history
    if not names or call.program.loss is None:
        return
    with _fake_mode(call.program) as mode, state_restored(around):
        found = _through(call, names, mode)
    if found is None:
        return
    name, got = found
    name = name.removeprefix(MODEL)
    written = next((o.value.where for o in graph.outputs if (o.kind, o.name) == (OutputKind.BUFFER, name)), None)
    raise Error(
        "a buffer carries an autograd graph from one call to the next, on one device as well",
        where="  ".join(filter(None, (name, describe(written) if written is not None else ""))),
        expected="a backward that ends in its own call",
        got=got,
        remedy=f"self.{name.rpartition('.')[2]}.detach_() in forward, in front of its first use",
    )


def _through(call: ProgramCall, names: Collection[str], mode: FakeTensorMode) -> tuple[str, str] | None:
    """The first buffer through which the backward of a call leaves it, and what a second backward does."""
    program = call.program
    own = _fakes(program, mode)
    begins = {name: own[name].detach().requires_grad_() for name in sorted(names)}
    for name, leaf in begins.items():
        history = leaf.clone()
        own.update({other: history for other, each in own.items() if each is own[name]})
    fakes = [fake_like(each, mode) for each in call.given]
    trained = [each for each in {id(each): each for each in (*own.values(), *fakes)}.values() if each.is_leaf]
    inputs = [*begins.values(), *(each for each in trained if each.requires_grad)]
    with _reparametrize_module(program, own):
        loss = program(*fakes)[0]
        if not loss.requires_grad:
            return None
        found = torch.autograd.grad(loss, inputs, allow_unused=True)
        reached = next((name for name, grad in zip(begins, found, strict=False) if grad is not None), None)
        if reached is None:
            return None
        try:
            torch.autograd.grad(program(*fakes)[0], inputs, allow_unused=True)
        except RuntimeError as error:
            return reached, f"{type(error).__name__} in the second backward: {str(error).splitlines()[0]}"
        return reached, ALL_CALLS.format(reached.removeprefix(MODEL))
