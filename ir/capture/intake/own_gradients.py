"""Functions with a gradient of their own (``torch.autograd.Function``): what is captured is theirs.

``torch.export`` traces what such a function's ``forward`` computes, and its gradient would be that of these ops. So the
exported program has one op for the call, which becomes the call itself before AOTAutograd writes the backward.

    y = Clamp.apply(x)   ->   own_gradient([%x], [%what_forward_made], 0)   ->   Clamp.apply(%x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionMeta
from torch.overrides import TorchFunctionMode

from shardfx.ir.errors import Error

_library = torch.library.Library("shardfx_capture", "DEF")
_library.define("own_gradient(Tensor[] given, Tensor[] made, int number) -> Tensor[]")


def _own_gradient(given: Sequence[Tensor], made: Sequence[Tensor], number: int) -> list[Tensor]:
    return [each.clone() for each in made]


_library.impl("own_gradient", _own_gradient, "CompositeExplicitAutograd")
own_gradient = torch.ops.shardfx_capture.own_gradient.default


class GradModeUnrecorded(TorchFunctionMode):
    """Within, ``torch.no_grad()`` is no part of what is traced. In a function's forward it would be restored to no
    gradients, which are off there, and so be that of all that follows."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._C._set_grad_enabled:
            with torch._C.DisableTorchFunction():
                return func(*args)
        return func(*args, **kwargs or {})


class AppliedFunction:
    """A call of such a function: of its tensors alone, and with all tensors of its results."""

    def __init__(self, kind: type[Function], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        leaves, self.tree = pytree.tree_flatten((args, kwargs))
        self.kind, self.__name__ = kind, kind.__name__
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.tensors = [leaves[i] for i in self.places]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def __call__(self, given: Sequence[Tensor]) -> list[Tensor]:
        leaves = list(self.leaves)
        for place, tensor in zip(self.places, given, strict=True):
            leaves[place] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, self.tree)
        out = self.kind.apply(*args, **kwargs)
        return [each for each in pytree.tree_leaves(out) if isinstance(each, Tensor)]


class OwnGradients:
    """The calls of such functions in one trace."""

    def __init__(self) -> None:
        self.calls: list[AppliedFunction] = []

    @contextmanager
    def noting(self) -> Iterator[None]:
        """Within, each call is noted, and is one op of what is traced.

        ``apply`` reads ``kind.forward`` in every version of torch, also where it was bound before. So while a program
        is traced, the metaclass of such functions answers that.
        """

        def read(kind: type[Function], name: str) -> Any:
            found = type.__getattribute__(kind, name)
            return self._noted(kind, found) if name == "forward" else found

        FunctionMeta.__getattribute__ = read  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del FunctionMeta.__getattribute__

    def _noted(self, kind: type[Function], forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a function: where ``apply`` calls it, its results are those of one op."""
        of_torch = kind.__module__.partition(".")[0] == "torch"
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
        if any(leaves[i] is given for i in places for given in call.tensors):
            raise Error(
                f"{call.kind.__name__} gives one of its inputs back, or changes it in place",
                where=f"{call.kind.__module__}.{call.kind.__qualname__}.apply(...)",
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
        """Make each op of an exported program the call that it stands for."""
        for node in exported.graph.nodes:
            if node.target is own_gradient:
                given, _, number = node.args
                node.target, node.args = self.calls[number], (given,)
        if self.calls:
            exported.graph.eliminate_dead_code()
            exported.recompile()
