"""Pooling, and what else works on the last dims as a picture.

Where windows stand side by side, ``h`` is ``(p a)`` of the input, and ``p`` may be sharded. Where they overlap, a rank
needs the rows that its own reach. Elsewhere these dims are whole.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node, Value
from shardfx.ir.ops.computing.adaptive import adaptive_max_tile, largest_of_all, largest_of_all_backward
from shardfx.ir.ops.computing.tiles import avg_pool_tile, avg_pool_tile_backward, max_pool_tile, max_pool_tile_backward
from shardfx.ir.rulebook.dims import argument, ops
from shardfx.ir.rules.binding import Shape
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.schema import has_argument
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, template
from shardfx.ir.rules.windows import down, seeing, up

aten = torch.ops.aten

X, Y = "n.. h*#!", "n.. p*#!"


def side_by_side(size: int, out: int, kernel: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Whether every window lies in its own block of ``stride`` elements, and the blocks are all there is."""
    return padding == 0 and dilation * (kernel - 1) + 1 <= stride and size == out * stride


def spread(given: Any, space: int, default: Sequence[int]) -> list[int]:
    """An argument such as a stride: one number for all dims, a list, or an empty list for the default."""
    found = list(given) if isinstance(given, (list, tuple)) else [given]
    return found * space if len(found) == 1 else found or list(default)


class Tile(NamedTuple):
    """Where in a picture a rank's rows begin, and how many there are, dim by dim."""

    at: list[int]
    lengths: list[int]


class Slide(NamedTuple):
    """How the windows of a pool slide over one dim: its size, how many there are, and what they are like."""

    size: int
    places: int
    kernel: int
    stride: int
    padding: int
    dilation: int = 1

    @property
    def down(self) -> Window:
        """What a window reads."""
        return down(self.places, *self[2:])

    @property
    def up(self) -> Window:
        """The windows that read a row."""
        return up(self.size, *self[2:])


def slides(node: Node, x: Shape, y: Shape) -> list[Slide]:
    """How windows go from an ``x`` to a ``y`` of these sizes, dim by dim."""
    space = len(x)
    kernel = spread(argument(node, "kernel_size"), space, ())
    stride = spread(argument(node, "stride"), space, kernel)
    padding = spread(argument(node, "padding"), space, [0] * space)
    options = [kernel, stride, padding]
    if has_argument(node.op, "dilation"):
        options.append(spread(argument(node, "dilation"), space, [1] * space))
    return [Slide(*each) for each in zip(x, y, *options, strict=True)]


def spaces_of(node: Node) -> int:
    """How many dims the picture has."""
    return 3 if "3d" in str(node.op) else 2


class Adaptive(NamedTuple):
    """How ``places`` windows that cover a dim of ``size`` reach over it."""

    size: int
    places: int

    @property
    def down(self) -> Window:
        """What a window reads."""
        return Window(self.places, self.size, self.places, 0, self.size - 1)

    @property
    def up(self) -> Window:
        """The windows that read a row."""
        return Window(self.size, self.places, self.size, 0, self.places - 1)


def adaptive(node: Node, x: Shape, y: Shape) -> dict[int, Adaptive]:
    """The dims of which ranks may share windows; a single window over all rows is done on the whole."""
    space = spaces_of(node)
    return {i: Adaptive(*each) for i, each in enumerate(zip(x[-space:], y[-space:], strict=True)) if each[1] > 1}


def adapted(node: Node) -> ShardingRule:
    """The largest element of each adaptive window."""
    x, y = node.operands[0].shape, node.outs[0].shape
    found, same = adaptive(node, x, y), x == y
    form, y_form = (" ".join(f"{c}{i}{'' if i in found else '!'}" for i in range(spaces_of(node))) for c in "hp")
    made = template(f"n.. {form} -> n.. {y_form}, n.. {y_form}", "0>0" if same else "", moves_only=same)(node)
    return seeing(made, {f"h{i}": (f"p{i}", each.down) for i, each in found.items()})


def adapted_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The adaptive windows of a rank, of the rows that they reach; indices are those of the whole picture."""
    x, y, space = emit.node.operands[0], emit.node.outs[0], spaces_of(emit.node)
    held, made = tile(emit.operand_bounds, 0, x, space), tile(emit.result_bounds, 0, y, space)
    size, places = list(x.shape[-space:]), list(y.shape[-space:])
    return emit.call(adaptive_max_tile, args[0], held.at, size, made.at, places, made.lengths)


def adapted_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of the adaptive windows that read it; of any of them it is a term."""
    y, x = (value.shape for value in node.operands[:2])
    found = adaptive(node, x, y)
    form, y_form = (" ".join(f"{c}{i}{'' if i in found else '!'}" for i in range(spaces_of(node))) for c in "hp")
    made = template(f"n.. {y_form}, n.. {form}, n.. {y_form} -> n.. {form}", "0|1>")(node)
    return seeing(made, {f"p{i}": (f"h{i}", each.up) for i, each in found.items()}, alone=True)


