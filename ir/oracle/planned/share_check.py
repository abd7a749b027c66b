"""Is what a plan does with one node right? Its share is executed in small, and called without numbers in full size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.cut import Coords
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.oracle.instance import Instance, as_results, bind, describe
from shardfx.ir.oracle.running.draws import as_given, beyond, draws, extremes, not_finite, without_zeros
from shardfx.ir.oracle.running.memory_layouts import laid_otherwise
from shardfx.ir.oracle.soundness import Execution, Executor, hold, said
from shardfx.ir.rules.book import RuleEntry, perform

from .small_share import small_share, used_axes

RANDOM = (dropout,)
"""Ops whose numbers are drawn by where a rank's piece lies: no whole run draws the same."""
MOST_COORDS = 256


@dataclass(frozen=True)
class Answer:
    """What the oracle says of a share: what is wrong, or why it could not be executed; neither if it is right."""

    wrong: str = ""
    left_out: str = ""


@cache
def without_numbers() -> FakeTensorMode:
    """In which tensors have shapes, dtypes and devices alone: one for all, since making one costs more than a call."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Ops run on the CPU, by torch alone, and the user's random numbers stay as they are."""
    with ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch._C.DisableTorchFunction())  # the user's default device among others
        stack.enter_context(torch.random.fork_rng(devices=[]))
        yield


def check_share(node: Node, entry: RuleEntry, mesh: Mesh, nonzero: Collection[int] = ()) -> Answer:
    """What is wrong with a node's strategy, or with how its rule's ``local`` writes a rank's version.

    Args:
        nonzero: operands, by number, that have no zero among their elements: on no others is the share executed.
    """
    with undisturbed():
        wrong = fails_without_numbers(node, entry, mesh)
        if wrong:
            return Answer(wrong=wrong)
        if node.op in RANDOM:
            return Answer(left_out="its numbers are drawn")
        small = small_share(node, entry, mesh)
        if small is None:
            return Answer(left_out="it could not be made small")
        values = as_given(small.of), *draws(small.of), *far_out(entry, small.of, small.made)
        for number, each in enumerate(values):
            why, lies = "", ""
            try:
                each = without_zeros(each, nonzero)
                held = hold(small.made, each, small.mesh, torch.Generator().manual_seed(0))
                why = Execution(entry, small.made, each, small.mesh, held).difference()
            except Exception as error:  # whatever a kernel says of its arguments
                said_so = f"on {describe(small.of.node)}: {said(error)}"
                return Answer(wrong=said_so) if small.as_it_stands else Answer(left_out=said_so)
            for name, laid in laid_otherwise(held) if not number and not why else ():
                with suppress(Exception):  # a kernel that does not take such a layout: an error, and no wrong number
                    why = Execution(entry, small.made, each, small.mesh, laid).difference()
                lies = f", in a layout that is {name}"
                if why:
                    break
            if why:
                return Answer(wrong=f"on {describe(small.of.node)}{lies}: {why}")
    return Answer()


def far_out(entry: RuleEntry, of: Instance, made: Strategy) -> Iterator[Instance]:
    """Values that are far out, where a rank's version may be wrong there alone: if it is another op, or if operands are
    shares. Not of rules by rows: there a kernel may take a row of NaN zero times that a rank does not have."""
    if any(spec.partial for spec in made.operands):
        yield from beyond(of)
    elif entry.local is not None and torch.Tag.pointwise in getattr(of.node.op, "tags", ()):
        yield from extremes(of)
    elif entry.local is not None and entry.rows is None:
        yield from not_finite(of)


def fails_without_numbers(node: Node, entry: RuleEntry, mesh: Mesh) -> str:
    """Why a rank's version of a node cannot run on the rank's own shapes, or gives other shapes; or "".

    A dtype that hangs on the device is right if the CPU's fake version gives it, or that of no device.
    """
    made = node.strategy
    assert made is not None
    seen = set()
    for coords in _coords(made, node, mesh):
        shapes = [s.local_shape(v.shape, mesh, coords) for v, s in zip(node.operands, made.operands, strict=True)]
        if tuple(shapes) in seen:
            continue
        seen.add(tuple(shapes))
        call = RankCall(node, entry, mesh, coords, tuple(shapes))
        try:
            why = _other_shapes(call.results("cpu"), node, made, mesh, coords)
        except Exception as error:  # whatever an op says of its arguments
            return f"it fails on a rank's shapes {shapes}: {said(error)}"
        if why and _other_shapes(call.results("meta"), node, made, mesh, coords):
            return why
    return ""


@dataclass(frozen=True)
class RankCall:
    """What one rank does of a node, on operands of these shapes."""

    node: Node
    entry: RuleEntry
    mesh: Mesh
    coords: Coords
    shapes: tuple[tuple[int, ...], ...]

    def results(self, device: str) -> list[Any]:
        """Its results without numbers, as if on a device."""
        pairs = zip(self.shapes, self.node.operands, strict=True)
        with without_numbers():
            tensors = [torch.empty(shape, dtype=value.type.dtype, device=device) for shape, value in pairs]
            args, kwargs = bind(self.node, tensors)
            return as_results(perform(self.entry, Executor(self.node, self.mesh, self.coords, args, kwargs)))


def _other_shapes(results: list[Any], node: Node, made: Strategy, mesh: Mesh, coords: Coords) -> str:
    specs = iter(made.results)
    for i, value in enumerate(node.results):
        if value is None:
            continue
        shape = next(specs).local_shape(value.shape, mesh, coords)
        given = results[i] if i < len(results) else None
        if given is None or tuple(given.shape) != shape or given.dtype != value.type.dtype:
            got = "no tensor" if given is None else f"{given.dtype} of shape {list(given.shape)}"
            return f"result {i} of a rank is {got}, by its fake version; expected {value.type.dtype} of {list(shape)}"
    return ""


def _coords(made: Strategy, node: Node, mesh: Mesh) -> Iterator[Coords]:
    """The ranks to look at: the first and the last along each axis that is used, where sizes do not divide all."""
    used = used_axes(made)
    pairs = [*zip(node.operands, made.operands, strict=True), *zip(node.outs, made.results, strict=True)]
    even = all(
        cut.is_even(size, mesh) for value, spec in pairs for size, cut in zip(value.shape, spec.dims, strict=True)
    )
    counts = [mesh[axis].size for axis in used]
    every = not even and math.prod(counts) <= MOST_COORDS
    options = [range(n) if every else sorted({0, n - 1}) for n in counts]
    rest = dict.fromkeys(mesh.names, 0)
    for chosen in itertools.product(*options):
        yield {**rest, **dict(zip(used, chosen, strict=True))}
