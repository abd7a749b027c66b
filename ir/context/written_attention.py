"""Attention that a model writes out, as products around a softmax.

    scores = matmul(q, k.mT) * scale            or bmm, baddbmm, einsum
    scores = tanh(scores / c) * c               a soft cap
    scores = scores + bias                      masks and biases; masked_fill and where, too
    scores = cat([scores, sinks], -1)           one more logit of each query, of no value
    matmul(softmax(scores)[..., :t], v)

As a call it has no tensor of queries times keys, and its masks are read (:mod:`.attention_masks`). It computes the same
but for rounding of 16 bits, and for NaN: a query to which infinite numbers leave no key gets zeros. Dropout of weights,
and weights that something else uses, leave it as it is written.

FlexAttention (https://arxiv.org/abs/2412.05496) is written out first, by its functions of scores and places.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.traits import with_defaults

from .mask_reader import write

aten = torch.ops.aten
WIDEST = 256
"""The widest head where keys are fewer: of wider ones the scores are small, and a sum over rows may be sharded."""
CASTS = (aten.to.dtype, aten._to_copy.default)
COPIES = (aten.clone.default, aten.contiguous.default, aten.alias.default)
SOFTMAX = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default)
MOVES = (aten.transpose.int, aten.swapaxes.default, aten.mT.default, aten.permute.default)
VIEWS = (aten.view.default, aten.reshape.default, aten.unsqueeze.default, aten.expand.default)
RESHAPES = (aten.view.default, aten.reshape.default)
Dims = tuple[fx.Node, str]
"""A tensor, and a letter for each of its dims: ``abc`` those of the batch, ``s`` queries, ``t`` keys, ``e`` a head."""


class Hidden(NamedTuple):
    """A fill of scores by a number, where a condition is true, or false; or of a mask that is added to them."""

    condition: fx.Node
    number: float
    unless: bool = False
    is_added: bool = False


@dataclass(frozen=True)
class Scores:
    """The scores of an attention, as they are written."""

    q: Dims
    k: Dims
    scale: float = 1.0
    tanh: bool = False
    """Whether they are a hyperbolic tangent, that is not yet multiplied by a soft cap."""
    softcap: float = 0.0
    masks: tuple[fx.Node | Hidden, ...] = ()
    sinks: fx.Node | None = None
    nodes: tuple[fx.Node, ...] = ()

    @property
    def is_product(self) -> bool:
        """Whether they are scaled products alone."""
        return not (self.tanh or self.softcap or self.masks or self.sinks)

    def masked(self, mask: fx.Node | Hidden) -> Scores | None:
        """Those with one more mask."""
        return None if self.tanh or self.sinks else replace(self, masks=(*self.masks, mask))


def split_heads(graph: fx.Graph) -> None:
    """Products of matrices of which one dim is batch and heads, as those with both, where scores are viewed so.

    ``baddbmm(bias, q, k).view(b, h, s, t)``, and ``bmm(weights.view(b * h, s, t), v)`` as Bloom has it.
    """
    for node in [*graph.nodes] if any(node.target in SOFTMAX for node in graph.nodes) else ():
        op, args = node.target, node.args
        if op in RESHAPES and args[0].target in (aten.baddbmm.default, aten.bmm.default):
            product, shape = args[0], node.meta["val"].shape
            if (
                len(shape) == 4
                and not _is_weights(product.args[-2])
                and product.meta["val"].shape[1:] == shape[2:]
                and [*product.users] == [node]
            ):
                call = partial(write, node, node)
                parts = [_split(call, each, shape[:2]) for each in product.args]
                made = call(aten.matmul.default, *parts[-2:])
                if len(parts) > 2:
                    beta, alpha = (product.kwargs.get(name, 1) for name in ("beta", "alpha"))
                    made = call(aten.mul.Tensor, made, alpha) if alpha != 1 else made
                    bias = call(aten.mul.Tensor, parts[0], beta) if beta != 1 else parts[0]
                    made = call(aten.add.Tensor, made, bias)
                node.replace_all_uses_with(made)
                _erase(node, product)
        elif op is aten.bmm.default and args[0].target in RESHAPES:
            weights, shape = args[0].args[0], args[0].args[0].meta["val"].shape
            if len(shape) == 4 and args[0].meta["val"].shape[1:] == shape[2:] and [*args[0].users] == [node]:
                call = partial(write, node, node)
                made = call(aten.matmul.default, weights, _split(call, args[1], shape[:2]))
                node.replace_all_uses_with(call(aten.reshape.default, made, [*node.meta["val"].shape]))
                _erase(node, args[0])


def _erase(*nodes: fx.Node) -> None:
    for node in nodes:
        node.graph.erase_node(node)


def _is_weights(node: Any) -> bool:
    """Whether a tensor is a softmax, and what dropout leaves of it."""
    while node.target in (*CASTS, *COPIES, *VIEWS, aten.dropout.default):
        node = node.args[0]
    return node.target in SOFTMAX


def _split(call: Callable[..., fx.Node], x: fx.Node, batch: Sequence[int]) -> fx.Node:
    """A tensor ``[b * h, ..]`` as ``[b, h, ..]``; other ones broadcast."""
    first, *rest = x.meta["val"].shape
    return call(aten.reshape.default, x, [*batch, *rest]) if len(rest) == 2 and first == math.prod(batch) else x


def written_attentions(graph: fx.Graph) -> Iterator[tuple[Scores, Dims, Dims]]:
    """The attentions of an exported graph that are written out without dropout: scores, values, results."""
    for node in graph.nodes:
        for weights, v, out in _products(node, "ste"):
            found = _weights(weights[0], node) if weights[1] == "abc"[: len(out) - 2] + "st" else None
            if found is not None and _fits(found, v[0]):
                yield found, v, (node, out)


def _fits(scores: Scores, v: fx.Node) -> bool:
    """Whether the tensors are of one dtype, each with a batch, and their heads no channels in disguise."""
    given = [each.meta["val"] for each in (scores.q[0], scores.k[0], v)]
    one = len({each.dtype for each in given}) == 1 and given[0].dtype.is_floating_point
    if not one or min(each.dim() for each in given) < 3:
        return False
    head, keys = given[0].shape[scores.q[1].index("e")], given[1].shape[scores.k[1].index("t")]
    return bool(head <= max(keys, WIDEST))


def _products(node: fx.Node, letters: str) -> Iterator[tuple[Dims, Dims, str]]:
    """The operands of a product of batches of matrices, and the dims of its result; the letters are those of rows,
    of what is summed, and of columns."""
    args: Any = node.args
    if node.target in PRODUCTS:
        first, second = args
        dims = first.meta["val"].dim()
        if 3 <= dims == second.meta["val"].dim():
            batch = "abc"[: dims - 2]
            yield (first, batch + letters[:2]), (second, batch + letters[1:]), batch + letters[0] + letters[2]
    elif node.target is aten.einsum.default and len(args[1]) == 2:
        left, _, out = args[0].replace(" ", "").partition("->")
        words = left.split(",")
        for a, b in ((0, 1), (1, 0)):
            one, other, made = {*words[a]}, {*words[b]}, {*out}
            own = [one & made - other, one & other - made, other & made - one]
            batch = "".join(each for each in out if each in one & other)
            names = {
                **dict(zip(batch, "abc", strict=False)),
                **{each: x for part, x in zip(own, letters, strict=True) for each in part},
            }
            if [*map(len, own)] == [1, 1, 1] and 0 < len(batch) < 4 and len(names) == len(one | other | made):
                named = ["".join(map(names.__getitem__, each)) for each in (words[a], words[b], out)]
                yield (args[1][a], named[0]), (args[1][b], named[1]), named[2]


def _users(node: fx.Node) -> list[fx.Node]:
    return [each for each in node.users if each.target is not aten._assert_tensor_metadata.default]


def _is_last(dim: Any, node: fx.Node) -> bool:
    return dim in (-1, node.meta["val"].dim() - 1)


def _shows(node: fx.Node) -> bool:
    """Whether an op gives its operand as it is, but for its dtype."""
    same = node.target in VIEWS and node.meta["val"].shape == node.args[0].meta["val"].shape  # type: ignore[union-attr]
    return node.target in COPIES or (node.target in CASTS and node.meta["val"].is_floating_point()) or bool(same)


def _weights(node: fx.Node, user: fx.Node) -> Scores | None:
    """The scores of which a node has the softmax."""
    dropped, passed = False, list[fx.Node]()
    while node.target not in SOFTMAX:
        given = node.args[0] if node.args else None
        if not isinstance(given, fx.Node) or _users(node) != [user]:
            return None
        if node.target is aten.slice.Tensor and not dropped:
            dim, start, _, step = [*with_defaults(aten.slice.Tensor, node.args, node.kwargs).values()][:4]
            sizes = [each.meta["val"].shape[-1] for each in (given, node)]
            dropped = _is_last(dim, given) and not start and step == 1 and sizes[0] == sizes[1] + 1
            if not dropped:
                return None
        elif not _shows(node) and (node.target is not aten.dropout.default or (node.args[2] and node.args[1] != 0)):
            return None
        passed.append(node)
        node, user = given, node
    found = _scores(node.args[0], node) if _is_last(node.args[1], node) and _users(node) == [user] else None
    fits = found is not None and (found.sinks is not None) == dropped
    return replace(found, nodes=(*passed, node, *found.nodes)) if fits else None  # type: ignore[union-attr, type-var]


def _scores(node: Any, user: fx.Node, maximum: fx.Node | None = None) -> Scores | None:
    """The scores that a node computes, which only its user reads, and one that has their maximum."""
    if not isinstance(node, fx.Node) or {*_users(node)} - {maximum} != {user}:
        return None
    if not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    for q, k, order in _products(node, "set"):
        if order.endswith("st"):
            return Scores(q, k, nodes=(node,))
    read = READ.get(node.target, _unchanged)
    found = read(node)
    return None if found is None else replace(found, nodes=(node, *found.nodes))


def _unchanged(node: fx.Node) -> Scores | None:
    return _scores(node.args[0], node) if _shows(node) else None


def _with_bias(node: fx.Node) -> Scores | None:
    """``baddbmm``."""
    bias, q, k = node.args
    beta, alpha = (node.kwargs.get(name, 1) for name in ("beta", "alpha"))
    plain = Scores((q, "ase"), (k, "aet"), float(alpha))  # type: ignore[arg-type]
    return plain.masked(bias) if beta == 1 else plain if beta == 0 else None  # type: ignore[arg-type]


def _scaled(power: int) -> Callable[[fx.Node], Scores | None]:
    """A product with a number, or a quotient by one: of scores, or the end of a soft cap."""

    def read(node: fx.Node) -> Scores | None:
        a, b = node.args[:2]
        if power == 1 and number_of(a) is not None:
            a, b = b, a
        number = number_of(b)
        found = _scores(a, node) if number and not node.kwargs else None
        if number is None or found is None or not replace(found, tanh=False).is_product:
            return None
        factor = number**power
        scaled = replace(found, scale=found.scale * factor)
        return replace(scaled, softcap=factor, tanh=False) if found.tanh else scaled

    return read


def number_of(value: Any) -> float | None:
    """The number that a value is everywhere; None if it is not known."""
    if isinstance(value, fx.Node) and value.target is aten.full.default and value.args[0] == []:
        value = value.args[1]
    return float(value) if isinstance(value, (int, float)) else None


def _tanh(node: fx.Node) -> Scores | None:
    found = _scores(node.args[0], node)
    return replace(found, tanh=True) if found is not None and found.is_product else None


def _added(node: fx.Node) -> Scores | None:
    """Scores and a mask, in any order."""
    for scores, mask in (node.args[:2], node.args[1::-1]):
        found = _scores(scores, node) if not node.kwargs and _spreads(mask, node) else None
        if found is not None and mask.meta["val"].is_floating_point():  # type: ignore[union-attr]
            return found.masked(mask)  # type: ignore[arg-type]
    return None


def _spreads(mask: Any, node: fx.Node) -> bool:
    """Whether a mask is spread to scores, and not these to it."""
    found = mask.meta.get("val") if isinstance(mask, fx.Node) else None
    shape = node.meta["val"].shape
    return isinstance(found, torch.Tensor) and torch.broadcast_shapes(found.shape, shape) == shape


def _filled(scores: int, condition: int, unless: bool) -> Callable[[fx.Node], Scores | None]:
    """Scores, but a number where a condition is true, or false."""

    def read(node: fx.Node) -> Scores | None:
        number, where = number_of(node.args[2]), node.args[condition]
        hides = number is not None and number <= torch.finfo(node.meta["val"].dtype).min and _spreads(where, node)
        found = _scores(node.args[scores], node) if hides else None
        return None if found is None else found.masked(Hidden(where, number, unless))  # type: ignore[arg-type]

    return read


def _without_maximum(node: fx.Node) -> Scores | None:
    """Scores less the largest of each query, which changes no softmax."""
    scores, most = node.args[:2]
    for op in (aten.detach.default, operator.getitem):
        if isinstance(most, fx.Node) and most.target is op and most.args[1:] in ((), (0,)):
            most = most.args[0]
    if not isinstance(most, fx.Node) or most.target not in (aten.max.dim, aten.amax.default) or node.kwargs:
        return None
    dims = most.args[1] if isinstance(most.args[1], (list, tuple)) else [most.args[1]]
    of_last = most.args[0] is scores and most.args[2:] == (True,) and len(dims) == 1 and _is_last(dims[0], node)
    return _scores(scores, node, most) if of_last else None


def _with_sinks(node: fx.Node) -> Scores | None:
    """Scores and a column of sinks ``[h]``."""
    given: Any = node.args
    parts, dim = (*given, 0)[:2]
    shape = node.meta["val"].shape
    if not isinstance(parts, (list, tuple)) or len(parts) != 2 or not _is_last(dim, node) or len(shape) != 4:
        return None
    scores, sinks = parts
    if sinks.meta["val"].shape != (*shape[:3], 1):
        return None
    while sinks.target in (aten.expand.default, *CASTS):
        sinks = sinks.args[0]
    if sinks.meta["val"].shape not in ((1, shape[1], 1, 1), (shape[1], 1, 1)):
        return None
    while sinks.target in VIEWS and sinks.meta["val"].dim() > 1:
        sinks = sinks.args[0]
    found = _scores(scores, node) if sinks.meta["val"].shape == (shape[1],) else None
    return replace(found, sinks=sinks) if found is not None and not found.tanh and found.sinks is None else None


READ: Mapping[Any, Callable[[fx.Node], Scores | None]] = {
    aten.mul.Tensor: _scaled(1),
    aten.mul.Scalar: _scaled(1),
    aten.div.Tensor: _scaled(-1),
    aten.div.Scalar: _scaled(-1),
    aten.tanh.default: _tanh,
    aten.add.Tensor: _added,
    aten.baddbmm.default: _with_bias,
    aten.masked_fill.Scalar: _filled(0, 1, False),
    aten.where.ScalarOther: _filled(1, 0, True),
    aten.where.self: _filled(1, 0, True),
    aten.sub.Tensor: _without_maximum,
    aten.cat.default: _with_sinks,
}


# ---- FlexAttention --------------------------------------------------------------------------------------------------


def written_flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    score_mod: fx.GraphModule,
    block_mask: Sequence[Any],
    scale: float,
    options: Any = None,
    of_scores: Sequence[Tensor] = (),
    of_mask: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, None]:
    """The results of ``flex_attention`` (the logsumexp in base 2, as there), with all scores."""
    k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))

    def scores() -> Tensor:
        products = torch.matmul(q, k.mT)
        products = products if q.dtype is torch.float64 else products.to(torch.float32)
        places = [torch.arange(size, device=q.device) for size in (*q.shape[:3], k.shape[2])]
        seen = _of_all(block_mask[-1], (), places, of_mask)
        return torch.where(seen, _of_all(score_mod, (products * scale,), places, of_scores), -math.inf)

    weights = torch.ops.aten._safe_softmax(scores(), -1).to(v.dtype)
    return torch.matmul(weights, v), scores().logsumexp(-1) / math.log(2), None


def _of_all(
    function: Callable[..., Tensor], scores: tuple[Tensor, ...], places: Sequence[Tensor], more: Sequence[Tensor]
) -> Tensor:
    """An elementwise function of one score and its place, of all.

    Raises:
        Error: it is not elementwise.
    """
    other = [node for node in function.graph.nodes if not _is_elementwise(node)]  # type: ignore[attr-defined]
    if other:
        raise Error(
            "a function of flex_attention is not elementwise",
            where=f"score_mod or mask_mod: {other[0].format_node()}",
            expected="elementwise ops of a score and its place, and tensors whose dims are all indexed by places",
            got=str(other[0].target),
            remedy="write the attention out, as products around a softmax, or compute a tensor to be indexed before it",
        )
    places = [each.view([-1 if d == dim else 1 for d in range(4)]) for dim, each in enumerate(places)]
    return function(*scores, *places, *more)


def _is_elementwise(node: fx.Node) -> bool:
    """Whether an op of one score and its place does the same to tensors of them: of one element each it makes one."""
    if node.op not in ("call_function", "call_method"):
        return node.op in ("placeholder", "output")
    if node.target is operator.getitem:
        x, index = node.args
        places = index if isinstance(index, (tuple, list)) else (index,)
        return isinstance(x, fx.Node) and x.op == "placeholder" and all(isinstance(each, fx.Node) for each in places)
    name = node.target if isinstance(node.target, str) else node.target.__name__.strip("_")
    packet = getattr(aten, {"truediv": "div", "and": "bitwise_and", "or": "bitwise_or"}.get(name, name), None)
    tags = {tag for each in packet.overloads() for tag in getattr(packet, each).tags} if packet is not None else ()
    return name in ("invert", "floordiv", "new_ones", "to", "float", "int", "long") or torch.Tag.pointwise in tags
