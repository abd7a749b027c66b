"""Mixed precision: the dtype in which a model computes, beside that of its parameters.

    %w : f32[8, 6]                       the parameter: a master weight
    %1 = aten._to_copy(%w, bf16)         cast once, before its first use
    %2 = aten.mm(%0, %1) : bf16          the model computes so
    %8 = aten.mm(%7, %x) : bf16[8, 6]
    %9 = aten._to_copy(%8, f32)          its gradient: reduced over ranks behind the cast, as MixedPrecision.reduce says
                                         {reduce_after=True}

That is what one device computes: FSDP2's ``MixedPrecisionPolicy`` on a single rank. A model in bf16 has no such cast:
then there are two, to the wide dtype and back, and a reduction stands between.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Phase, Value
from shardfx.ir.names import pattern
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.ir.rules.strategy import REDUCE_AFTER
from shardfx.ir.rules.template import keeps_precision
from shardfx.ir.spec import TensorType

WHERE = "Hints(mixed_precision=...)"
NO_SCALE = "this is nothing to scale a loss by"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class MixedPrecision:
    """The dtype in which the model computes, and the one in which gradients are reduced over ranks
    (``Hints(mixed_precision=...)``).

    Cast to ``dtype`` are: every floating parameter, once in a step, where the model or its loss first uses it; and the
    floating inputs of the model (``args`` and ``kwargs``). Not cast are: buffers, targets, what is no real floating
    number, and what the model's own code makes or casts. Norms with running statistics, which are buffers, compute as
    they are, and so do the modules of ``keep``: they get their inputs in their own parameters' dtype, and what they
    give is cast to ``dtype``. Gradients arrive in the parameters' own dtype, which is that of the optimizer's states:
    the parameters are the master weights. That function is what ``pm.verify()`` proves; one device computes it under
    FSDP2's ``MixedPrecisionPolicy(param_dtype=dtype)``, where what computes as it is has a policy of its own.

    Args:
        dtype: ``torch.bfloat16``, ``float16``, ``float32``, ``float64``; None: as the parameters are. Each floating
            parameter holds all numbers of it: none has fewer bits.
        reduce_dtype: gradients of parameters are reduced over ranks in this dtype at least: they are cast to it before,
            not behind. None: float32, or what they are in, where that is wider.
        output_dtype: floating results of the model are cast to it, before the loss; None: they are not.
        keep: modules (patterns: ``*`` is one part of a path, ``**`` any number) that compute as they are.
        loss_scale: the backward is of so many times the loss, and gradients are divided by it when they have their own
            dtype: so small ones do not vanish in float16 (loss scaling; Micikevicius et al., Mixed Precision
            Training, 2018). A step of ``Hints(optimizer=...)`` of which some gradient is not finite leaves parameters
            and states as they are, on all ranks alike; ``pm(x, y).backward()`` hands it out, as a GradScaler expects.
            A :class:`shardfx.LossScale` finds its size by itself, in the steps of ``pm.step``.

    Raises:
        Error: a dtype in which nothing is computed here; ``reduce_dtype`` cannot hold the numbers of ``dtype``.

    Example::

        Hints(mixed_precision=torch.bfloat16)                         # reduced in float32
        sx.MixedPrecision(torch.bfloat16, reduce_dtype=torch.bfloat16)       # half as much is sent
        sx.MixedPrecision(torch.bfloat16, keep="layers.*.router")     # routers compute in float32
        sx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=2.0**14)
        sx.MixedPrecision(reduce_dtype=torch.float32)                 # a model in bfloat16, as it is
    """

    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep: str | tuple[str, ...] = ()
    loss_scale: float | LossScale | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce_dtype", "output_dtype"):
            value = getattr(self, name)
            if value is not None and value not in DTYPES:
                what = f"{value} is nothing to compute in" if isinstance(value, torch.dtype) else "this is no dtype"
                remedy = "mixed_precision=torch.bfloat16 casts parameters and inputs, and keeps master weights"
                raise _error(what, name, f"one of {', '.join(map(str, DTYPES))}", repr(value), remedy)
        if not all(type(each) is str for each in self._patterns):
            expected = "a module's path, with * and **, or a tuple of such"
            raise _error("this is no pattern of modules", "keep", expected, repr(self.keep))
        if self.keep and self.dtype is None:
            expected, remedy = "a dtype in which the other modules compute", f"torch.bfloat16, keep={self.keep!r}"
            got = f"MixedPrecision(keep={self.keep!r})"
            what = "keep says nothing where all modules compute as they are"
            raise _error(what, "keep", expected, got, f"MixedPrecision({remedy})")
        number = type(self.loss_scale) in (int, float) and 0 < self.loss_scale < math.inf  # type: ignore[operator]
        if self.loss_scale is not None and not number and not isinstance(self.loss_scale, LossScale):
            expected = "a number above zero, such as 2.0**14, or a shardfx.LossScale"
            raise _error(NO_SCALE, "loss_scale", expected, repr(self.loss_scale))
        if self.dtype is not None and not self._can_sum(self.dtype):
            remedy = "leave reduce_dtype= out: gradients are reduced in float32, or in their own wider dtype"
            raise self._narrow(f"gradients in {self.dtype}", self.dtype, remedy)

    @property
    def _patterns(self) -> tuple[Any, ...]:
        return self.keep if isinstance(self.keep, tuple) else (self.keep,)

    def _can_sum(self, dtype: torch.dtype) -> bool:
        return self.reduce_dtype is None or keeps_precision(dtype, self.reduce_dtype)

    def _narrow(self, gradients: str, dtype: torch.dtype, remedy: str) -> Error:
        what = f"{gradients} cannot be summed in {self.reduce_dtype}"
        return _error(
            what, "reduce_dtype", f"a dtype that holds all numbers of {dtype}", str(self.reduce_dtype), remedy
        )

    @staticmethod
    def of(option: MixedPrecision | torch.dtype | None) -> MixedPrecision | None:
        """The MixedPrecision of a hint."""
        return MixedPrecision(option) if isinstance(option, torch.dtype) else option

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which gradients are summed at least."""
        return self.reduce_dtype or torch.float32

    def check(self, model: nn.Module) -> None:
        """Check that a model's parameters can be master weights.

        Raises:
            Error: one has fewer bits than what is computed with it, or more than its gradient is to be summed in.
        """
        kept = self.kept_parameters(model)
        for name, parameter in model.named_parameters():
            dtype = parameter.dtype
            if parameter in kept or not dtype.is_floating_point:
                continue
            if self.dtype is not None and not keeps_precision(self.dtype, dtype):
                what = f"parameter {name!r} is in {dtype}, and cannot be the master weight of one in {self.dtype}"
                expected = f"parameters that hold all numbers of {self.dtype}"
                raise _error(what, "dtype", expected, str(dtype), f"model.float(), or mixed_precision={dtype}")
            if self.dtype is None and not self._can_sum(dtype):
                remedy = "leave reduce_dtype out; or say the dtype of the model: MixedPrecision(torch.bfloat16)"
                raise self._narrow(f"the gradient of {name!r} in {dtype}", dtype, remedy)

    def inputs(self, tree: Any) -> Any:
        """Inputs of the model, as it computes with them."""
        return cast(tree, self.dtype)

    def results(self, tree: Any) -> Any:
        """Results of the model, as its loss sees them."""
        return cast(tree, self.output_dtype)

    @contextmanager
    def parameters_of(self, model: nn.Module) -> Iterator[None]:
        """Within, the parameters of a model are cast, each once; but for those of modules that are kept.

        Raises:
            Error: a pattern of modules that are kept matches none.
        """
        if self.dtype is None:
            yield
            return
        own = self.kept_parameters(model)
        made = {parameter: cast(parameter, self.dtype) for parameter in model.parameters() if parameter not in own}
        named = model.named_parameters(remove_duplicate=False)
        with ExitStack() as stack:
            for module in self.kept(model):
                stack.enter_context(as_it_is(module, self.dtype))
            stack.enter_context(_reparametrize_module(model, {name: made[p] for name, p in named if p in made}))
            yield

    def kept(self, model: nn.Module) -> list[nn.Module]:
        """The modules that compute as they are: those of ``keep``, and norms whose buffers are statistics."""
        named = dict(model.named_modules())
        found = [module for module in named.values() if isinstance(module, _NormBase) and module.track_running_stats]
        for text in filter(None, self._patterns):
            hits = [module for path, module in named.items() if pattern(text).fullmatch(path)]
            if not hits:
                near = difflib.get_close_matches(text, named, 3, 0.5)
                remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()"
                raise _error(f"no module is called {text!r}", "keep", "a module's path, with * and **", text, remedy)
            found += hits
        return list(dict.fromkeys(found))

    def kept_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        """The parameters of these modules."""
        return {parameter for module in self.kept(model) for parameter in module.parameters()}


