"""The signature of a call: all that decides which specialization (programs) serves it; and the checks of a call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from shardfx.compile import Compiled
from shardfx.hints import Hints
from shardfx.ir.capture.frontend.dynamo import users_hooks
from shardfx.ir.capture.frontend.model_preparation import refuse_hook
from shardfx.ir.capture.model_and_loss import UnknownResult, leaf_names
from shardfx.ir.capture.trace import Captured
from shardfx.ir.dim_sharding import is_strided
from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, OutputKind
from shardfx.ir.spec import TensorType
from shardfx.module.programs import Programs
from shardfx.runtime.distributed.peers import AROUND, Passed, RankInput
from shardfx.runtime.step import ProgramRunner, Results
from shardfx.runtime.verify.interface import without_content


def check_call(tensors: Mapping[str, torch.Tensor]) -> None:
    """Refuse inputs that are no plain tensors with content, and calls within contexts that programs do not support.

    Raises:
        Error: one of ``torch.func``; or an input with a tangent, which would be lost; a fake one, a sparse one, one of
            a class that dispatches ops itself.
    """
    plain = torch._C._disabled_torch_dispatch_impl
    kinds = {name: type(leaf) for name, leaf in tensors.items() if type(leaf).__torch_dispatch__ is not plain}
    other = next((name for name, kind in kinds.items() if not issubclass(kind, FakeTensor)), None)
    if other is not None:
        raise Error(
            f"an input is a {kinds[other].__name__}, whose own code would be passed over",
            where="pm(...)",
            expected=f"a plain tensor as {other}",
            got=f"a {kinds[other].__name__}, which defines __torch_dispatch__",
            remedy=f"the plain tensor that {other} stands for, such as .full_tensor() of a DTensor; a rank's own part "
            "may be passed as .to_local()",
        )
    odd = next((name for name, leaf in tensors.items() if leaf.layout is not torch.strided or leaf.is_nested), None)
    if odd is not None:
        raise Error(
            "an input is no dense tensor",
            where="pm(...)",
            expected=f"a dense tensor as {odd}, which ranks have shards of",
            got="a nested one" if tensors[odd].is_nested else str(tensors[odd].layout),
            remedy=f"{odd}.to_dense(), or .to_padded_tensor(...) of a nested one",
        )
    empty = next((name for name, leaf in tensors.items() if without_content(leaf)), None)
    if empty is not None:
        raise Error(
            "an input has no content",
            where="pm(...)",
            expected=f"a real tensor as {empty}",
            got="a fake one, or one on meta",
            remedy="sx.api.trace(model, hints) and pm.verify() need no inputs",
        )
    dual = forward_ad._current_level >= 0
    moves = dual and any(forward_ad.unpack_dual(each).tangent is not None for each in tensors.values())
    if moves or torch._C._functorch.peek_interpreter_stack() is not None:
        raise Error(
            "pm(...) is called within a transform of its inputs",
            where="pm(...)",
            expected="a call with tensors as they are, and loss.backward() or torch.autograd.grad",
            got="an input with a tangent (forward_ad)" if moves else "torch.func.grad, jvp, vmap or the like",
            remedy="transform the model itself: with pm.gathered() as model: ...",
        )


def reject_traces(where: str) -> None:
    """Refuse traces, which would not see the model's functions.

    Raises:
        Error: there is one.
    """
    if torch.jit.is_tracing() or get_proxy_mode() is not None:
        raise Error(
            "the programs of a parallel module are no part of a trace",
            where=f"{where}, while it is traced",
            expected="a call with tensors",
            got="torch.export, make_fx or torch.jit.trace",
            remedy="trace the model itself: with pm.gathered() as model: ...; pm.rank_module(rank) is a rank's program",
        )


PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, range, slice)
TARGETS, KWARGS = "targets.", "kwargs."
KNOWN = 8
"""The number of argument structures that are cached."""


@dataclass(frozen=True)
class ModuleCall:
    """The inputs of one call: as they were given, and their leaves by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    leaves: Mapping[str, Any]
    has_targets: bool

    def holding(self, tensors: Mapping[str, torch.Tensor]) -> ModuleCall:
        """The same call with other tensors, by name."""
        return replace(self, leaves={**self.leaves, **tensors})

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True)
class CallSignature:
    """The signature of a call, the key of a specialization: other signatures need other programs.

    ``training`` are the paths of the modules that are in training mode; ``inputs`` types of tensors, and everything
    else as it is; ``gradients`` the parameters and inputs that get one; ``autocast`` the dtypes of ``torch.autocast``
    around the call. ``pulls``: the targets are gradients of the results. ``state`` is the number of the state
    in which is what the code reads beside its inputs, and ``changed`` what of it is not as it was first; ``asks`` are
    the tensors with ``requires_grad``, where the code asks for that; ``hooks`` are those of all modules, by number.
    """

    training: frozenset[str]
    inputs: Mapping[str, object]
    gradients: frozenset[str]
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    pulls: bool = False
    state: int = 0
    changed: tuple[str, ...] = ()
    asks: frozenset[str] = frozenset()
    hooks: tuple[int, ...] = ()

    def serves(self, other: CallSignature) -> bool:
        """Whether programs for this signature serve a call of another: one without targets, or with fewer gradients."""
        return self.state == other.state and self.serves_in_state(other)

    def serves_in_state(self, other: CallSignature) -> bool:
        """Whether they do in the state of this signature."""
        same = all(name in self.inputs and self.inputs[name] == fact for name, fact in other.inputs.items())
        left = [name for name in self.inputs if name not in other.inputs]
        rest = all(name.startswith(TARGETS) for name in left)
        return same and rest and self._around == other._around and other.gradients <= self.gradients

    @property
    def _around(self) -> Hashable:
        return self.training, self.autocast, self.pulls, self.asks, self.hooks

    @property
    def trainable(self) -> frozenset[str]:
        """The names of trainable tensors when programs for this signature are captured."""
        return self.gradients | self.asks

    @property
    def key(self) -> Hashable:
        """A hashable key, equal for equal signatures."""
        return frozenset(self.inputs.items()), self.gradients, self.state, self._around

    def words(self) -> dict[str, str]:
        """The signature by subject, in words that are the same in every process."""
        found = {name: _text_of(fact) for name, fact in self.inputs.items()}
        found |= {"gradients of results": "given"} if self.pulls else {}
        found |= {f"autocast on {device}": str(dtype) for device, dtype in self.autocast}
        found |= {f"training mode of {path or 'the model'}": "yes" for path in sorted(self.training)}
        found |= {AROUND: f"state {self.state}"} if self.state else {}
        found |= {f"requires_grad of {name}": "yes" for name in sorted(self.asks)}
        return found | {f"gradient of {name}": "yes" for name in sorted(self.gradients)}

    def difference(self, other: CallSignature) -> str:
        """The difference to another signature, in words."""
        found = ["gradients of its results are given"] if other.pulls and not self.pulls else []
        for name, fact in other.inputs.items():
            if self.inputs.get(name) != fact and not (other.pulls and name.startswith(TARGETS)):
                found.append(f"{name} is {_text_of(fact)}, not {_text_of(self.inputs.get(name))}")
        if self.training != other.training:
            modes = sorted(self.training ^ other.training)
            more = f" and {len(modes) - 1} more" if len(modes) > 1 else ""
            mode = "training" if modes[0] in other.training else "evaluation"
            found.append(f"{modes[0] or 'the model'}{more} in {mode} mode")
        if self.autocast != other.autocast:
            dtypes = ", ".join(f"{device}: {dtype}" for device, dtype in other.autocast)
            found.append(f"under torch.autocast({dtypes})" if dtypes else "not under torch.autocast")
        if self.state != other.state and other.changed:
            found.append(f"guard {', '.join(other.changed[:3])} fails")
        found += ["other hooks of all modules"] * (self.hooks != other.hooks)
        asked = ((name, "yes" if name in other.asks else "no") for name in sorted(self.asks ^ other.asks)[:3])
        found += [f"requires_grad of {name} is {now}, for which the code asks" for name, now in asked]
        found += [f"a gradient of {name}" for name in sorted(other.gradients - self.gradients)[:3]]
        return "; ".join(found) or "no targets"


