"""The model and its loss as one function of tensors: what is traced."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Guard, Where

from .canonical.mixed_precision import MixedPrecision
from .data_dependent import DataGuards, stored
from .frontend.capture_errors import explain_decision, user_frame
from .frontend.forward_probes import AssignedBuffers, CheckpointedModules
from .frontend.loss_module import OwnLoss
from .frontend.model_preparation import Scopes, marks_of


@dataclass(frozen=True)
class UnknownResult:
    """A result of the model with tensors inside that pytree does not find."""

    kind: str

    def error(self, where: str) -> Error:
        """The error where it is asked for."""
        return Error(
            f"the model gives a {self.kind}, whose tensors cannot be handed out",
            where=where,
            expected="tensors in tuples, lists and dicts, named tuples, or classes that torch.utils._pytree knows",
            got=self.kind,
            remedy=f"return a dict or a tuple; or torch.export.register_dataclass({self.kind}) before parallelize",
        )


def holds_tensors(thing: object, depth: int = 3) -> bool:
    """Whether an object, its attributes or what it contains is a tensor."""
    if isinstance(thing, torch.Tensor):
        return True
    if depth == 0 or isinstance(thing, (type, nn.Module)):
        return False
    inside: Iterable[object] = vars(thing).values() if hasattr(thing, "__dict__") else ()
    if isinstance(thing, (list, tuple, set)):
        inside = thing
    elif isinstance(thing, Mapping):
        inside = thing.values()
    return any(holds_tensors(each, depth - 1) for each in inside)


def _result(leaf: object) -> object:
    if isinstance(leaf, torch.Tensor):
        return "tensor"
    return UnknownResult(type(leaf).__name__) if holds_tensors(leaf) else leaf


class TraceResults:
    """The findings of a trace: the tree of results, guards, use of the compiler, and checkpointed modules."""

    tree: pytree.TreeSpec
    leaves: tuple[Any, ...]
    guards: tuple[Guard, ...] = ()
    sets: tuple[str, ...] = ()
    """The attributes that the model's code sets, where it is exported itself."""
    kept: Sequence[str] | None = None
    """The results (``result 2``) that the model's code keeps, where Dynamo's code makes the objects of results."""

    def __init__(self) -> None:
        self.checkpointed = CheckpointedModules()


class TensorLeaf:
    """A placeholder of a tensor among the leaves of arguments and targets."""


