"""The loss of a plan for given gradients of the results: what is pulled back are they."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree


def product(out: Any, *given: torch.Tensor) -> torch.Tensor:
    """The results times these: its gradients are those of the results, pulled back."""
    leaves = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    pairs = zip(leaves, given, strict=True)
    return torch.stack([(result * above).sum().to(torch.float32) for result, above in pairs]).sum()
