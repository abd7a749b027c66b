"""Convolution. Batch, channels and space may be sharded: of a sharding of space a rank needs the rows that its windows
reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.binding import Shape
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import Stretch, down, fitted, grows, seeing, up

from .pool import side_by_side, spread

aten = torch.ops.aten


class Geometry(NamedTuple):
    """One dim of space: the sizes of the side that a kernel slides over and of that of its places, and how it does."""

    large: int
    small: int
    kernel: int
    stride: int
    padding: int
    dilation: int

    @property
    def apart(self) -> bool:
        """Whether the windows stand side by side: the patches of a vision transformer, a kernel of one."""
        return side_by_side(*self)

    @property
    def down(self) -> Window:
        """What a place needs of the large side."""
        return down(self.small, *self[2:])

    @property
    def up(self) -> Window:
        """What a row of the large side needs of the places."""
        return up(self.large, *self[2:])


def geometry(node: Node, x: Shape, w: Shape, y: Shape) -> list[Geometry]:
    """The dims of space of a convolution from x to y; of a transposed one y is the large side."""
    large, small = (y, x) if argument(node, "transposed") else (x, y)
    space = len(x) - 2
    options = (spread(argument(node, name), space, ()) for name in ("stride", "padding", "dilation"))
    return [Geometry(*each) for each in zip(large[2:], small[2:], w[2:], *options, strict=True)]


def forms(node: Node, space: list[Geometry], *, bias: bool = False, whole: bool = False) -> tuple[str, str, str]:
    """The dims of input, weight and output: n, g groups, ci and co channels within a group, kernel and space.

    Space is ``h`` on the large side and ``p`` on the small one; where windows stand side by side ``h`` is ``(p s!)``.
    With a ``bias`` inside, or groups, ci is whole.
    """
    mark = "!" if whole else ""
    large = [f"(p{i} s{i}!)" if each.apart else f"h{i}{mark}" for i, each in enumerate(space)]
    small = [f"p{i}" if each.apart else f"p{i}{mark}" for i, each in enumerate(space)]
    ci = "ci!" if bias or argument(node, "groups") > 1 else "ci"
    transposed = argument(node, "transposed")
    channels = f"(g {ci}) co" if transposed else f"(g co) {ci}"
    wide, narrow = (small, large) if transposed else (large, small)
    return f"n (g ci) {' '.join(wide)}", f"{channels} k*{len(space)}!", f"n (g co) {' '.join(narrow)}"


def seen_by_places(space: list[Geometry]) -> dict[str, tuple[str, Window]]:
    """The large side, as the places of the kernel need it."""
    return {f"h{i}": (f"p{i}", each.down) for i, each in enumerate(space) if not each.apart}


def convolution(node: Node) -> ShardingRule:
    """``x[n (g ci) h..], w[(g co) ci k!..], b[(g co)] -> y[n (g co) p..]``: h as p needs it, or transposed. A bias that
    is a partial sum is added by each rank to its own sum over ci."""
    bias = len(node.operands) > 2
    space = geometry(node, node.operands[0].shape, node.operands[1].shape, node.outs[0].shape)
    x, w, y = forms(node, space, bias=bias)
    joined = "|2*ci" if argument(node, "groups") == 1 else ""
    made = template(f"{x}, {w}, (g co) -> {y}", f"0&2|1&2{joined if bias else ''}")(node)
    if argument(node, "transposed"):
        return seeing(made, {f"p{i}": (f"h{i}", each.up) for i, each in enumerate(space) if not each.apart})
    return seeing(made, seen_by_places(space))


def convolution_backward(node: Node) -> ShardingRule:
    """The gradient of x is a sum over co, that of w a sum over n, that of the bias does not know ci.

    The one is linear in w, the other in x. The gradient of w alone is a sum over the places of the kernel, which may be
    sharded; with another one beside it space is whole. The gradient of a bias alone is a sum over all places.
    """
    y, x, w = (value.shape for value in node.operands)
    alone = list(argument(node, "output_mask")) == [False, True, False]
    space = geometry(node, x, w, y)
    xs, ws, ys = forms(node, space, whole=not alone)
    if list(argument(node, "output_mask")) == [False, False, True]:
        ys = f"n (g co) {' '.join(f'o{i}' for i in range(len(space)))}"  # the one sum of the gradient
    made = template(f"{ys}, {xs}, {ws} -> {xs}, {ws}, (g co)", "0|1>1|2>0", unread="ci>2")(node)
    return seeing(made, seen_by_places(space)) if alone else made


def expand_convolution(x: Tensor, w: Tensor, bias: Tensor | None, *options: Any) -> Tensor:
    """A convolution and the bias behind it: a sharding of the summed channels is then in the way of the sum alone."""
    y: Tensor = aten.convolution(x, w, None, *options)
    return y if bias is None else y + bias.view([1, -1, *[1] * (x.dim() - 2)])


def expand_convolution_backward(
    grad: Tensor,
    x: Tensor,
    w: Tensor,
    bias_sizes: list[int] | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    output_padding: list[int],
    groups: int,
    wanted: list[bool],
) -> tuple[Tensor | None, ...]:
    """The gradients of a convolution, each by itself: that of x is a transposed one of the gradient (of a transposed
    one a plain one), that of the bias a sum over all dims but the channels."""
    for_x, for_w, for_bias = wanted
    gx = gw = gb = None
    if for_x:
        space = x.dim() - 2
        per = [spread(each, space, ()) for each in (stride, padding, dilation)]
        pairs = zip(x.shape[2:], grad.shape[2:], w.shape[2:], *per, strict=True)
        left = [large - ((small - 1) * s - 2 * p + d * (k - 1) + 1) for large, small, k, s, p, d in pairs]
        more = [0] * space if transposed else left
        gx = aten.convolution(grad, w, None, stride, padding, dilation, not transposed, more, groups)
        for dim in range(2, x.dim()):  # places of a transposed one's padding at the end, which x does not have
            gx = gx if gx.shape[dim] == x.shape[dim] else gx.narrow(dim, 0, x.shape[dim])
    if for_w:
        rest = (stride, padding, dilation, transposed, output_padding, groups)
        _, gw, _ = aten.convolution_backward(grad, x, w, None, *rest, [False, True, False])
    if for_bias:
        gb = torch.sum(grad, [d for d in range(grad.dim()) if d != 1])
    return gx, gw, gb


def expand_im2col(
    x: Tensor, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Tensor:
    """The elements of windows, one dim after the other: so a rank that holds a part of an image knows what it needs.

    Nothing is multiplied: an infinite element is in its own windows, and in its place of them.
    """
    y: Tensor = aten.constant_pad_nd(x, [padding[1], padding[1], padding[0], padding[0]]) if any(padding) else x
    for dim, size, apart, step in zip((-2, -1), kernel, dilation, stride, strict=True):
        y = y.unfold(x.dim() + dim, apart * (size - 1) + 1, step)
        y = y[..., ::apart] if apart > 1 else y
    return y.movedim((-2, -1), (-4, -3)).flatten(-5, -3).flatten(-2)


def expand_col2im(
    x: Tensor,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Windows added up where they overlap, one dim after the other."""
    options = list(zip(size, kernel, dilation, padding, stride, strict=True))
    places = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, d, p, s in options]
    y: Tensor = x.unflatten(-1, places).unflatten(-3, (-1, *kernel)).movedim((-4, -3), (-2, -1))
    for dim, (n, k, d, p, s) in reversed(list(zip((-2, -1), options, strict=True))):
        wide = d * (k - 1) + 1
        y = aten.slice_backward(y, [*y.shape[:-1], wide], y.dim() - 1, 0, wide, d) if d > 1 else y
        at = x.dim() + 1 + dim
        y = aten.unfold_backward(y, [*y.shape[:at], n + 2 * p, *y.shape[at + 1 : -1]], at, wide, s)
        y = y.narrow(at, p, n) if p else y
    return y


