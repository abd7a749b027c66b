"""What rules have in common: names of ops, texts of tensors that hang on the node."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops import pack
from shardfx.ir.rules.book import Contiguous, replicated, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
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


def words(names: Iterable[str], whole: Collection[str] = ()) -> str:
    """The text of a tensor with a factor for each dim, some of them whole."""
    return " ".join(f"{name}!" if name in whole else name for name in names)


def at_dim(emit: Emit, tensor: Value) -> int:
    """The dim that the node's ``dim`` names, of one of its tensors."""
    dim: int = argument(emit.node, "dim") % max(tensor.type.ndim, 1)
    return dim


def untouched(node: Node) -> ShardingRule:
    """Of an op that counts through all elements nothing is sharded, but all floats may be partial sums together."""
    floats = [str(i) for i, value in enumerate(node.operands) if value.type.dtype.is_floating_point]
    return replicated(node, "&".join(floats))


class Indexed(NamedTuple):
    """``x[indices]``: the texts of x and of the indices, the factors of the result, the dims of x without an index."""

    table: str
    indices: str
    result: list[str]
    kept: list[int]


def indexed(node: Node, letter: str, mark: str = "") -> Indexed | None:
    """Indexed dims are whole, those of the indices (which are broadcast) may be sharded; None for masks.

    Args:
        letter: of the dims of x.
        mark: ``!`` where the dims of the indices are whole.
    """
    indices = argument(node, "indices")
    at = [i for i, index in enumerate(indices) if index is not None]
    if not at or any(indices[i].type.dtype in (torch.bool, torch.uint8) for i in at):
        return None
    ndim = len(torch.broadcast_shapes(*(indices[i].shape for i in at)))
    kept = [i for i in range(node.operands[0].type.ndim) if i not in at]
    first = [i for i in kept if i < at[0]] if at == list(range(at[0], at[0] + len(at))) else []
    own = [f"i{j}{mark}" for j in range(ndim)]
    result = [*(f"{letter}{i}" for i in first), *own, *(f"{letter}{i}" for i in kept if i not in first)]
    table = words((f"{letter}{i}" for i in range(node.operands[0].type.ndim)), {f"{letter}{i}" for i in at})
    return Indexed(table, ", ".join("~" if each is None else f"~{words(own)}" for each in indices), result, kept)


def checked(emit: Emit, index: Any, size: int, ignored: int | None = None) -> Any:
    """An index into a table that is sharded, found to be one: an op of torch sees that itself, of the table as a
    whole."""
    return emit.call(pack.inside, index, size, ignored)
