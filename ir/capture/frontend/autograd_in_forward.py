"""Autograd within a forward: custom ``torch.autograd.Function`` gradients are captured, other differentiation refused.

``torch.export`` traces what such a function's ``forward`` computes, and its gradient would be that of these ops. So the
exported program has one op for the call, which becomes the call itself before the backward is written.

    y = Clamp.apply(x)   ->   own_gradient([%x], [%what_forward_made], 0)   ->   Clamp.apply(%x)

Transforms of ``torch.func``, ``backward()`` and hooks on tensors are refused where they begin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._functorch import eager_transforms
from torch.autograd import Function, forward_ad
from torch.autograd.function import FunctionMeta
from torch.overrides import TorchFunctionMode

from shardfx.ir.capture.source_locations import is_user_file
from shardfx.ir.errors import Error

_library = torch.library.Library("shardfx_capture", "DEF")
_library.define("own_gradient(Tensor[] given, Tensor[] made, int number) -> Tensor[]")


def _own_gradient(tensors: Sequence[Tensor], made: Sequence[Tensor], number: int) -> list[Tensor]:
    return [each.clone() for each in made]


_library.impl("own_gradient", _own_gradient, "CompositeExplicitAutograd")
own_gradient = torch.ops.shardfx_capture.own_gradient.default


class GradModeUnrecorded(TorchFunctionMode):
    """Within, ``torch.no_grad()`` is not traced. In a function's forward, where gradients are off, it would restore
    that, for all that follows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():
                return func(*args)
        return func(*args, **kwargs or {})


class AppliedFunction:
    """A call of a custom function, from its tensor arguments to its tensor results."""

    def __init__(self, kind: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.kind, self.__name__ = kind, kind.__name__
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[i] for i in self.places]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        out = self.kind.apply(*args, **kwargs)
        return [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]


OF_DYNAMO = "ApplyTemplate"
"""The function that torch makes of a user's own one in the graphs of Dynamo."""


class OwnGradients:
    """The calls of custom functions in one trace."""

    def __init__(self) -> None:
        self.calls: list[AppliedFunction] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, each call is recorded, and traced as one op.

        ``apply`` reads ``kind.forward`` in every version of torch, also where it was bound before. So while a program
        is traced, the metaclass of such functions answers that.
        """

        def read(kind: type[Function], name: str) -> Any:
            found = type.__getattribute__(kind, name)
            return self._noted(kind, found) if name == "forward" else found

        with mock.patch.object(FunctionMeta, "__getattribute__", read):
            yield

    def _noted(self, kind: type[Function], forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a function: where ``apply`` calls it, its results are those of one op."""
        of_torch = kind.__module__.partition(".")[0] == "torch" and kind.__name__ != OF_DYNAMO
        context = 1 if kind.setup_context is Function.setup_context else 0

        @wraps(forward)
        def noted(*args: Any, **kwargs: Any) -> Any:
            if torch._C._is_fwd_grad_enabled():  # as in no apply(): it is called by itself
                return forward(*args, **kwargs)
            with GradModeUnrecorded():
                out = forward(*args, **kwargs)
            return out if of_torch else self._note(AppliedFunction(kind, args[context:], kwargs), out)

        return noted

    def _note(self, call: AppliedFunction, out: Any) -> Any:
        leaves, tree = pytree.tree_flatten(out)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if any(leaves[i] is tensor for i in places for tensor in call.tensors):
            raise Error(
                "a torch.autograd.Function gives one of its inputs back, or changes it in place",
                expected="a torch.autograd.Function whose results are new tensors",
                got="an input",
                remedy="clone it in forward",
            )
        made = own_gradient(call.tensors, [leaves[i] for i in places], len(self.calls))
        self.calls.append(call)
        for i, tensor in zip(places, made, strict=True):
            leaves[i] = tensor
        return pytree.tree_unflatten(leaves, tree)

    def restore(self, exported: torch.fx.GraphModule) -> None:
        """Replace each such op of an exported program by the call that it stands for."""
        for node in exported.graph.nodes:
            if node.target is own_gradient:
                source, _, number = node.args
                node.target, node.args = self.calls[number], (source,)
        if self.calls:
            exported.graph.eliminate_dead_code()
            exported.recompile()


@contextmanager
def transforms_exited() -> Iterator[None]:
    """Exit transforms of ``torch.func`` that were entered within: one that fails while it is traced does not always
    exit."""
    depth, level = torch._C._functorch.get_dynamic_layer_stack_depth(), forward_ad._current_level
    try:
        yield
    finally:
        torch._C._functorch.pop_dynamic_layer_stack_and_undo_to_depth(depth)
        while forward_ad._current_level > level:
            torch._C._exit_dual_level(level=forward_ad._current_level)
            forward_ad._current_level -= 1


@contextmanager
def transforms_refused() -> Iterator[None]:
    """Within, differentiation other than ``torch.autograd.grad`` raises where it begins, and so does a hook on the
    gradient of a tensor.

    Raises:
        Error: one is begun.
    """
    with ExitStack() as stack:
        for place, name, refusal in INSIDE:
            stack.enter_context(mock.patch.object(place, name, refusal.instead_of(getattr(place, name))))
        yield


class Refusal(NamedTuple):
    """The error of a function that cannot be captured."""

    what: str
    expected: str
    got: str
    remedy: str
    but_of_torch: bool = False
    """Torch itself may call it: to count operations, say."""

    def instead_of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The stand-in of a function, which raises this."""

        def refuse(*args: Any, **named: Any) -> Any:
            if self.but_of_torch and not is_user_file(sys._getframe(1).f_code.co_filename):
                return function(*args, **named)
            raise self.error()

        return refuse

    def error(self, where: str | None = None) -> Error:
        """The error."""
        return Error(self.what, where=where, expected=self.expected, got=self.got, remedy=self.remedy)


TRANSFORM = Refusal(
    "a transform that differentiates is none that can be captured",
    "torch.autograd.grad(y, x, create_graph=True), torch.autograd.functional.jacobian, torch.func.vmap",
    "torch.func.grad, vjp, jvp, jacrev, jacfwd, hessian, or torch.autograd.forward_ad",
    "torch.autograd.grad(f(x), x, create_graph=True) in the place of torch.func.grad(f)(x)",
)
"""Torch exports it as steps that have no backward, or as constants."""
HOOK = Refusal(
    "a hook on the gradient of a tensor would never be called",
    "no hooks in forward and loss: a program makes gradients, and gives those of parameters and inputs",
    "register_hook(...) of a tensor",
    "a torch.autograd.Function whose backward does it to the gradient; or look at it on one device",
    but_of_torch=True,
)
BACKWARD = Refusal(
    "backward() within a forward or a loss leaves gradients where no program looks for them",
    "a loss that is given back",
    "backward(...)",
    "torch.autograd.grad(y, x, create_graph=True), and give back what it makes",
)
INSIDE: tuple[tuple[Any, str, Refusal], ...] = (
    (eager_transforms, "grad_increment_nesting", TRANSFORM),
    (eager_transforms, "jvp_increment_nesting", TRANSFORM),
    (forward_ad, "enter_dual_level", TRANSFORM),
    (torch.Tensor, "register_hook", HOOK),
    (torch.Tensor, "register_post_accumulate_grad_hook", HOOK),
    (torch.autograd, "backward", BACKWARD),
)
