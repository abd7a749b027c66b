"""NaN debugging: a probe checks every result of every node, and names the first with a NaN or an inf.

The node at fault is the one that *makes* it from finite operands. An infinity that a program contains as a constant
(``masked_fill(mask, -inf)``, a mask in a buffer) is intended, and so are results of it, unless they are NaNs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, InputKind
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.pools import transfer
from shardfx.runtime.rank_errors import place, target_name

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional

REMEDY = "guard that line against such operands (an eps, a clamp, a mask), or look at what made them so large or small"


@dataclass
class NanDebug:
    """The probe: finds NaNs, and with ``inf`` also infinities that were made from finite numbers."""

    inf: bool = True
    rank: int = 0
    _seen: dict[fx.Node, Contents] = field(default_factory=dict)
    """The contents of collectives' operands, whose memory may be overwritten before the wait."""

    def watch(self, rank: int) -> NanDebug:
        """A fresh probe of one rank's program."""
        return NanDebug(self.inf, rank)

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Raise if a parameter, a buffer or an argument contains NaN already, or a parameter an infinity."""
        if any(inp.pool for inp in inputs) and torch.cuda.is_initialized():
            transfer.finish(torch.device("cuda"))
        for inp, tensor in zip(inputs, tensors, strict=True):
            contents = Contents.of(tensor)
            if contents.nans or (inp.kind is InputKind.PARAMETER and self.inf and contents.infs):
                raise Error(
                    f"{inp.kind.value} {inp.name!r} is not finite before anything is computed",
                    where=f"rank {self.rank}",
                    expected="finite numbers",
                    got=contents.text,
                    remedy="if it is a parameter, debug the step before; else look at where the data comes from",
                )

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        """Raise if ``node`` made a NaN, or an infinity from finite operands."""
        row = row_of(node.target)
        if row is not None and (row.memory or row.name == "getitem"):
            return
        if row is not None and row.starts:  # what it gives is there once it was waited for
            for used, each in zip(node.all_input_nodes, operands, strict=True):
                self._seen.setdefault(used, Contents.of(each))
            return
        if node.target is transfer.stored:
            transfer.arrived(result)
        if any((user_row := row_of(user.target)) is not None and user_row.group is not None for user in node.users):
            self._seen[node] = Contents.of(result)
        if all(bool(torch.isfinite(each).all()) for each in _floats(result)):
            return
        contents = Contents.of(result)
        made = node.all_input_nodes[0] if row is not None and row.waits else node
        pairs = list(zip(made.all_input_nodes, operands, strict=False))
        values = {used.name: self._seen.get(used) or Contents.of(each) for used, each in pairs}
        infinite = any(each.infs for each in values.values())
        numbers = (arg for arg in tree_leaves((made.args, dict(made.kwargs))) if isinstance(arg, float))
        meant = not self.inf or infinite or _passes_on(made) or any(map(math.isinf, numbers))
        if any(each.nans for each in values.values()) or (not contents.nans and meant):
            return
        what, source = "a NaN" if contents.nans else "an inf", "infinite" if infinite else "finite"
        lines = [contents.text, *(f"of {name} {each.text}" for name, each in values.items() if each.text)]
        raise Error(
            f"{what} was made from {source} numbers, by {target_name(made)}",
            where=place(self.rank, made),
            expected="finite numbers",
            got=f"\n  {'':<10}".join(lines),
            remedy=REMEDY,
        )


class Contents(NamedTuple):
    """The number of NaNs and infinities, and a summary in words: ``float64[4, 3] from -1.2 to 3.4, 2 NaN``."""

    nans: int
    infs: int
    text: str

    @staticmethod
    def of(nested: Any) -> Contents:
        """The contents of the floating-point tensors of a nest."""
        nans, infs, texts = 0, 0, []
        for tensor in _floats(nested):
            counts = {"NaN": int(tensor.isnan().sum()), "inf": int(tensor.isinf().sum())}
            finite = tensor[tensor.isfinite()]
            parts = [f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"]
            if finite.numel():
                parts[0] += f" from {float(finite.min()):.4g} to {float(finite.max()):.4g}"
            texts += [", ".join([*parts, *(f"{count} {name}" for name, count in counts.items() if count)])]
            nans, infs = nans + counts["NaN"], infs + counts["inf"]
        return Contents(nans, infs, ", ".join(texts))


def _floats(nested: Any) -> list[Tensor]:
    return [each for each in tree_leaves(nested) if isinstance(each, Tensor) and each.is_floating_point()]


def _passes_on(node: fx.Node) -> bool:
    """Whether a collective only moves values of other ranks: an infinity among them was theirs before."""
    row = row_of(node.target)
    return row is not None and row.group is not None and "sum" not in node.args and "avg" not in node.args
