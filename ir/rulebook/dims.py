"""Helpers of rules: names of ops, and templates of tensors that depend on the node."""

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
"""The rule of an op that only moves the elements of its first operand about."""
packed = functools.partial(rule, contiguous=Contiguous.ALL)
"""The rule of an op whose kernel takes tensors of one memory layout."""


def ops(names: str) -> tuple[Any, ...]:
    """The ops of these names: of aten, with or without an overload, or of another ``namespace::``."""
    found = []
    for name in names.split():
        namespace, _, rest = name.rpartition("::")
        found.append(functools.reduce(getattr, rest.split("."), getattr(torch.ops, namespace or "aten")))
    return tuple(found)


def words(names: Iterable[str], full: Collection[str] = ()) -> str:
    """The text of a tensor with a factor for each dim, some of them replicated."""
    return " ".join(f"{name}!" if name in full else name for name in names)


def at_dim(emit: Emit, tensor: Value) -> int:
    """The dim that the node's ``dim`` names, of one of its tensors."""
    dim: int = argument(emit.node, "dim") % max(tensor.type.ndim, 1)
    return dim


def checked(emit: Emit, index: Any, size: int, ignored: int | None = None) -> Any:
    """An index into a table that is sharded, found to be one: an op of torch sees that itself, of the full
    table."""
    return emit.call(pack.inside, index, size, ignored)
