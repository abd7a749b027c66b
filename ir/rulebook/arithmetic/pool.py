"""Pooling, and what else works on the last dims as an image.

Where windows stand side by side, ``h`` is ``(p a)`` of the input, and ``p`` may be sharded. Where they overlap, a rank
needs the rows that its own reach. Elsewhere these dims are whole.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from shardfx.ir.graph import Node
from shardfx.ir.ops.computing.tiles import (
    adaptive_max_tile,
    avg_pool_tile,
    avg_pool_tile_backward,
    max_pool_tile,
    max_pool_tile_backward,
)
from shardfx.ir.rulebook.dims import argument, ops
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, template

from .spatial_dims import Adaptive, Slide, ends, slides, spatial, tiles

aten = torch.ops.aten

X, Y = "n.. h*#!", "n.. p*#!"
MAXIMA, BACKWARD = "X -> Y, Y", "Y, X, Y -> X"


def adaptive(node: Node, back: bool = False) -> list[Adaptive]:
    """The dims of an adaptive pool."""
    return [Adaptive(*each) for each in zip(*ends(node, back), strict=True)]


def adapted(node: Node) -> ShardingRule:
    """The largest element of each adaptive window."""
    same = node.operands[0].shape == node.outs[0].shape
    return spatial(node, adaptive(node), MAXIMA, "0>0" if same else "", moves_only=same)


def adapted_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The adaptive windows of a rank, of the rows that they reach; indices are those of the global image."""
    (held, made), (x, y) = tiles(emit), ends(emit.node)
    return emit.call(adaptive_max_tile, args[0], held.at, list(x), made.at, list(y), made.lengths)


def adapted_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of the adaptive windows that read it; of any of them it is a term."""
    return spatial(node, adaptive(node, back=True), BACKWARD, "0|1>", back=True, alone=True)


def adapted_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of the windows that read them, which may name elements that others have."""
    x, _ = ends(emit.node, back=True)
    return emit.call(max_pool_tile_backward, *args[:3], tiles(emit)[1].at, list(x), False)


def largest(node: Node) -> ShardingRule:
    """The largest element of each window, which is the element itself where each has a window of its own."""
    x, y = ends(node)
    dims = slides(node, x, y)
    same = x == y and all(each.kernel == 1 for each in dims)
    return spatial(node, dims, MAXIMA, "0>0" if same else "", moves_only=same)


def largest_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of the windows that read it; of any of them it is a term."""
    return spatial(node, slides(node, *ends(node, back=True)), BACKWARD, "0|1>", back=True, alone=True)


def largest_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The windows of a rank, of the rows that they reach; indices are those of the global image."""
    (held, made), dims = tiles(emit), slides(emit.node, *ends(emit.node))
    first = [start * each.stride - each.padding for start, each in zip(made.at, dims, strict=True)]
    options = (_each(dims, name) for name in ("kernel", "stride", "dilation"))
    return emit.call(max_pool_tile, args[0], *options, held.at, _each(dims, "size"), first, made.lengths)


def largest_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of the windows that read them: those name the elements that they found."""
    (read, made), dims = tiles(emit), slides(emit.node, *ends(emit.node, back=True))
    reach = [each.down.rows(start, length, each.size) for each, start, length in zip(dims, *read, strict=True)]
    inside = all(a <= first and first + n <= a + m for (first, n), a, m in zip(reach, *made, strict=True))
    return emit.call(max_pool_tile_backward, *args[:2], args[-1], made.at, _each(dims, "size"), inside)


def averaged(node: Node) -> ShardingRule:
    """The mean of each window; a row of the gradient is made of the windows that it is in."""
    back = len(node.operands) > 1
    dims = slides(node, *ends(node, back), blockwise=True)
    return spatial(node, dims, "Y, X -> X" if back else "X -> Y", "0|1>" if back else "0", back=back)


def averaged_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The windows of a rank, of the rows that they reach (or its rows of the gradient, of the windows that they are
    in); a window at the border has as many as it has of the whole."""
    node, (held, made) = emit.node, tiles(emit)
    back = len(node.operands) > 1
    dims = slides(node, *ends(node, back))
    windows, size = [_each(dims, name) for name in ("kernel", "stride", "padding")], _each(dims, "size")
    how = argument(node, "count_include_pad"), argument(node, "divisor_override")
    if back:
        return emit.call(avg_pool_tile_backward, *args[:2], *windows, made.at, size, held.at, *how)
    return emit.call(avg_pool_tile, args[0], *windows, held.at, size, made.at, made.lengths, *how)


def _each(dims: Sequence[Slide], name: str) -> list[int]:
    return [getattr(each, name) for each in dims]