def convolution_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A convolution, padded at the border of the whole; of a transposed one what goes beyond its rows is cut off."""
    x, w, bias, stride, padding, dilation, transposed, more, groups = args
    space, sharding = _space(emit), sorted(int(leader[1:]) for leader in leaders)
    padding, more = (
        [0 if i in sharding else n for i, n in enumerate(spread(n, len(space), ()))] for n in (padding, more)
    )
    stretches = []
    for i in sharding:
        held, made = emit.operand_bounds(0, 2 + i), emit.result_bounds(0, 2 + i)
        stretches.append(_made(space[i], i, held, made) if transposed else _read(space[i], i, held, made))
    if not transposed:
        x = fitted(emit, x, stretches)
        return emit.call(aten.convolution.default, x, w, bias, stride, padding, dilation, False, more, groups)
    apart = bias is not None and grows(stretches)
    inside = None if apart else bias
    y = emit.call(aten.convolution.default, x, w, inside, stride, padding, dilation, True, more, groups)
    y = fitted(emit, y, stretches)
    if not apart:
        return y
    return emit.call(aten.add.Tensor, y, emit.call(aten.reshape.default, bias, [-1, *[1] * len(space)]))


def convolution_backward_rows(emit: Emit, args: tuple[Any, ...], leaders: frozenset[str]) -> Any:
    """A rank's share of the gradient of w: of its own places, and of what these read."""
    grad, x, w, bias_sizes, stride, padding, dilation, transposed, more, groups, wanted = args
    space, sharding = _space(emit), sorted(int(leader[1:]) for leader in leaders)
    padding, more = (
        [0 if i in sharding else n for i, n in enumerate(spread(n, len(space), ()))] for n in (padding, more)
    )
    large, small = (0, 1) if transposed else (1, 0)
    pairs = [(i, emit.operand_bounds(large, 2 + i), emit.operand_bounds(small, 2 + i)) for i in sharding]
    stretches = [_read(space[i], i, held, places) for i, held, places in pairs]
    if transposed:
        grad = fitted(emit, grad, stretches)
    else:
        x = fitted(emit, x, stretches)
    rest = (stride, padding, dilation, transposed, more, groups, wanted)
    return emit.call(aten.convolution_backward.default, grad, x, w, bias_sizes, *rest)