def _text_of(value: object) -> str:
    if isinstance(value, TensorType):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, tuple):
        return str(value[1])
    return str(value)


def input_key(leaf: object) -> object:
    """The key of an input that programs depend on: a tensor's type, any other leaf itself."""
    if isinstance(leaf, torch.Tensor):
        return TensorType(tuple(leaf.shape), leaf.dtype)
    fields = getattr(leaf, "__dict__", None)
    return type(leaf).__name__, repr(leaf) if isinstance(leaf, PLAIN) or fields is None else repr(fields)


def first_signature(hints: Hints, training: frozenset[str], trainable: Mapping[str, bool], asks: bool) -> CallSignature:
    """The signature of the first programs: that of the example inputs, and of the model as it was. ``asks``: the code
    asks for ``requires_grad``."""
    named = leaf_names(hints.args, hints.kwargs, hints.targets)
    wanting = {name for name, leaf in named if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    wanting |= {name for name, wants in trainable.items() if wants}
    inputs = {name: input_key(leaf) for name, leaf in named}
    asked = frozenset(wanting if asks else ())
    return CallSignature(training, inputs, frozenset(wanting), autocast_around(), asks=asked, hooks=global_hooks())


def global_hooks() -> tuple[int, ...]:
    """The numbers of the forward hooks of all modules, which Dynamo traces and does not guard.

    Raises:
        Error: there are backward hooks, which programs do not call.
    """
    every = nn.modules.module
    if every._global_backward_hooks or every._global_backward_pre_hooks:
        refuse_hook("all modules", "a backward hook", "remove it, or compute that in forward")
    return (*users_hooks(every._global_forward_hooks), *users_hooks(every._global_forward_pre_hooks))


def autocast_around() -> tuple[tuple[str, torch.dtype], ...]:
    """The enabled ``torch.autocast`` contexts: kinds of device and dtypes. Captured graphs have their casts."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


class CallReader:
    """Reads calls: the names of their leaves, which are the same wherever calls are nested alike."""

    def __init__(self, hints: Hints) -> None:
        self._wanted = [name for name, _ in leaf_names(hints.args, hints.kwargs, hints.targets)]
        self._count = len(hints.args)
        self._targets = any(name.startswith(TARGETS) for name in self._wanted)
        self._known: list[tuple[pytree.TreeSpec, list[str]]] = []

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ModuleCall:
        """The inputs of a call by name: those of the model, then the loss's targets.

        Raises:
            Error: there are others than the model was captured with.
        """
        nests = args[: self._count], dict(kwargs), args[self._count :]
        leaves, tree = pytree.tree_flatten(nests)
        names = next((names for known, names in self._known if known == tree), None)
        if names is None:
            names = [name for name, _ in leaf_names(*nests)]
            self._check(names, bool(nests[2]))
            self._known = [(tree, names), *self._known[:KNOWN]]
        named = dict(zip(names, leaves, strict=True))
        check_call({name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)})
        return ModuleCall(*nests, named, bool(nests[2]) or not self._targets)

    def _check(self, names: Sequence[str], has_targets: bool) -> None:
        needed = [name for name in self._wanted if has_targets or not name.startswith(TARGETS)]
        given, wanted = (sorted(n for n in each if not n.startswith(KWARGS)) for each in (names, needed))
        if given != wanted:  # others by name are another specialization
            raise Error(
                "the inputs are not those that the model was captured with",
                where="pm(...)",
                expected=", ".join(needed),
                got=", ".join(names) or "none",
                remedy="pass the model's arguments first, as positions and names were in Hints, then the targets",
            )


def inputs_of(call: ModuleCall, programs: Programs) -> dict[str, object]:
    """The facts of a call's inputs that programs depend on; a rank's own part counts as the global input."""
    found = {}
    for name, leaf in call.leaves.items():
        found[name] = input_key(leaf)
        fact = programs.call_inputs.get(name)
        if fact is None or not isinstance(leaf, torch.Tensor) or leaf.dtype != fact.value.type.dtype:
            continue
        if tuple(leaf.shape) != fact.value.shape and tuple(leaf.shape) in programs.step.local_shapes(fact):
            found[name] = TensorType(fact.value.shape, leaf.dtype)
    return found


def result_tensors(compiled: Compiled, step: ProgramRunner, local: bool, results: Results) -> list[torch.Tensor]:
    """The tensors of the model's results: global, or (``local``) of a local batch this rank's part; and what its code
    keeps, which is global."""
    count = sum(leaf == "tensor" for leaf in compiled.captured.result_leaves)
    outputs = [o for o in step.graph.outputs if o.kind is OutputKind.RESULT]
    made = [(o, results[o.kind, o.name]) for o in outputs]
    return [each[0] if local and i < count else step.full(o, each) for i, (o, each) in enumerate(made)]


def in_structure(captured: Captured, tensors: Iterable[torch.Tensor]) -> Any:
    """The model's own results, in its own structure.

    Raises:
        Error: the model gives something that holds tensors in a way that is not known.
    """
    unknown = next((leaf for leaf in captured.result_leaves if isinstance(leaf, UnknownResult)), None)
    if unknown is not None:
        raise unknown.error("pm(...)")
    remaining = iter(tensors)
    leaves = [next(remaining) if leaf == "tensor" else leaf for leaf in captured.result_leaves]
    return pytree.tree_unflatten(leaves, captured.result_tree)


def program_tensors(programs: Programs, call: ModuleCall) -> list[tuple[Input, torch.Tensor]]:
    """The tensors of a call that programs take."""
    inputs = programs.call_inputs
    return [(inputs[name], tensor) for name, tensor in call.tensors.items() if name in inputs]


def passing_of(programs: Programs, call: ModuleCall) -> Passed:
    """The way a rank passed its inputs, as global ones or its shards: a single local input decides."""
    found = [_passing_of(programs.step, inp, tensor) for inp, tensor in program_tensors(programs, call)]
    return next((way for way in (Passed.PART, Passed.WHOLE) if way in found), Passed.EITHER)


def _passing_of(step: ProgramRunner, inp: Input, tensor: torch.Tensor) -> Passed:
    shape = tuple(tensor.shape)
    if shape not in step.local_shapes(inp):
        return Passed.WHOLE  # perhaps that of another form
    if shape != inp.value.shape and inp.value.spec is not None and any(map(is_strided, inp.value.spec.dims)):
        raise Error(
            f"a rank passes a part of {inp.name}, whose rows are sharded in stripes",
            expected=f"the global batch, {list(inp.value.shape)}",
            got=list(shape),
            remedy="pass that; or turn stripes, the default of this Context, off: Context(..., stripes=1)",
        )
    return Passed.EITHER if shape == inp.value.shape else Passed.PART


def rank_inputs(programs: Programs, call: ModuleCall, local: bool) -> list[RankInput]:
    """The tensors of a call as a real rank passes them, where its programs run."""
    step = programs.step
    (rank,) = step.ranks
    space = [axis.name for axis in step.graph.mesh.space]
    found = []
    for inp, tensor in program_tensors(programs, call):
        shards, full = step.shards(inp), _passing_of(step, inp, tensor) is Passed.WHOLE or not local
        shard, part = shards.by_rank[rank], tuple(shards.local_shapes[shards.by_rank[rank]])
        sharding = inp.value.spec.axes if inp.value.spec is not None and not full else ()
        axes = tuple(axis for axis in space if axis not in sharding)
        found.append(RankInput(inp.name, tensor, inp.value.shape, part, -1 if full else shard, axes))
    return found
