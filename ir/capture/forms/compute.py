"""The dtype in which a model computes, beside that of its parameters: each is cast where it is used.

    %w : f32[8, 6]                       the parameter, a master
    %1 = aten._to_copy(%w, bf16)         cast once, at its first use
    %2 = aten.mm(%0, %1) : bf16          the model computes so
    ...
    %8 = aten._to_copy(%7, f32)          its gradient, whole sums of which are taken as Compute.reduce says

That is what one device computes: FSDP2's ``MixedPrecisionPolicy`` on a single rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from shardfx.ir.errors import Error
from shardfx.ir.rules.template import keeps_precision

WHERE = "Hints(compute=...)"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Compute:
    """In which dtype the model computes, and in which one gradients are summed over ranks (``Hints(compute=...)``).

    Cast to ``dtype`` are: every floating parameter, once in a step, where the model or its loss first uses it; and the
    floating inputs of the model (``args`` and ``kwargs``). As they are stay: buffers, targets, what is no real floating
    number, and what the model's own code makes or casts. Gradients arrive in the parameters' own dtype, which is that
    of the optimizer's states: parameters are the masters. ``pm.verify()`` proves that function, the one that
    one device computes under FSDP2's ``MixedPrecisionPolicy(param_dtype=dtype)``.

    Args:
        dtype: ``torch.bfloat16``, ``float16``, ``float32``, ``float64``; None: as the parameters are. Each floating
            parameter holds all numbers of it: none has fewer bits.
        reduce: gradients of parameters are summed over ranks in this dtype at least: they are cast to it before, not
            behind. None: float32, or what they are in, where that is wider.
        output: floating results of the model are cast to it, before the loss; None: they stay.

    Raises:
        Error: a dtype in which nothing is computed here; ``reduce`` cannot hold the numbers of ``dtype``.

    Example::

        Hints(compute=torch.bfloat16)                                            # summed in float32
        Hints(compute=sx.Compute(torch.bfloat16, reduce=torch.bfloat16))         # half as much is sent
        Hints(compute=sx.Compute(reduce=torch.float32))                          # a model in bfloat16, as it is
    """

    dtype: torch.dtype | None = None
    reduce: torch.dtype | None = None
    output: torch.dtype | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "reduce", "output"):
            given = getattr(self, name)
            if given is not None and given not in DTYPES:
                raise Error(
                    f"{given} is nothing to compute in" if isinstance(given, torch.dtype) else "this is no dtype",
                    where=f"{WHERE}: {name}",
                    expected=f"one of {', '.join(map(str, DTYPES))}",
                    got=f"{given!r}",
                    remedy="compute=torch.bfloat16 casts parameters and inputs, and keeps masters as they are",
                )
        if self.dtype is not None and self.reduce is not None and not keeps_precision(self.dtype, self.reduce):
            raise Error(
                f"gradients in {self.dtype} cannot be summed in {self.reduce}",
                where=f"{WHERE}: reduce",
                expected=f"a dtype that holds all numbers of {self.dtype}",
                got=str(self.reduce),
                remedy="leave reduce= out: gradients are summed in float32, or in what they are in where that is wider",
            )

    @staticmethod
    def of(given: Compute | torch.dtype | None) -> Compute | None:
        """What a hint says."""
        return Compute(given) if isinstance(given, torch.dtype) else given

    @property
    def sums(self) -> torch.dtype:
        """The dtype in which gradients are summed at least."""
        return self.reduce or torch.float32

    def check(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        """Look whether a model's parameters can be masters.

        Raises:
            Error: one has fewer bits than what is computed with it, or more than its gradient is to be summed in.
        """
        for name, parameter in parameters:
            dtype = parameter.dtype
            if not dtype.is_floating_point:
                continue
            if self.dtype is not None and not keeps_precision(self.dtype, dtype):
                raise Error(
                    f"parameter {name!r} is in {dtype}, and is no master of one in {self.dtype}",
                    where=f"{WHERE}: dtype",
                    expected=f"parameters that hold all numbers of {self.dtype}",
                    got=str(dtype),
                    remedy=f"model.float(), or compute={dtype}",
                )
            if self.dtype is None and self.reduce is not None and not keeps_precision(dtype, self.reduce):
                raise Error(
                    f"the gradient of {name!r} in {dtype} cannot be summed in {self.reduce}",
                    where=f"{WHERE}: reduce",
                    expected=f"a dtype that holds all numbers of {dtype}",
                    got=str(self.reduce),
                    remedy="leave reduce= out; or say in which dtype the model computes: Compute(torch.bfloat16, ...)",
                )

    def inputs(self, tree: Any) -> Any:
        """Inputs of the model, as it computes with them."""
        return _cast(tree, self.dtype)

    def results(self, tree: Any) -> Any:
        """Results of the model, as its loss sees them."""
        return _cast(tree, self.output)

    @contextmanager
    def parameters_of(self, model: nn.Module) -> Iterator[None]:
        """Within, the parameters of a model are cast where they are read, each once."""
        if self.dtype is None:
            yield
            return
        made: dict[tuple[int, bool], torch.Tensor] = {}
        held = [(module, module.__dict__["_parameters"]) for module in model.modules()]
        flat = [(m, m._flat_weights) for m in model.modules() if isinstance(m, nn.RNNBase)]
        for module, parameters in held:
            module.__dict__["_parameters"] = CastWhenRead(parameters, self.dtype, made)
        for recurrent, _ in flat:  # which keeps a list of its parameters
            recurrent.__dict__["_flat_weights"] = [getattr(recurrent, name) for name in recurrent._flat_weights_names]
        try:
            yield
        finally:
            for module, parameters in held:
                module.__dict__["_parameters"] = parameters
            for recurrent, weights in flat:
                recurrent.__dict__["_flat_weights"] = weights


class CastWhenRead(dict[str, Any]):
    """A module's parameters, each cast when it is first read; ``made`` has what was cast, tied ones once."""

    def __init__(self, given: Any, dtype: torch.dtype, made: dict[tuple[int, bool], torch.Tensor]) -> None:
        super().__init__(given)
        self._dtype, self._made = dtype, made

    def _read(self, given: Any) -> Any:
        if given is None or not given.dtype.is_floating_point or given.dtype is self._dtype:
            return given
        key = id(given), torch.is_grad_enabled()  # what was cast without a gradient has none
        if key not in self._made:
            self._made[key] = given.to(self._dtype)
        return self._made[key]

    def __getitem__(self, name: str) -> Any:
        return self._read(super().__getitem__(name))

    def get(self, name: str, default: Any = None) -> Any:  # type: ignore[override]
        """The parameter of this name."""
        return self[name] if name in self else default

    def items(self) -> Any:
        """Names and parameters."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """The parameters."""
        return [self[name] for name in self]


def _cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """The floating tensors of a nest in another dtype."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.dtype.is_floating_point else each, tree)
