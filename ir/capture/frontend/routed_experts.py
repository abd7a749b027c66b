"""Experts of transformers as products with routed rows, by the interface that their modules have for that.

    experts(hidden [n h], ids [n k], weights [n k])       ->  shardfx.routed_mm(hidden, gate_up, ids), ...

A class that ``use_experts_implementation`` of transformers decorates says of itself what it has: a gate, biases, how
matrices are stored. So a trace needs none of its implementations, which loop over experts that got a token, or sort
rows; and takes float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

from torch import Tensor, nn

from shardfx.ir.ops.experts.routed_product import routed_mm

SAYS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_apply_gate")
"""What such a module says of itself."""
IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")
"""The implementations of transformers that compute the same; a user's own stays what it is."""


def is_routed(module: nn.Module) -> bool:
    """Whether a module is the experts of a model of transformers, on one device, by one of its own implementations."""
    known = all(hasattr(module, name) for name in SAYS) and not getattr(module, "_is_expert_parallel", True)
    return known and getattr(module.config, "_experts_implementation", "") in IMPLEMENTATIONS


def routed_experts(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts of each token make of it: ``[n h]``."""
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    rows = _linear(hidden.unsqueeze(1).to(up.dtype), up, up_bias, ids, self.is_transposed)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _linear(rows, down, self.down_proj_bias if self.has_bias else None, ids, self.is_transposed)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    return (rows * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, transposed: bool) -> Tensor:
    made: Tensor = routed_mm(x, w if transposed else w.transpose(1, 2), ids)
    if bias is None:
        return made
    of_bias: Tensor = routed_mm(x.new_ones((x.shape[0], 1, 1)), bias.unsqueeze(1), ids)
    return made + of_bias


@contextmanager
def experts_routed(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Within, the experts of transformers in a model, which it gives, are :func:`routed_experts`."""
    found = [module for module in model.modules() if is_routed(module) and "forward" not in vars(module)]
    for module in found:
        vars(module)["forward"] = MethodType(routed_experts, module)
    try:
        yield found
    finally:
        for module in found:
            del vars(module)["forward"]
