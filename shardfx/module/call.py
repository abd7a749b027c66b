"""Calling a parallel module: its inputs by name, what programs must be made for, and the model's own results back."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree

from shardfx.compiled import Compiled
from shardfx.hints import Hints
from shardfx.ir.capture.model_and_loss import UnknownResult, leaf_names
from shardfx.ir.capture.python_state.python_values import ValueReader
from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, InputKind, OutputKind
from shardfx.ir.spec import TensorType
from shardfx.runtime.peers import AROUND, Passed, RankInput
from shardfx.runtime.step import ProgramRunner, Results

from .forms.asked_of_inputs import NOTHING, Asked, Asks
from .forms.surroundings_of_call import check_call

PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, range, slice)
TARGETS = "targets."
KNOWN = 8
"""So many ways to nest arguments are kept in mind."""


@dataclass(frozen=True)
class Call:
    """The inputs of one call: as they were given, and their leaves by name."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    leaves: Mapping[str, Any]
    has_targets: bool

    def holding(self, tensors: Mapping[str, torch.Tensor]) -> Call:
        """The same call with other tensors, by name."""
        return replace(self, leaves={**self.leaves, **tensors})

    @cached_property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by name."""
        return {name: leaf for name, leaf in self.leaves.items() if isinstance(leaf, torch.Tensor)}


@dataclass(frozen=True, eq=False)
class Thing:
    """An input of no plain type: which object it is, and its attributes as they were. It is held, so that no other
    object takes its place in memory."""

    held: object
    attributes: tuple[tuple[str, Hashable], ...]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Thing) and self.held is other.held and self.attributes == other.attributes

    def __hash__(self) -> int:
        return hash((id(self.held), self.attributes))

    def __str__(self) -> str:
        said = ", ".join(f"{name}={value}" for name, value in self.attributes if name)
        return f"a {type(self.held).__name__}" + (f"({said})" if said else "")


def attributes(thing: object) -> tuple[tuple[str, Hashable], ...]:
    """What an object or a container holds, as text."""
    held = CONTENTS.held(thing)
    if isinstance(held, str):
        return (("", held),)
    return tuple((name, CONTENTS.said(value)) for name, value in held)


CONTENTS = ValueReader()


@dataclass(frozen=True)
class Form:
    """What programs are made for: another form of call needs other programs.

    ``training`` are the paths of the modules that are in training mode; ``inputs`` types of tensors, and everything
    else as it is; ``gradients`` the parameters and inputs that get one; ``autocast`` the dtypes of ``torch.autocast``
    around the call. ``pulls``: the targets are gradients of the results. ``state`` is the number of the state
    in which is what the code reads beside its inputs, and ``changed`` what of it is not as it was first;
    ``asked`` what the code asks of the tensors themselves.
    """

    training: frozenset[str]
    inputs: Mapping[str, object]
    gradients: frozenset[str]
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    pulls: bool = False
    state: int = 0
    changed: tuple[str, ...] = ()
    asked: Asked = NOTHING

    def serves(self, other: Form) -> bool:
        """Whether programs for this form can do a call of another: one without targets, or with fewer gradients."""
        same = all(name in self.inputs and self.inputs[name] == given for name, given in other.inputs.items())
        left = [name for name in self.inputs if name not in other.inputs]
        rest = all(name.startswith(TARGETS) for name in left)
        return same and rest and self._around == other._around and other.gradients <= self.gradients

    @property
    def _around(self) -> Hashable:
        return self.training, self.autocast, self.pulls, self.state, self.asked

    @property
    def trainable(self) -> frozenset[str]:
        """What has ``requires_grad`` where programs are captured for this form."""
        return self.gradients | self.asked.trainable

    @property
    def key(self) -> Hashable:
        """The same for equal forms."""
        return frozenset(self.inputs.items()), self.gradients, self._around

    def words(self) -> dict[str, str]:
        """The form by subject; equal forms have the same words in every process."""
        found = {name: _said(given) for name, given in self.inputs.items()}
        found |= {"gradients of results": "given"} if self.pulls else {}
        found |= {f"autocast on {device}": str(dtype) for device, dtype in self.autocast}
        found |= {f"training mode of {path or 'the model'}": "yes" for path in sorted(self.training)}
        found |= {AROUND: f"state {self.state}"} if self.state else {}
        found |= self.asked.words
        return found | {f"gradient of {name}": "yes" for name in sorted(self.gradients)}

    def difference(self, other: Form) -> str:
        """In which way another form differs, in words."""
        found = ["gradients of its results are given"] if other.pulls and not self.pulls else []
        for name, given in other.inputs.items():
            if self.inputs.get(name) != given and not (other.pulls and name.startswith(TARGETS)):
                found.append(f"{name} is {_said(given)}, not {_said(self.inputs.get(name))}")
        if self.training != other.training:
            modes = sorted(self.training ^ other.training)
            more = f" and {len(modes) - 1} more" if len(modes) > 1 else ""
            mode = "training" if modes[0] in other.training else "evaluation"
            found.append(f"{modes[0] or 'the model'}{more} in {mode} mode")
        if self.autocast != other.autocast:
            dtypes = ", ".join(f"{device}: {dtype}" for device, dtype in other.autocast)
            found.append(f"under torch.autocast({dtypes})" if dtypes else "not under torch.autocast")
        if self.state != other.state:
            found.append(f"another value of {', '.join(other.changed[:3])}, which the code reads")
        found += [*self.asked.differences(other.asked)][:3]
        found += [f"a gradient of {name}" for name in sorted(other.gradients - self.gradients)[:3]]
        return "; ".join(found) or "no targets"


def _said(given: object) -> str:
    if isinstance(given, TensorType):
        return f"{tuple(given.shape)} {str(given.dtype).removeprefix('torch.')}"
    if isinstance(given, tuple):
        return str(given[1])
    return str(given)


def kind_of(leaf: object) -> object:
    """What programs depend on of an input: a tensor's type, any other leaf itself."""
    if isinstance(leaf, torch.Tensor):
        return TensorType(tuple(leaf.shape), leaf.dtype)
    return (type(leaf).__name__, repr(leaf)) if isinstance(leaf, PLAIN) else Thing(leaf, attributes(leaf))


