"""Helpers of rules: ops by name, and templates that depend on a node's tensors."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

import torch

from shardfx.ir.graph import Value
from shardfx.ir.ops import pack
from shardfx.ir.rules.book import Contiguous, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.template import argument as argument
from shardfx.ir.rules.template import given_tensors as given_tensors

moves = functools.partial(rule, linear="0", moves_only=True)
"""The rule of an op that only moves the elements of its first operand: linear, and any partial value may pass."""
packed = functools.partial(rule, contiguous=Contiguous.ALL)
"""The rule of an op whose kernel requires contiguous operands."""


def ops(names: str) -> tuple[Any, ...]:
    """The ops of these names: of aten, with or without an overload, or of another ``namespace::``."""
    found = []
    for name in names.split():
        namespace, _, rest = name.rpartition("::")
        found.append(functools.reduce(getattr, rest.split("."), getattr(torch.ops, namespace or "aten")))
    return tuple(found)


def words(names: Iterable[str], full: Collection[str] = ()) -> str:
    """The template of a tensor with one factor per dim, those in ``full`` replicated."""
    return " ".join(f"{name}!" if name in full else name for name in names)


def at_dim(emit: Emit, tensor: Value) -> int:
    """The dim of one of the node's tensors that its argument ``dim`` names."""
    dim: int = argument(emit.node, "dim") % max(tensor.type.ndim, 1)
    return dim


def checked(emit: Emit, index: Any, size: int, ignored: int | None = None) -> Any:
    """A range check of an index into a sharded table: torch's own op checks it against the full
    table."""
    return emit.call(pack.inside, index, size, ignored)