def adapted_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of the windows that read them, which may name elements that others have."""
    x, space = emit.node.outs[0], spaces_of(emit.node)
    made = tile(emit.result_bounds, 0, x, space)
    return emit.call(max_pool_tile_backward, *args[:3], made.at, list(x.shape[-space:]), False)


def largest(node: Node) -> ShardingRule:
    """The largest element of each window, which is the element itself where each has a window of its own."""
    space = spaces_of(node)
    kernel = spread(argument(node, "kernel_size") or 1, space, ())
    x, y = node.operands[0].shape, node.outs[0].shape
    same = x == y and set(kernel) == {1}
    form = "n.. h*# -> n.. p*#, n.. p*#".replace("#", str(space))
    made = template(form, "0>0" if same else "", moves_only=same)(node)
    return seeing(made, {f"h{i}": (f"p{i}", each.down) for i, each in enumerate(slides(node, x[-space:], y[-space:]))})


def largest_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of the windows that read it; of any of them it is a term."""
    space = spaces_of(node)
    form = "n.. p*#, n.. h*#, n.. p*# -> n.. h*#".replace("#", str(space))
    made = template(form, "0|1>")(node)
    y, x = (value.shape[-space:] for value in node.operands[:2])
    return seeing(made, {f"p{i}": (f"h{i}", each.up) for i, each in enumerate(slides(node, x, y))}, alone=True)


def tile(bounds: Callable[[int, int], tuple[int, int]], tensor: int, value: Value, space: int) -> Tile:
    """A rank's rows of an operand or a result, by ``operand_bounds`` or ``result_bounds``."""
    found = [bounds(tensor, dim) for dim in range(value.type.ndim - space, value.type.ndim)]
    return Tile([start for start, _ in found], [length for _, length in found])


def largest_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The windows of a rank, of the rows that they reach; indices are those of the whole picture."""
    node, space = emit.node, spaces_of(emit.node)
    dims = slides(node, node.operands[0].shape[-space:], node.outs[0].shape[-space:])
    kernel, stride, dilation = ([each[place] for each in dims] for place in (2, 3, 5))
    held = tile(emit.operand_bounds, 0, node.operands[0], space)
    made = tile(emit.result_bounds, 0, node.outs[0], space)
    first = [start * each.stride - each.padding for start, each in zip(made.at, dims, strict=True)]
    size = [each.size for each in dims]
    return emit.call(max_pool_tile, args[0], kernel, stride, dilation, held.at, size, first, made.lengths)


def largest_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows, of the windows that read them: those name the elements that they found."""
    y, x = emit.node.operands[0], emit.node.outs[0]
    space = spaces_of(emit.node)
    size = list(x.shape[-space:])
    read, made = tile(emit.operand_bounds, 0, y, space), tile(emit.result_bounds, 0, x, space)
    reach = [
        each.down.rows(start, length, each.size)
        for each, start, length in zip(slides(emit.node, x.shape[-space:], y.shape[-space:]), *read, strict=True)
    ]
    inside = all(a <= first and first + n <= a + m for (first, n), a, m in zip(reach, *made, strict=True))
    return emit.call(max_pool_tile_backward, *args[:2], args[-1], made.at, size, inside)


def averaged_forms(dims: Sequence[Slide], seen: Sequence[Slide]) -> tuple[str, str, tuple[tuple[str, int], ...]]:
    """Picture and windows: ``h`` and ``p``, or where windows stand side by side ``(g a!)`` and ``g``."""
    x = " ".join(f"h{i}" if each in seen else f"(p{i} a{i}!)" for i, each in enumerate(dims))
    y = " ".join(f"p{i}" for i in range(len(dims)))
    return f"n.. {x}", f"n.. {y}", tuple((f"p{i}", each.places) for i, each in enumerate(dims) if each not in seen)


def averaged(node: Node) -> ShardingRule:
    """The mean of each window."""
    space = spaces_of(node)
    dims = slides(node, node.operands[0].shape[-space:], node.outs[0].shape[-space:])
    seen = [each for each in dims if not side_by_side(*each)]
    x, y, sizes = averaged_forms(dims, seen)
    made = template(f"{x} -> {y}", "0")(node, sizes)
    return seeing(made, {f"h{i}": (f"p{i}", each.down) for i, each in enumerate(dims) if each in seen})


def averaged_backward(node: Node) -> ShardingRule:
    """A row of the gradient is made of the windows that it is in."""
    space = spaces_of(node)
    dims = slides(node, node.operands[1].shape[-space:], node.operands[0].shape[-space:])
    seen = [each for each in dims if not side_by_side(*each)]
    x, y, sizes = averaged_forms(dims, seen)
    made = template(f"{y}, {x} -> {x}", "0|1>")(node, sizes)
    return seeing(made, {f"p{i}": (f"h{i}", each.up) for i, each in enumerate(dims) if each in seen})


