"""NaN debugging: every result of every node is looked at, and the first that holds a NaN or an inf is named.

What counts is where it was *made*: by a node whose operands are finite. An infinity that a program writes down itself
(``masked_fill(mask, -inf)``, a mask in a buffer) is meant, and so is what comes of it, unless that is a NaN.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, InputKind, Node
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.pools import transfer
from shardfx.runtime.rank_errors import place, target_name

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional

REMEDY = "guard that line against such operands (an eps, a clamp, a mask), or look at what made them so large or small"


@dataclass(frozen=True)
class NanDebug:
    """What is looked for: NaN, and with ``inf`` also infinities that were made from finite numbers."""

    inf: bool = True

    def watch(self, rank: int) -> NanProbe:
        """A fresh look at one rank's program."""
        return NanProbe(rank, self.inf)


class NanProbe:
    """Looks at one rank's program while it runs."""

    def __init__(self, rank: int, inf: bool) -> None:
        self.rank, self.inf = rank, inf
        self._seen: dict[fx.Node, tuple[int, int, str]] = {}
        """NaNs and infs of what collectives were given, in words too: their memory may be written over by now."""

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Raise if a parameter, a buffer or an argument holds NaN already, or a parameter an infinity."""
        if any(given.pool for given in inputs) and torch.cuda.is_initialized():
            transfer.finish(torch.device("cuda"))
        for given, tensor in zip(inputs, tensors, strict=True):
            infinite = given.kind is InputKind.PARAMETER and self.inf and _infs(tensor)
            if not tensor.is_floating_point() or not (_nans(tensor) or infinite):
                continue
            raise Error(
                f"{given.kind.value} {given.name!r} is not finite before anything is computed",
                where=f"rank {self.rank}",
                expected="finite numbers",
                got=describe(tensor),
                remedy="if it is a parameter, debug the step before; else look at where the data comes from",
            )

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """Raise if ``node`` made a NaN, or an infinity from finite operands."""
        row = row_of(node.target)
        if row is not None and (row.memory or row.name == "getitem"):
            return
        if row is not None and row.starts:  # what it gives is there once it was waited for
            for used, each in zip(node.all_input_nodes, operands, strict=True):
                if used not in self._seen:
                    self._seen[used] = _state(each)
            return
        if node.target is transfer.stored:
            transfer.arrived(result)
        self._remember(node, result)
        results = list(_floats(result))
        if all(bool(torch.isfinite(each).all()) for each in results):
            return
        waits = row is not None and row.waits
        made = node.all_input_nodes[0] if waits else node
        given = [self._state(used, each) for used, each in zip(made.all_input_nodes, operands, strict=False)]
        if any(nans for nans, _, _ in given):
            return
        infinite = any(infs for _, infs, _ in given)
        made_nan = any(_nans(each) for each in results)
        if not made_nan and (not self.inf or infinite or _passes_on(made) or _writes_inf(made)):
            return
        what, source = "a NaN" if made_nan else "an inf", "infinite" if infinite else "finite"
        lines = [", ".join(map(describe, results)), "of"]
        pairs = zip(made.all_input_nodes, given, strict=False)
        lines += [f"  {used.name} {words}" for used, (_, _, words) in pairs if words]
        raise Error(
            f"{what} was made from {source} numbers, by {target_name(made)}{_global(made)}",
            where=place(self.rank, made),
            expected="finite numbers",
            got=f"\n  {'':<10}".join(lines if given else lines[:1]),
            remedy=REMEDY,
        )

    def _remember(self, node: fx.Node, result: Any) -> None:
        """What goes into a collective, before it does."""
        if any((row := row_of(user.target)) is not None and row.group is not None for user in node.users):
            self._seen[node] = _state(result)

    def _state(self, node: fx.Node, held: Any) -> tuple[int, int, str]:
        return self._seen[node] if node in self._seen else _state(held)


def _state(held: Any) -> tuple[int, int, str]:
    """How many NaNs and infs there are, and in words what is."""
    tensors = list(_floats(held))
    return sum(map(_nans, tensors)), sum(map(_infs, tensors)), ", ".join(map(describe, tensors))


def describe(tensor: Tensor) -> str:
    """``float64[4, 3] from -1.2 to 3.4, 2 NaN``."""
    finite = tensor[torch.isfinite(tensor)]
    parts = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"]
    if finite.numel():
        parts[0] += f" from {float(finite.min()):.4g} to {float(finite.max()):.4g}"
    parts += [f"{count} {name}" for count, name in ((_nans(tensor), "NaN"), (_infs(tensor), "inf")) if count]
    return ", ".join(parts) if tensor.numel() else f"{parts[0]} (empty)"


def _floats(nested: Any) -> Iterator[Tensor]:
    if isinstance(nested, Tensor):
        if nested.is_floating_point():
            yield nested
    elif isinstance(nested, (list, tuple)):
        for each in nested:
            yield from _floats(each)


def _nans(tensor: Tensor) -> int:
    return int(tensor.isnan().sum())


def _infs(tensor: Tensor) -> int:
    return int(tensor.isinf().sum())


def _passes_on(node: fx.Node) -> bool:
    """Whether a collective only moves what other ranks hold: an infinity among it was theirs before."""
    row = row_of(node.target)
    words = {arg for arg in node.args if isinstance(arg, str)}
    return row is not None and row.group is not None and not {"sum", "avg"} & words


def _writes_inf(node: fx.Node) -> bool:
    """Whether an infinity stands among the arguments of a node."""
    found: list[bool] = []
    fx.node.map_aggregate(
        (node.args, node.kwargs), lambda arg: found.append(isinstance(arg, float) and math.isinf(arg))
    )
    return any(found)


def _global(node: fx.Node) -> str:
    """What the result is in the whole program."""
    made = node.meta.get("shardfx")
    if not isinstance(made, Node) or not made.outs:
        return ""
    value = made.outs[0]
    return f", this rank's part of {value!r} {value.spec.text(value.shape) if value.spec is not None else ''}".rstrip()
