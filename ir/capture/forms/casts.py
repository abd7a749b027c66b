"""Parameters that are cast where a model's code reads them, and modules that compute as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


@contextmanager
def cast_when_read(module: nn.Module, dtype: torch.dtype, made: dict[tuple[int, bool], torch.Tensor]) -> Iterator[None]:
    """Within, a module's parameters are cast where they are read."""
    before = dict(module.__dict__)
    module.__dict__["_parameters"] = CastWhenRead(before["_parameters"], dtype, made)
    if isinstance(module, nn.RNNBase):  # which keeps a list of its parameters
        module.__dict__["_flat_weights"] = [getattr(module, name) for name in module._flat_weights_names]
    try:
        yield
    finally:
        module.__dict__.update((name, before[name]) for name in ("_parameters", "_flat_weights") if name in before)


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

    def get(self, name: str, default: Any = None) -> Any:
        """The parameter of this name."""
        return self._read(super().get(name, default))

    def items(self) -> Any:
        """Names and parameters."""
        return [(name, self[name]) for name in self]

    def values(self) -> Any:
        """The parameters."""
        return [self[name] for name in self]


def cast(tree: Any, dtype: torch.dtype | None) -> Any:
    """The floating tensors of a nest in another dtype."""
    if dtype is None:
        return tree
    return tree_map_only(torch.Tensor, lambda each: each.to(dtype) if each.dtype.is_floating_point else each, tree)