def fractional(node: Node) -> Template:
    """Random numbers say where windows lie, but for the first and the last."""
    form = f"{X}, n.. e! -> {Y}, {Y}".replace("#", "3" if "3d" in str(node.op) else "2")
    return template(form, "1>" if max(argument(node, "output_size")) <= 2 else "")


def grid_backward(node: Node) -> Template:
    """The gradient of the grid is linear in the picture too; that of nearest neighbours is zero, whatever it shows."""
    space = node.operands[0].type.ndim - 2
    form = f"n c p*{space}, n c h*{space}!, n p*{space} e! -> n c h*{space}, n p*{space} e"
    return template(form, "0|1>" if argument(node, "interpolation_mode") == 1 else "0|1>1")


def _numbers(x: Tensor, space: int) -> Tensor:
    """The places of an image, counted through all dims of space."""
    sizes = x.shape[-space:]
    return torch.arange(math.prod(sizes), device=x.device).view(sizes)


def largest_of_all(x: Tensor, output_size: Sequence[int]) -> tuple[Tensor, Tensor]:
    """An adaptive max-pool, of a single window: its maximum, and where the first such stands (of NaN the last), each of
    which may be found of parts. With more windows it is the op."""
    space = len(output_size)
    if any(n != 1 for n in output_size):
        op = aten.adaptive_max_pool2d if space == 2 else aten.adaptive_max_pool3d
        made: tuple[Tensor, Tensor] = op.default(x, output_size)
        return made
    dims, number = list(range(-space, 0)), _numbers(x, space)
    y = x.amax(dims, keepdim=True)
    place = torch.where(x == y, number, torch.iinfo(torch.int64).max)
    found = torch.where(x.isnan(), -1 - number, place).amin(dims, keepdim=True)
    return y, torch.where(found < 0, -1 - found, found)


def largest_of_all_backward(grad: Tensor, x: Tensor, indices: Tensor, *, space: int) -> Tensor:
    """Its gradient: of a single window it stands where the maximum does."""
    if any(n != 1 for n in grad.shape[-space:]):
        op = aten.adaptive_max_pool2d_backward if space == 2 else aten.adaptive_max_pool3d_backward
        made: Tensor = op.default(grad, x, indices)
        return made
    return torch.where(_numbers(x, space) == indices, grad, 0.0)


def both(names: str, form: Any, **options: Any) -> Iterator[RuleEntry]:
    """The rules of ops on images of two and of three dims, which stand for ``#`` in names, form and options."""
    for space in "23":
        if "sized" in options:
            options = {**options, "sized": {"output_size": f"p*{space}"}}
        yield rule(
            ops(names.replace("#", space)), form.replace("#", space) if isinstance(form, str) else form, **options
        )


RULES: tuple[RuleEntry, ...] = (
    *both("max_pool#d_with_indices", largest, rows=largest_rows),
    *both("max_pool#d_with_indices_backward", largest_backward, rows=largest_backward_rows, contiguous=Contiguous.ALL),
    *both("adaptive_max_pool#d", adapted, rows=adapted_rows, expand=largest_of_all),
    *(
        rule(
            ops(f"adaptive_max_pool{space}d_backward"),
            adapted_backward,
            contiguous=Contiguous.ALL,
            rows=adapted_backward_rows,
            expand=functools.partial(largest_of_all_backward, space=space),
        )
        for space in (2, 3)
    ),
    *both("fractional_max_pool#d", fractional),
    *both(
        "fractional_max_pool#d_backward",
        "n.. p*#, n.. h*#!, n.. p*# -> n.. h*#!",
        linear="0|1>",
        sized={"output_size": "p*#"},
        contiguous=Contiguous.ALL,
    ),
    *both("max_unpool#d", f"{X}, {X} -> {Y}", linear="0"),
    *both("avg_pool#d avg_pool#d_backward", averaged, rows=averaged_rows),
    *both("grid_sampler_#d", "n c h*#!, n p*# e! -> n c p*#", linear="0"),
    *both("grid_sampler_#d_backward", grid_backward),
    rule(aten.pixel_shuffle, "n.. (c r! s!) h w -> n.. c (h r!) (w s!)", linear="0", moves_only=True),
    rule(aten.pixel_unshuffle, "n.. c (h r!) (w s!) -> n.. (c r! s!) h w", linear="0", moves_only=True),
    rule(aten.channel_shuffle, "n c! s.. -> n c! s..", linear="0", moves_only=True),
    # Each rank has the same part of both halves.
    rule(aten.glu, "d.. (two! k)@dim -> d.. k@dim"),
    rule(aten.glu_backward, "d.. k@dim, d.. (two! k)@dim -> d.. (two k)@dim", linear="0"),
)