Bounds = tuple[int, int]


def _space(emit: Emit) -> list[Geometry]:
    """The dims of space."""
    node = emit.node
    if node.op is aten.convolution.default:
        x, weight, y = *node.operands[:2], node.outs[0]
    else:
        y, x, weight = node.operands
    return geometry(node, x.shape, weight.shape, y.shape)


def _read(each: Geometry, i: int, held: Bounds, places: Bounds) -> Stretch:
    """What the kernel reads at some places, of the rows of the large side that are held."""
    first, last = each.down.reach(*places)
    return Stretch(2 + i, held[0], held[0] + held[1], first, last + 1)


def _made(each: Geometry, i: int, held: Bounds, made: Bounds) -> Stretch:
    """What the kernel writes from the places that are held, of which some rows are wanted."""
    start = held[0] * each.stride - each.padding
    end = start + (held[1] - 1) * each.stride + each.dilation * (each.kernel - 1) + 1
    return Stretch(2 + i, start, end, made[0], made[0] + made[1])


RULES: tuple[RuleEntry, ...] = (
    rule(aten.im2col, "n.. c h! w! -> n.. (c k!) l!", linear="0", expand=expand_im2col),
    rule(aten.col2im, "n.. (c k!) l! -> n.. c h! w!", linear="0", expand=expand_col2im),
    rule(
        aten.convolution.default,
        convolution,
        sized={"groups": "g"},
        expand=expand_convolution,
        rows=convolution_rows,
    ),
    rule(
        aten.convolution_backward.default,
        convolution_backward,
        sized={"groups": "g", "bias_sizes": "(g co)"},
        expand=expand_convolution_backward,
        rows=convolution_backward_rows,
    ),
)