def averaged_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """The windows of a rank, of the rows that they reach; a window at the border has as many as it has of the whole."""
    node, space = emit.node, spaces_of(emit.node)
    dims = slides(node, node.operands[0].shape[-space:], node.outs[0].shape[-space:])
    held = tile(emit.operand_bounds, 0, node.operands[0], space)
    made = tile(emit.result_bounds, 0, node.outs[0], space)
    size, *windows = ([each[place] for each in dims] for place in (0, 2, 3, 4))
    counted, divisor = argument(node, "count_include_pad"), argument(node, "divisor_override")
    return emit.call(avg_pool_tile, args[0], *windows, held.at, size, made.at, made.lengths, counted, divisor)


def averaged_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's rows of the gradient, of the windows that they are in."""
    node, space = emit.node, spaces_of(emit.node)
    dims = slides(node, node.operands[1].shape[-space:], node.operands[0].shape[-space:])
    held = tile(emit.operand_bounds, 0, node.operands[0], space)
    made = tile(emit.result_bounds, 0, node.outs[0], space)
    size, *windows = ([each[place] for each in dims] for place in (0, 2, 3, 4))
    counted, divisor = argument(node, "count_include_pad"), argument(node, "divisor_override")
    return emit.call(avg_pool_tile_backward, *args[:2], *windows, made.at, size, held.at, counted, divisor)


def fractional(node: Node) -> Template:
    """Random numbers say where windows lie, but for the first and the last."""
    form = f"{X}, n.. e! -> {Y}, {Y}".replace("#", "3" if "3d" in str(node.op) else "2")
    return template(form, "1>" if max(argument(node, "output_size")) <= 2 else "")


def grid_backward(node: Node) -> Template:
    """The gradient of the grid is linear in the picture too; that of nearest neighbours is zero, whatever it shows."""
    space = node.operands[0].type.ndim - 2
    form = f"n c p*{space}, n c h*{space}!, n p*{space} e! -> n c h*{space}, n p*{space} e"
    return template(form, "0|1>" if argument(node, "interpolation_mode") == 1 else "0|1>1")


def pictures(names: str, form: str, **options: Any) -> Iterator[RuleEntry]:
    """The rules of ops on pictures of two and of three dims, which stand for ``#`` in their names and in the form."""
    for space in "23":
        yield rule(ops(names.replace("#", space)), form.replace("#", space), **options)


RULES: tuple[RuleEntry, ...] = (
    *(rule(ops(f"max_pool{n}d_with_indices"), largest, rows=largest_rows) for n in (2, 3)),
    rule(ops("adaptive_max_pool2d adaptive_max_pool3d"), adapted, rows=adapted_rows, expand=largest_of_all),
    rule(
        ops("max_pool2d_with_indices_backward max_pool3d_with_indices_backward"),
        largest_backward,
        contiguous=Contiguous.ALL,
        rows=largest_backward_rows,
    ),
    *(
        rule(
            ops(f"fractional_max_pool{space}d_backward"),
            f"n.. p*{space}, n.. h*{space}!, n.. p*{space} -> n.. h*{space}!",
            linear="0|1>",
            sized={"output_size": f"p*{space}"},
            contiguous=Contiguous.ALL,
        )
        for space in (2, 3)
    ),
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
    *(rule(ops(f"fractional_max_pool{n}d"), fractional) for n in (2, 3)),
    *pictures("max_unpool#d", f"{X}, {X} -> {Y}", linear="0"),
    rule(ops("avg_pool2d avg_pool3d"), averaged, rows=averaged_rows),
    rule(ops("avg_pool2d_backward avg_pool3d_backward"), averaged_backward, rows=averaged_backward_rows),
    *pictures("grid_sampler_#d", "n c h*#!, n p*# e! -> n c p*#", linear="0"),
    *(rule(ops(f"grid_sampler_{n}d_backward"), grid_backward) for n in (2, 3)),
    rule(aten.pixel_shuffle, "n.. (c r! s!) h w -> n.. c (h r!) (w s!)", linear="0", moves_only=True),
    rule(aten.pixel_unshuffle, "n.. c (h r!) (w s!) -> n.. (c r! s!) h w", linear="0", moves_only=True),
    rule(aten.channel_shuffle, "n c! s.. -> n c! s..", linear="0", moves_only=True),
    # Each rank holds the same part of both halves.
    rule(aten.glu, "d.. (two! k)@dim -> d.. k@dim"),
    rule(aten.glu_backward, "d.. k@dim, d.. (two! k)@dim -> d.. (two k)@dim", linear="0"),
)