def _error(what: str, field: str, expected: str, got: str, remedy: str | None = None) -> Error:
    return Error(what, where=f"{WHERE}: {field}", expected=expected, got=got, remedy=remedy)


@contextmanager
def as_it_is(module: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """Within, a module is given its inputs in its own dtype, and its results go on in ``dtype``."""
    own = next((t.dtype for t in (*module.parameters(), *module.buffers()) if t.dtype.is_floating_point), dtype)
    handles = [
        module.register_forward_pre_hook(lambda _, args, kwargs: cast((args, kwargs), own), with_kwargs=True),
        module.register_forward_hook(lambda _, args, out: cast(out, dtype)),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """The floating tensors of a nest in another dtype."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.dtype.is_floating_point else each, tree)


@dataclass(frozen=True)
class LossScale:
    """A dynamic loss scale: it falls where gradients overflow, and grows where they did not for a while.

    It is a state of the program, stepped with the optimizer's (so it wants ``Hints(optimizer=...)``): a step that
    overflows leaves parameters and states as they were and multiplies the scale by ``backoff``; after ``interval``
    steps one behind the other that did not, it is multiplied by ``growth``. ``pm.optimizer.loss_scale`` reads it.

    Args:
        init: what it begins with.
        growth: more than one.
        backoff: between zero and one.
        interval: a number of steps.

    Raises:
        Error: one of them is another number.

    Example::

        sx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=sx.LossScale())
    """

    init: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000

    def __post_init__(self) -> None:
        fits = {
            "init": (0 < self.init < math.inf, "a number above zero"),
            "growth": (1 < self.growth < math.inf, "a number above one"),
            "backoff": (0 < self.backoff < 1, "a number between zero and one"),
            "interval": (type(self.interval) is int and self.interval > 0, "a number of steps"),
        }
        for name, (right, expected) in fits.items():
            if not right:
                got = repr(getattr(self, name))
                raise Error(NO_SCALE, where=f"LossScale({name}=...)", expected=expected, got=got)


aten = torch.ops.aten


def sum_gradients_in(graph: Graph, dtype: torch.dtype) -> None:
    """Mark the casts of parameters' gradients behind which they are reduced: in ``dtype``, where that is wider than
    theirs."""
    names = {inp.name for inp in graph.of_kind(InputKind.PARAMETER)}
    rewriter = Rewriter(graph)
    summed: dict[Value, Value] = {}
    for output in graph.outputs:
        left = output.value
        made = made_in(left)
        if output.kind is not OutputKind.GRADIENT or output.name not in names or _is_wide(made, dtype):
            continue
        if left.type.dtype is dtype and left.node is not None:
            left.node.attrs = {**left.node.attrs, REDUCE_AFTER: True}
            continue
        if left not in summed:
            wide = rewriter.after(made.node, _cast(made, dtype))
            wide.attrs = {REDUCE_AFTER: True}
            summed[left] = rewriter.after(wide, _cast(wide.outs[0], left.type.dtype)).outs[0]
        rewriter.replace(left, summed[left], users=[output])
    if rewriter.apply():
        dead_code(graph)
        graph.rename()


def _is_wide(value: Value, dtype: torch.dtype) -> bool:
    """Whether a value is no floating number, or one that holds all of ``dtype``."""
    return not value.type.dtype.is_floating_point or keeps_precision(dtype, value.type.dtype)


def made_in(gradient: Value) -> Value:
    """The gradient before it was cast to its parameter's dtype."""
    node = gradient.node
    is_cast = node is not None and node.phase is Phase.BACKWARD and node.op is aten._to_copy.default
    if node is None or not is_cast or not keeps_precision(node.operands[0].type.dtype, gradient.type.dtype):
        return gradient
    return node.operands[0]


def _cast(value: Value, dtype: torch.dtype) -> Node:
    type = TensorType(value.shape, dtype)
    kwargs = {"dtype": dtype}
    return Rewriter.make(aten._to_copy.default, (value,), type, like=value.node, kwargs=kwargs, phase=Phase.BACKWARD)
