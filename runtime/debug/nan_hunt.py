"""NaN hunting: every result of every node is looked at, and the first that holds a NaN or an inf is named.

What counts is where it was *made*: by a node whose operands are finite. An infinity that a program writes down itself
(``masked_fill(mask, -inf)``, a mask in a buffer) is meant, and so is what comes of it, unless that is a NaN.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, InputKind, Node
from shardfx.ir.program.rank_program import Program
from shardfx.runtime.rank_errors import place, target_name
from shardfx.runtime.virtual.coroutine import COLLECTIVES, as_generator

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional

REMEDY = "guard that line against such operands (an eps, a clamp, a mask), or look at what made them so large or small"


@dataclass(frozen=True)
class NanHunt:
    """What is looked for: NaN, and with ``inf`` also infinities that were made from finite numbers."""

    inf: bool = True

    def watch(self, rank: int) -> Watcher:
        return Watcher(rank, self.inf)


@dataclass(frozen=True)
class Watcher:
    """Looks at one rank's program while it runs."""

    rank: int
    inf: bool

    def inputs(self, inputs: Sequence[Input], tensors: Sequence[Tensor]) -> None:
        """Raise if a parameter, a buffer or an argument holds NaN already, or a parameter an infinity."""
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
        if node.target in (operator.getitem, c10d.wait_tensor.default) or "empty" in str(node.target):
            return
        results = list(_floats(result))
        if all(bool(torch.isfinite(each).all()) for each in results):
            return
        given = list(_floats(operands))
        if any(_nans(each) for each in given):
            return
        infinite = any(_infs(each) for each in given)
        made_nan = any(_nans(each) for each in results)
        if not made_nan and (not self.inf or infinite or _passes_on(node) or _writes_inf(node)):
            return
        what, source = "a NaN" if made_nan else "an inf", "infinite" if infinite else "finite"
        lines = [", ".join(map(describe, results)), "of"]
        for used, each in zip(node.all_input_nodes, operands, strict=True):
            lines += [f"  {used.name} {describe(tensor)}" for tensor in _floats(each)]
        raise Error(
            f"{what} was made from {source} numbers, by {target_name(node)}{_global(node)}",
            where=place(self.rank, node),
            expected="finite numbers",
            got=f"\n  {'':<10}".join(lines if given else lines[:1]),
            remedy=REMEDY,
        )


class Stepper:
    """Runs one real rank's program node by node, with a watcher; results are its own memory."""

    def __init__(self, program: Program, watcher: Watcher) -> None:
        self._program, self._watcher = program, watcher
        self._steps = as_generator(program.module, watcher)
        self.node_of = self._steps.node_of

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        self._watcher.inputs(self._program.inputs, inputs)
        call, reply = self._steps(*inputs), None
        try:
            while True:
                request, tensor = call.send(reply)  # type: ignore[arg-type]
                args = [list(arg) if isinstance(arg, tuple) else arg for arg in request.args]
                try:
                    reply = c10d.wait_tensor.default(request.op(tensor, *args, request.group))
                except RuntimeError as error:
                    call.throw(error)  # raised where the program waits, so that its node is known
        except StopIteration as stop:
            return [out.clone() for out in stop.value]


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
    return node.target in COLLECTIVES and not {"sum", "avg"} & {arg for arg in node.args if isinstance(arg, str)}


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