def first_form(hints: Hints, training: frozenset[str], trainable: Mapping[str, bool], asks: Asks) -> Form:
    """What the first programs are made for: the example inputs, and the model as it was."""
    named = leaf_names(hints.args, hints.kwargs, hints.targets)
    wanting = {name for name, leaf in named if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    wanting |= {name for name, wants in trainable.items() if wants}
    inputs = {name: kind_of(leaf) for name, leaf in named}
    tensors = {name: leaf for name, leaf in named if isinstance(leaf, torch.Tensor)}
    asked = asks.of_call(tensors, inputs, lambda: wanting)
    return Form(training, inputs, frozenset(wanting), autocast_around(), asked=asked)


def autocast_around() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of device for which ``torch.autocast`` is on, and its dtypes. What is captured has the casts in it."""
    kinds = ("cpu", "cuda")
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind))


class Reader:
    """Reads calls: the names of their leaves, which are the same wherever calls are nested alike."""

    def __init__(self, hints: Hints) -> None:
        self._wanted = [name for name, _ in leaf_names(hints.args, hints.kwargs, hints.targets)]
        self._count = len(hints.args)
        self._targets = any(name.startswith(TARGETS) for name in self._wanted)
        self._known: list[tuple[pytree.TreeSpec, list[str]]] = []

    def read(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Call:
        """The inputs of a call by name: those of the model, then the loss's targets.

        Raises:
            Error: there are others than the model was captured with.
        """
        given = args[: self._count], dict(kwargs), args[self._count :]
        leaves, tree = pytree.tree_flatten(given)
        names = next((names for known, names in self._known if known == tree), None)
        if names is None:
            names = [name for name, _ in leaf_names(*given)]
            self._check(names, bool(given[2]))
            self._known = [(tree, names), *self._known[:KNOWN]]
        named = dict(zip(names, leaves, strict=True))
        check_call({name: leaf for name, leaf in named.items() if isinstance(leaf, torch.Tensor)})
        return Call(*given, named, bool(given[2]) or not self._targets)

    def _check(self, names: Sequence[str], has_targets: bool) -> None:
        needed = [name for name in self._wanted if has_targets or not name.startswith(TARGETS)]
        if sorted(names) != sorted(needed):
            raise Error(
                "the inputs are not those that the model was captured with",
                where="pm(...)",
                expected=", ".join(needed),
                got=", ".join(names) or "none",
                remedy="pass the model's arguments first, as positions and names were in Hints, then the targets",
            )


def inputs_of(call: Call, step: ProgramRunner) -> dict[str, object]:
    """What programs depend on of a call's inputs; a rank's own part of an input counts as the whole."""
    expected = {g.name: g for g in step.graph.inputs if g.kind in (InputKind.ARGUMENT, InputKind.TARGET)}
    found = {}
    for name, leaf in call.leaves.items():
        found[name] = kind_of(leaf)
        given = expected.get(name)
        if given is None or not isinstance(leaf, torch.Tensor) or leaf.dtype != given.value.type.dtype:
            continue
        if tuple(leaf.shape) != given.value.shape and tuple(leaf.shape) in step.local_shapes(given):
            found[name] = TensorType(given.value.shape, leaf.dtype)
    return found


def model_results(compiled: Compiled, step: ProgramRunner, local: bool, results: Results) -> Any:
    """The model's own results, as it arranges them: whole, or (``local``) of a local batch this rank's part.

    Raises:
        Error: the model gives something that holds tensors in a way that is not known.
    """
    captured = compiled.captured
    unknown = next((leaf for leaf in captured.result_leaves if isinstance(leaf, UnknownResult)), None)
    if unknown is not None:
        raise unknown.error("pm(...)")
    outputs = [o for o in step.graph.outputs if o.kind is OutputKind.RESULT]
    given = iter([results[o.kind, o.name][0] if local else step.whole(o, results[o.kind, o.name]) for o in outputs])
    leaves = [next(given) if leaf == "tensor" else leaf for leaf in captured.result_leaves]
    return pytree.tree_unflatten(leaves, captured.result_tree)


def taken(step: ProgramRunner, call: Call) -> list[tuple[Input, torch.Tensor]]:
    """The tensors of a call that programs take."""
    inputs = {g.name: g for g in step.graph.inputs if g.kind in (InputKind.ARGUMENT, InputKind.TARGET)}
    return [(inputs[name], tensor) for name, tensor in call.tensors.items() if name in inputs]


def passed(step: ProgramRunner, call: Call) -> Passed:
    """How a rank was given its inputs: one that is its own part tells."""
    found = [_passed(step, given, tensor) for given, tensor in taken(step, call)]
    return next((way for way in (Passed.PART, Passed.WHOLE) if way in found), Passed.EITHER)


def _passed(step: ProgramRunner, given: Input, tensor: torch.Tensor) -> Passed:
    shape = tuple(tensor.shape)
    if shape not in step.local_shapes(given):
        return Passed.WHOLE  # perhaps that of another form
    return Passed.EITHER if shape == given.value.shape else Passed.PART


def contents(step: ProgramRunner, call: Call, local: bool) -> list[RankInput]:
    """The tensors of a call as a real rank passes them, where its programs run."""
    (rank,) = step.ranks
    space = [axis.name for axis in step.graph.mesh.space]
    found = []
    for given, tensor in taken(step, call):
        shards, whole = step.shards(given), _passed(step, given, tensor) is Passed.WHOLE or not local
        piece, part = shards.by_rank[rank], tuple(shards.local_shapes[shards.by_rank[rank]])
        sharding = given.value.spec.axes if given.value.spec is not None and not whole else ()
        axes = tuple(axis for axis in space if axis not in sharding)
        found.append(RankInput(given.name, tensor, given.value.shape, part, -1 if whole else piece, axes))
    return found
