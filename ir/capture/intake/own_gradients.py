"""Functions with a gradient of their own (``torch.autograd.Function``): what is captured is theirs.

``torch.export`` traces what such a function's ``forward`` computes, and its gradient would be that of these ops. So the
exported program has one op for the call, which becomes the call itself before AOTAutograd writes the backward.

    y = Clamp.apply(x)   ->   own_gradient([%x], [%what_forward_made], 0)   ->   Clamp.apply(%x)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

from shardfx.ir.errors import Error

_library = torch.library.Library("shardfx_capture", "DEF")
_library.define("own_gradient(Tensor[] given, Tensor[] made, int number) -> Tensor[]")


def _own_gradient(given: Sequence[Tensor], made: Sequence[Tensor], number: int) -> list[Tensor]:
    return [each.clone() for each in made]


_library.impl("own_gradient", _own_gradient, "CompositeExplicitAutograd")
own_gradient = torch.ops.shardfx_capture.own_gradient.default


def _in_place_of(__class__: type) -> FunctionType:
    """A function whose code may stand in that of ``Function.apply``, which has a cell of its class."""

    def apply(cls: type[Function], *args: Any, instead: Callable[..., Any], **kwargs: Any) -> Any:
        assert __class__
        return instead(cls, *args, **kwargs)

    assert isinstance(apply, FunctionType)
    return apply


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
        """Within, each call is noted, and is one op of what is traced."""
        applied = vars(Function)["apply"].__func__
        plain = FunctionType(applied.__code__, applied.__globals__, "apply", None, applied.__closure__)

        def apply(kind: type[Function], *args: Any, **kwargs: Any) -> Any:
            if kind is CheckpointFunction:
                return _checkpointed(*args)
            if kind.__module__.partition(".")[0] == "torch":
                return plain(kind, *args, **kwargs)
            return self._note(AppliedFunction(kind, args, kwargs), plain(kind, *args, **kwargs))

        applied.__code__ = _in_place_of(Function).__code__  # of what is bound already (`f = Clamp.apply`), too
        applied.__kwdefaults__ = {"instead": apply}
        try:
            yield
        finally:
            applied.__code__, applied.__kwdefaults__ = plain.__code__, plain.__kwdefaults__

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


def _checkpointed(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
    """What ``checkpoint(..., use_reentrant=True)`` computes: it has a gradient where one of its inputs has."""
    with torch.set_grad_enabled(any(isinstance(a, Tensor) and a.requires_grad for a in args)):
        return function(*args)