class ModelAndLoss(nn.Module):
    """The model and its loss as one function of tensor leaves."""

    def __init__(
        self,
        model: nn.Module,
        tree: pytree.TreeSpec,
        leaves: Sequence[Any],
        loss: Callable[..., torch.Tensor] | None,
        targets: int,
        results: TraceResults,
        guard: bool = False,
        compute: MixedPrecision | None = None,
        real: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self._tree, self._targets = tree, targets
        self._leaves = [TensorLeaf if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self.loss = loss
        self.results = results
        self.guard = guard
        self.compute = compute or MixedPrecision()
        self.assigned, self.exported = AssignedBuffers(), False
        """The buffers that it replaces; whether it is traced, and so writes into them."""
        own = {name: marks_of(tensor) for name, tensor in stored(model).items()}
        self._marks = {name: marks for name, marks in own.items() if marks}
        self._stored = stored(model) if guard and real else None

    @property
    def eager(self) -> ModelAndLoss:
        """The program that calls the model's own code."""
        return self

    @property
    def scopes(self) -> Scopes:
        """The globals that its code names, where that is known."""
        return ()

    @contextmanager
    def entering(self, enter: Callable[[str], object]) -> Iterator[None]:
        """Within, ``enter`` is called with the path of each module that is called."""
        handles = [
            module.register_forward_pre_hook(lambda *_, path=path: enter(path))
            for path, module in self.model.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    @property
    def by_example(self) -> bool:
        """Whether it is traced with the content of weights and examples."""
        return self._stored is not None

    @property
    def unseen(self) -> list[type]:
        """The classes of arguments that contain tensors, and are no pytrees."""
        return [type(leaf) for leaf in self._leaves if leaf is not TensorLeaf and holds_tensors(leaf)]

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The model's tensors, behind the loss where there is one, and behind them what guards watch. ``tensors`` are
        the leaves of arguments and targets. They have content for guards to go by, and so have the model's own; if
        these are not ``real``, what the model makes of nothing has alone.

        Raises:
            Error: what the code does depends on the data, and there are no guards.
        """
        decisions = DataGuards(self.model, self._stored, self.guard, tensors)
        noting = self.results.checkpointed.noting(self.model, self.exported)
        assigned = self.assigned.noting(self, written=self.exported)
        try:
            with decisions, self.compute.parameters_of(self.model), noting, assigned:
                outs = self._run(tensors, decisions)
                decisions.reject_foreign_random()
        except Error as error:
            if error.where is not None:
                raise
            raise error.at(user_frame(error, self.model)) from error
        except Exception as error:
            found = explain_decision(error, self.model, self.guard)
            if found is None:
                raise
            raise found from error
        self.results.guards = tuple(decisions.guards)
        return (*outs, *decisions.values)

    def _run(self, tensors: tuple[torch.Tensor, ...], decisions: DataGuards) -> tuple[torch.Tensor, ...]:
        for name, tensor in stored(self.model).items() if self._marks else ():
            vars(tensor).update(self._marks.get(name, {}))  # those that are traced are others
        remaining = iter(tensors)
        leaves = [next(remaining) if leaf is TensorLeaf else leaf for leaf in self._leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, self._tree)
        args, kwargs = self.compute.inputs((args, kwargs))
        out = self.compute.results(self.model(*args, **kwargs))
        flat, tree = pytree.tree_flatten(out)
        self.results.tree = tree
        self.results.leaves = tuple(map(_result, flat))
        outs = [leaf.detach() for leaf in flat if isinstance(leaf, torch.Tensor)]
        if self.loss is None:
            unknown = next((leaf for leaf in self.results.leaves if isinstance(leaf, UnknownResult)), None)
            if unknown is not None and self.results.kept is None:
                raise unknown.error("the model's result")
            return tuple(outs)
        decisions.of_loss = True
        owned = (self.model,) if isinstance(self.loss, OwnLoss) else ()
        loss = self.loss(*owned, out, *targets)
        if not isinstance(loss, torch.Tensor) or loss.dim() != 0:
            raise Error(
                "the loss is not a scalar tensor",
                where="Hints(loss=...)",
                expected="a tensor of shape ()",
                got=f"{tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__,
                remedy="reduce it, for example by .mean()",
            )
        return (loss, *outs)


def leaf_names(args: tuple[Any, ...], kwargs: Mapping[str, Any], targets: tuple[Any, ...]) -> list[tuple[str, Any]]:
    """Names such as ``args.0``, ``kwargs.mask``, ``targets.0``, ``args.0.key``, with the leaves they name."""
    found = []
    for root, tree in (("args", args), ("kwargs", dict(kwargs)), ("targets", targets)):
        for path, leaf in pytree.tree_flatten_with_path(tree)[0]:
            keys = [str(getattr(k, "idx", getattr(k, "key", getattr(k, "name", k)))) for k in path]
            found.append((".".join([root, *keys]), leaf))
    return found


def loss_source(loss: Callable[..., Any] | None) -> Where | None:
    """The source location of the loss."""
    if loss is None:
        return None
    loss = loss.given if isinstance(loss, OwnLoss) else loss
    code = getattr(loss, "__code__", None) or getattr(getattr(type(loss), "forward", None), "__code__", None)
    if code is None:
        return Where("loss")
    return Where(
        "loss", code.co_filename, code.co_firstlineno, linecache.getline(code.co_filename, code.co_firstlineno).strip()
    )
