"""Masks and repeated heads of attention calls as arguments of the call, before the backward is written.

    aten.scaled_dot_product_attention(q, k, v, mask)              mask[.., i, j] is j <= i
    aten.scaled_dot_product_attention(q, k, v, None, 0.0, True)

    aten.scaled_dot_product_attention(q, k, v, mask)              mask[.., i, j] is i - w < j <= i
    shardfx.attention(q, k, v, None, True, window=[w - 1, 0])     in order: ..., scale, p, None, 0, [], window

    aten.scaled_dot_product_attention(q, k, v, mask)              ... and docs[b, i] == docs[b, j] and kept[b, j]
    shardfx.attention(..., q_ids=2 * docs, k_ids=2 * docs + ~kept)

    aten.scaled_dot_product_attention(q, repeat_kv(k), repeat_kv(v), ...)
    aten.scaled_dot_product_attention(q, k, v, ..., enable_gqa=True)

    matmul(softmax(tanh(matmul(q, k.mT) / c) * c + mask), v)              see :mod:`.written_attention`
    shardfx.attention(q, k, v, ..., softcap=c)

Without a dense mask, and with key heads as few as they are, torch's fastest kernels take the call.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node
from shardfx.ir.graph import Value as GraphValue
from shardfx.ir.ops.context.attention_steps import step_pairs
from shardfx.ir.ops.context.window_tiles import seen_pairs
from shardfx.ir.ops.fused_attention import NAMED, attention
from shardfx.ir.ops.traits import base_name, positional, with_defaults
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.text.printer import size_text

from .mask_reader import (
    Affine,
    Choice,
    Condition,
    MaskReader,
    SameToken,
    Token,
    behind,
    mapped,
    simplified,
    true_where,
    write,
    write_nothing,
)
from .relative_bias import RelativeBiases
from .written_attention import (
    CASTS,
    COPIES,
    MOVES,
    VIEWS,
    Dims,
    Hidden,
    Scores,
    number_of,
    split_heads,
    written_attentions,
)

aten = torch.ops.aten
ATTENTION = aten.scaled_dot_product_attention.default
OUR_NAMES = {
    "query": "q",
    "key": "k",
    "value": "v",
    "attn_mask": "mask",
    "is_causal": "causal",
    "dropout_p": "p",
    "grad_out": "grad",
}
"""Names of torch's arguments in our op of attention."""


def by_our_names(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of an attention op, by their names in ours."""
    return {OUR_NAMES.get(name, name): arg for name, arg in with_defaults(op, args, kwargs).items()}


def in_order(op: Any, bound: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of one of our attention ops by position, and some by name."""
    named = {name: bound[name] for name in NAMED if bound.get(name) not in (None, [], 0.0)}
    return positional(op, {name: arg for name, arg in bound.items() if name not in named}), named


def wanted_gradients(bound: Mapping[str, Any], forward: Mapping[str, Any], types: Sequence[Any]) -> list[Any]:
    """The types of the gradients of attention: of the mask and the relative bias if asked for, of sinks if there are
    any; None for the others."""
    biases = (forward[name] for name in ("mask", "relative_bias"))
    of_mask, of_bias = (
        bound.get("of_mask") and bias is not None and bias.type.dtype.is_floating_point for bias in biases
    )
    wanted = of_mask, forward["sinks"] is not None, of_bias
    return [*types[:3], *(type if each else None for type, each in zip(types[3:] or [None] * 3, wanted, strict=True))]


def count_of_seen(op: Any, count: Callable[..., Any]) -> Callable[..., Any]:
    """The part of a count that a causal mask or a window leaves of all pairs of queries and keys; of some rows of
    queries, of which nobody says which, as many as of those in the middle: the mean."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        bound = by_our_names(op, args, kwargs)
        every, shape = count(*args, **kwargs), (*bound["q"].shape[:3], bound["k"].shape[2])
        causal, window, (rows, keys) = bound["causal"], bound.get("window", ()), shape[2:]
        if not (causal or window) or not rows * keys:
            return every
        box = bound.get("box") or [0, 0, max(keys - rows, 0) // 2, 0]
        return every * seen_pairs(shape, causal, window, box, bound.get("rows", ())) // (rows * keys)

    return counted


def count_of_step(op: Any) -> Callable[..., Any]:
    """The FLOPs of a step of ring attention, of the pairs that it sees: two products forward, five backward."""

    def counted(*args: Any, **kwargs: Any) -> Any:
        bound = with_defaults(op, args, kwargs)
        (batch, heads, *_, width), last = bound["q"].shape, bound["v"].shape[-1]
        pairs = step_pairs(bound["q"], bound["causal"], bound["window"], bound["shift"], bound["place"])
        products = 3 * width + 2 * last if "grad" in bound else width + last
        return 2 * batch * heads * pairs * products

    return counted


OF_RESULTS = (
    aten._assert_tensor_metadata.default,
    aten.max.dim,
    aten.amax.default,
    aten.detach.default,
    operator.getitem,
)
HIDES, LOW = ("where", "masked_fill"), -1e4
HIDERS = {
    aten.masked_fill.Scalar: ((1, 0, 2, False),),
    aten.where.ScalarOther: ((0, 1, 2, True),),
    aten.where.self: ((0, 1, 2, True), (0, 2, 1, False)),
}
"""Where a mask in which keys are hidden has the condition, the mask, the number, and whether it hides where not."""
SPREADS = (*CASTS, *COPIES, *VIEWS, *MOVES, aten.slice.Tensor)
Masks = tuple[fx.Node | Hidden, ...]


def note_dense_masks(graph: Graph, strict: bool) -> None:
    """Note what masks of queries times keys cost that are not read, where they are larger than the queries.

    Raises:
        Error: with ``strict``, there is one, and it is not only a bias.
    """
    found = dict[GraphValue, list[Node]]()
    for node in graph.nodes:
        mask = argument(node, "mask") if node.op is attention else None
        if mask is not None and min(mask.shape[-2:]) > 1:
            found.setdefault(mask, []).append(node)
    for mask, (first, *others) in found.items():
        calls = f"{first.where.module or 'the model'}{f' and {len(others)} more calls' * bool(others)}"
        text = f"attention of {calls}: a mask {[*mask.shape]} of {size_text(mask.type.nbytes)} that is not read"
        made = base_name(mask.node) if mask.node is not None else ""
        if strict and (mask.type.dtype is torch.bool or made in HIDES):
            expected = "a predicate of positions and ids: causal, a window, documents, padding (docs/long-context.md)"
            remedy = "call F.scaled_dot_product_attention with such a mask; without strict=True it stays dense"
            raise Error(text, where=str(first.where), expected=expected, got=str(mask.type), remedy=remedy)
        if mask.type.numel > first.operands[0].type.numel:
            graph.notes.append(f"{text} as a predicate of positions and ids")


class Seen(NamedTuple):
    """What a query sees: the keys up to its place, and those of a window; all, where it has neither. Of these, those
    with its id (a token for queries, one for keys), and with all flags. ``finite``: one that sees no key has the mean
    of all values, for scores are "filled" by a finite number, or a number is "added" in which they are lost."""

    causal: bool = False
    window: tuple[int, ...] = ()
    ids: tuple[Token, ...] = ()
    flags: tuple[Token, ...] = ()
    finite: str = ""


def simplify_attention(graph: fx.Graph) -> None:
    """Simplify the attention calls of an exported graph, and make calls of attention that is written out."""
    calls = [node for node in graph.nodes if node.target is ATTENTION]
    split_heads(graph)
    written = [*written_attentions(graph)]
    if not calls and not written:
        return
    write_nothing(graph)
    biases, made = RelativeBiases(MaskReader(graph)), dict[Any, dict[str, Any]]()
    for node in calls:
        bound = with_defaults(ATTENTION, node.args, node.kwargs)
        if isinstance(bound["attn_mask"], fx.Node) and not bound["is_causal"]:
            bound |= _masked(biases, (bound["attn_mask"],), bound, made)[0]
        _write(node, bound)
    for each in written:
        _write_out(*each, biases, made)


def _write_out(scores: Scores, v: Dims, result: Dims, biases: RelativeBiases, made: dict[Any, dict[str, Any]]) -> None:
    """Make a call of attention that is written out, unless no call computes it: finite numbers of a
    dense mask say that a query which sees no key has the mean of all, and no logsumexp can say that."""
    out, order = result
    batch, width = order.replace("s", "").replace("e", ""), scores.q[0].meta["val"].shape[scores.q[1].index("e")]
    call = partial(write, out, out)
    query, key, value = (
        _in_order(call, *of) for of in ((scores.q, f"{batch}se"), (scores.k, f"{batch}te"), (v, f"{batch}te"))
    )
    bound = with_defaults(ATTENTION, (query, key, value), {})
    bound["scale"] = None if math.isclose(scores.scale, width**-0.5, rel_tol=1e-15) else scores.scale
    bound |= {"softcap": 1.0 if scores.tanh else scores.softcap, "sinks": scores.sinks}
    if scores.masks:
        found, dense = _masked(biases, scores.masks, bound, made)
        if scores.sinks is None and _hides(dense):
            return
        bound |= found
    if (bound["softcap"] or scores.sinks is not None) and not _is_plain(bound):
        return
    shape = [out.meta["val"].shape[order.index(dim)] for dim in f"{batch}se"]
    with out.graph.inserting_before(out):
        attends = out.graph.call_function(ATTENTION, (query, key, value))
    attends.meta = {**out.meta, "val": out.meta["val"].new_empty(shape)}
    out.replace_all_uses_with(_in_order(call, (attends, f"{batch}se"), order))
    _write(attends, bound)
    _erase([out, *scores.nodes])


def _in_order(call: Callable[..., fx.Node], tensor: Dims, order: str) -> fx.Node:
    """A tensor with its dims in an order; what moves them before is left out."""
    node: Any
    node, dims = tensor
    while dims != order and node.target in (*COPIES, *MOVES):
        if node.target is aten.permute.default:
            moved = [dim % len(dims) for dim in node.args[1]]
            dims = "".join(dims[moved.index(dim)] for dim in range(len(dims)))
        elif node.target in MOVES:
            a, b = (dims[dim] for dim in node.args[1:] or (-2, -1))
            dims = dims.translate(str.maketrans(a + b, b + a))
        node = node.args[0]
    return node if dims == order else call(aten.permute.default, node, [dims.index(each) for each in order])


def _erase(nodes: Sequence[fx.Node]) -> None:
    """Erase what is no longer needed of nodes in reverse order, with the assertions and the maxima of their results."""
    for node in nodes:
        for user in [*node.users]:
            if user.target in OF_RESULTS:
                _erase([user])
        if not node.users:
            node.graph.erase_node(node)


def _hides(masks: Masks) -> bool:
    """Whether masks may hide keys by finite numbers."""
    todo, known = [_node_of(each) for each in masks], set[fx.Node]()
    while todo:
        node = todo.pop()
        known.add(node)
        if any(isinstance(each, (int, float)) and -math.inf < each <= LOW for each in node.args):
            return True
        if node.target in SPREADS or torch.Tag.pointwise in getattr(node.target, "tags", ()):
            todo += [each for each in node.all_input_nodes if each not in known]
    return any(isinstance(each, Hidden) and each.number > -math.inf for each in masks)


# ---- masks ----------------------------------------------------------------------------------------------------------


def _node_of(mask: fx.Node | Hidden) -> fx.Node:
    return mask.condition if isinstance(mask, Hidden) else mask


def _masked(
    biases: RelativeBiases, masks: Masks, bound: Mapping[str, Any], made: dict[Any, dict[str, Any]]
) -> tuple[dict[str, Any], Masks]:
    """The arguments that masks are, and those of the masks that are not read, which make one dense mask."""
    reader, terms = biases.reader, tuple(term for each in masks for term in _terms(biases.reader, each))
    known = {each: found for each in terms if (found := _conditions(reader, each)) is not None}
    seen, dense = None, terms
    if known:
        shape = torch.broadcast_shapes(*(_node_of(each).meta["val"].shape for each in known))
        conditions = true_where(simplified(Choice(frozenset[Condition]().union(*known.values())), shape))
        finite = [each for each in known if bound.get("sinks") is None and _is_finite(reader, each)]
        hides = "?" if bound["attn_mask"] is not None else _finite(finite, terms, len(masks))
        seen = _seen(reader, conditions, hides if finite else "", shape, bound)
    if seen is not None:
        dense = tuple(each for each in terms if each not in known)
    as_ids = bool(dense)
    bias = _bias(biases, dense, bound)
    dense = tuple(each for each in dense if bias is None or each is not bias[0]) if bias or seen is not None else masks
    key, (rows, keys) = (masks, seen, bound["query"].meta["val"].shape), _lengths(bound)
    if key not in made:
        last = next(node for node in reversed(reader.graph.nodes) if node in map(_node_of, masks))
        made[key] = {"attn_mask": _dense(dense, bound["query"].meta["val"], last)}
        if bias is not None:
            made[key]["relative_bias"] = bias[1]
        if seen is not None:
            made[key] |= _tensors_of(last, seen, rows, keys, as_ids)
            made[key] |= {seen.finite: _alone(last, seen, rows, keys)} if seen.finite else {}
    how = {} if seen is None else {"is_causal": seen.causal, "window": [*seen.window]}
    return {**how, **made[key]}, dense


def _terms(reader: MaskReader, mask: fx.Node | Hidden) -> Masks:
    """The masks of which one is made: of which it is the sum, or which it hides keys of."""
    if isinstance(mask, Hidden) or reader.values.get(mask) is not None or not mask.meta["val"].is_floating_point():
        return (mask,)
    if mask.target in COPIES:
        return _terms(reader, mask.args[0])  # type: ignore[arg-type]
    if mask.target is aten.add.Tensor and not mask.kwargs and all(isinstance(each, fx.Node) for each in mask.args):
        return tuple(term for each in mask.args for term in _terms(reader, each))  # type: ignore[arg-type]
    args: Any = mask.args
    for condition, rest, number, unless in HIDERS.get(mask.target, ()):  # type: ignore[call-overload]
        fill, of = number_of(args[number]), args[rest]
        if fill is not None and fill <= torch.finfo(mask.meta["val"].dtype).min and isinstance(of, fx.Node):
            return *_terms(reader, of), Hidden(args[condition], fill, unless, True)
    return (mask,)


def _bias(biases: RelativeBiases, masks: Masks, bound: Mapping[str, Any]) -> tuple[fx.Node, fx.Node] | None:
    """The mask that is a relative bias, and its numbers; None, where there is none that our op takes."""
    (rows, keys), query = _lengths(bound), bound["query"].meta["val"]
    for each in masks if rows == keys and _is_plain(bound) else ():
        if not isinstance(each, Hidden) and each.meta["val"].is_floating_point() and not _hides((each,)):
            found = biases.of(each, query.shape[1], rows, query.dtype)
            if found is not None:
                return each, found
    return None


def _dense(masks: Masks, query: torch.Tensor, last: fx.Node) -> fx.Node | None:
    """One mask of those that are added, and of those by which scores are filled."""
    call, total = partial(write, last, behind(last)), None
    for each in masks:
        node = _node_of(each)
        if isinstance(each, Hidden):
            if each.number == -math.inf and len(masks) == 1:
                return node if each.unless else call(aten.logical_not.default, node)
            hidden = call(aten.logical_not.default, node) if each.unless else node
            zeros = call(aten.new_zeros.default, node, [*node.meta["val"].shape], dtype=query.dtype)
            node = call(aten.masked_fill.Scalar, zeros, hidden, each.number)
        elif len(masks) > 1 and node.meta["val"].dtype is not query.dtype:
            node = call(aten._to_copy.default, node, dtype=query.dtype)
        total = node if total is None else call(aten.add.Tensor, total, node)
    while total is not None and query.dim() == 4 and total.meta["val"].dim() not in (2, 4):
        total = call(aten.unsqueeze.default, total, 0)
    return total


def _conditions(reader: MaskReader, mask: fx.Node | Hidden) -> frozenset[Condition] | None:
    """The conditions under which a query sees a key, by one mask; None, if it is not read."""
    node = _node_of(mask)
    value, given = reader.values.get(node), node.meta["val"]
    if value is not None and isinstance(mask, Hidden) and not mask.unless:
        value = mapped(value, operator.not_)
    elif value is not None and given.dtype is not torch.bool:
        value = mapped(value, partial(_is_seen, torch.finfo(given.dtype).min))
    return true_where(value)


def _is_finite(reader: MaskReader, mask: fx.Node | Hidden) -> bool:
    """Whether keys are hidden by finite numbers."""
    if isinstance(mask, Hidden):
        return mask.number > -math.inf
    value = reader.values.get(mask)
    return isinstance(value, Choice) and -math.inf < min(value.seen, value.unseen) < 0


def _finite(finite: Sequence[fx.Node | Hidden], terms: Masks, masks: int) -> str:
    """What a query that sees no key gets where keys are hidden by finite numbers (:class:`Seen`); "?", if that is
    neither: where masks are added behind the numbers, or where these are too small to lose all of a score. In calls of
    attention a kernel decides."""
    last = terms[-1]
    if [*finite] != [last]:
        return "?"
    if isinstance(last, Hidden) and not last.is_added:
        return "filled"
    lost = isinstance(last, Hidden) or (len(terms) == 1 and last.meta["val"].dtype is not torch.float16)
    return "added" if lost and masks == 1 else "?"


def _seen(
    reader: MaskReader, found: frozenset[Condition] | None, finite: str, given: Sequence[int], bound: Mapping[str, Any]
) -> Seen | None:
    """What queries see by a mask of a shape; None: something that only the mask says, or it is one of keys alone.
    ``finite``: how keys are hidden by finite numbers."""
    conditions = None if found is None else reader.in_order(found)
    sides = None if conditions is None else _sides(each for each in conditions if isinstance(each, Affine))
    if conditions is None or sides is None:
        return None
    left, right = sides
    rows, keys = _lengths(bound)
    window = rows - 1 if left is None else left, keys - 1 if right is None else right
    seen = Seen(right == 0, () if left is None and right in (None, 0) else window)
    of_data = [each for each in conditions if not isinstance(each, Affine)]
    if of_data:
        per_query, per_key = (
            partial(_is_per_token, shape=(bound["query"].meta["val"].shape[0], size), dim=dim, dims=len(given))
            for size, dim in ((rows, -2), (keys, -1))
        )
        pairs = [each for each in of_data if isinstance(each, SameToken)]
        flags = tuple(each for each in of_data if isinstance(each, Token))
        if len(pairs) + len(flags) < len(of_data):
            return None
        ids = next(((a, b) for each in pairs for a, b in ((each.a, each.b), (each.b, each.a)) if per_query(a)), ())
        if len(pairs) > 1 or not all(map(per_key, (*flags, *ids[1:]))) or len(ids) < 2 * len(pairs):
            return None
        seen = seen._replace(ids=ids, flags=flags)
    itself = not seen.flags and (not seen.ids or (rows == keys and _moved_to_keys(seen.ids[0]) == seen.ids[1]))
    if finite and not (itself and min(window) >= 0 and rows <= keys + window[0]):
        if finite == "?" or seen.ids or not _is_plain(bound):
            return None
        seen = seen._replace(finite=finite)
    if seen.flags and seen[:3] == Seen()[:3]:
        return seen if len(given) > 1 and given[-2] > 1 and _is_plain(bound) else None
    return seen if seen == Seen(seen.causal) or (sum(window) >= 0 and _is_plain(bound)) else None


def _moved_to_keys(token: Token) -> Token:
    """The token of a query, at the place of a key."""
    return token.moved(lambda at: Affine(at.start, (*at.steps[:-2], 0, at.steps[-2])))


def _lengths(bound: Mapping[str, Any]) -> list[int]:
    """The numbers of queries and of keys of a call."""
    return [bound[name].meta["val"].shape[-2] for name in ("query", "key")]


def _is_per_token(token: Token, shape: Sequence[int], dim: int, dims: int) -> bool:
    """Whether a token is that of dim ``dim`` of a mask of so many dims, in a tensor ``[b, t]`` or ``[t]``."""
    along = [tuple(int(d == at % dims) for d in range(dims)) for at in (0, dim)]
    sizes = token.source.meta["val"].shape
    found = [(size, each.start, each.steps) for size, each in zip(sizes, token.index, strict=True) if size != 1]
    expected = [(size, 0, steps) for size, steps in zip(shape, along, strict=True)]
    return found == expected[1:] or (dims == 4 and found == expected)


def _tensors_of(mask: fx.Node, seen: Seen, rows: int, keys: int, as_ids: bool) -> dict[str, Any]:
    """The tensors of tokens by which queries see keys, written behind the mask: a mask ``[b, 1, 1, t]`` of keys alone,
    or (if asked for) ids of queries and of keys, which are odd where a flag is not set."""

    if not seen.flags and not seen.ids:
        return {}
    call = partial(write, mask, behind(mask))
    seen_by_all = _flags(call, seen, keys)
    if seen_by_all is not None and seen[:3] == Seen()[:3] and not as_ids:
        return {"attn_mask": call(aten.unsqueeze.default, call(aten.unsqueeze.default, seen_by_all, 1), 1)}
    ids = [_of_tokens(call, *each) for each in zip(seen.ids, (rows, keys), strict=False)]
    ids = [call(aten._to_copy.default, each, dtype=torch.int64) for each in ids]
    if seen_by_all is not None:
        ids = [call(aten.mul.Scalar, each, 2) for each in ids]
        hidden = call(aten._to_copy.default, call(aten.logical_not.default, seen_by_all), dtype=torch.int64)
        zeros = ids or [call(aten.new_zeros.default, hidden, [1, rows])]
        ids = [zeros[0], call(aten.add.Tensor, ids[1], hidden) if ids else hidden]
    return {"q_ids": ids[0], "k_ids": ids[1]}


def _of_tokens(call: Callable[..., fx.Node], token: Token, size: int) -> fx.Node:
    """The tensor ``[.. size]`` of tokens."""
    return call(aten.reshape.default, token.source, [token.source.meta["val"].numel() // size, size])


def _flags(call: Callable[..., fx.Node], seen: Seen, keys: int) -> fx.Node | None:
    """Whether a key ``[b t]`` has all flags."""
    flags = [_of_tokens(call, each, keys) for each in sorted(seen.flags, key=lambda each: each.source.name)]
    return reduce(partial(call, aten.logical_and.default), flags) if flags else None


def _alone(mask: fx.Node, seen: Seen, rows: int, keys: int) -> fx.Node:
    """Whether a query ``[b s]`` sees no key, counted by a sum over the keys before its last one."""
    call = partial(write, mask, behind(mask))
    known = _flags(call, seen, keys) or call(aten.new_ones.default, mask, [1, keys], dtype=torch.bool)
    count = call(aten.cumsum.default, call(aten._to_copy.default, known, dtype=torch.int64), 1)
    count = call(aten.constant_pad_nd.default, count, [1, 0])
    left, right = seen.window or (rows, 0 if seen.causal else keys)
    of_ends = []
    for first in (min(right, 0 if seen.causal else right) + 1, -left):
        ends = call(aten.arange.start, first, first + rows, device=mask.meta["val"].device)
        of_ends.append(call(aten.index_select.default, count, 1, call(aten.clamp.default, ends, 0, keys)))
    return call(aten.eq.Tensor, *of_ends)


def _sides(conditions: Iterable[Affine]) -> tuple[int | None, int | None] | None:
    """How many keys before and behind its place a query sees, None: all; None, where that is not what they say."""
    found: dict[tuple[int, ...], int | None] = {(1, -1): None, (-1, 1): None}
    for each in conditions:
        before = found.get(each.steps[-2:], ())
        if before == () or any(each.steps[:-2]):
            return None
        found[each.steps[-2:]] = -each.start if before is None else min(before, -each.start)
    return found[1, -1], found[-1, 1]


def _is_plain(bound: Mapping[str, Any]) -> bool:
    """Whether our op takes the tensors of a call as they are: of four dims, with heads in groups."""
    q, k, v = (bound[name].meta["val"].shape for name in ("query", "key", "value"))
    same = len(q) == len(k) == len(v) == 4 and q[0] == k[0] == v[0] and k[1] == v[1]
    return same and k[1] in (1, q[1] if not bound["enable_gqa"] else k[1])


def _write(node: fx.Node, bound: dict[str, Any]) -> None:
    """Write a call: as our op, where only that has an argument which it needs. Its operands are of the dtype of its
    result, to which ``torch.autocast`` casts them."""
    if not bound["enable_gqa"]:
        bound |= _grouped(bound)
    dtype = node.meta["val"].dtype
    for name in ("query", "key", "value", "attn_mask", "relative_bias"):
        given = bound.get(name)
        if given is not None and given.meta["val"].is_floating_point() and given.meta["val"].dtype is not dtype:
            bound[name] = write(node, node, aten._to_copy.default, given, dtype=dtype)
    for how in ("filled", "added"):
        if (alone := bound.pop(how, None)) is not None:
            _add_mean(node, bound, alone, how)
    if not any(bound.get(name) not in (None, [], 0.0) for name in NAMED):
        tensors = tuple(bound[name] for name in ("query", "key", "value"))
        node.args = (*tensors, bound["attn_mask"], bound["dropout_p"], bound["is_causal"])
        node.kwargs = {"scale": bound["scale"], "enable_gqa": bound["enable_gqa"]}
        return
    node.replace_all_uses_with(_called(node, bound))
    node.graph.erase_node(node)


def _called(node: fx.Node, bound: Mapping[str, Any]) -> fx.Node:
    """The result of our op, before a node of such a result."""
    given, named = in_order(attention, by_our_names(ATTENTION, (), bound))
    made = node.meta["val"]
    with node.graph.inserting_before(node):
        call = node.graph.call_function(attention, given, named)
        out = node.graph.call_function(operator.getitem, (call, 0))
    call.meta, out.meta = {**node.meta, "val": (made, made.new_empty(made.shape[:3]))}, node.meta
    return out


def _add_mean(node: fx.Node, bound: Mapping[str, Any], alone: fx.Node, how: str) -> None:
    """Add the mean of all values to the zeros of queries ``alone`` that see no key.

    Of scores that are filled these are values alone. Where a number is added to them, they have no part in the value
    of the softmax, but in its gradient: this is flat attention.
    """
    call, value = partial(write, node, node), bound["value"]
    if how == "filled":
        mean = call(aten.mean.dim, value, [2], True)
        times = node.meta["val"].shape[1] // value.meta["val"].shape[1]
        mean = call(aten.repeat_interleave.self_int, mean, times, 1) if times > 1 else mean
        rows = call(aten.unsqueeze.default, call(aten.unsqueeze.default, alone, 1), 3)
        mean = call(aten.where.ScalarOther, rows, mean, 0.0)
    else:
        ids = call(aten._to_copy.default, alone, dtype=torch.int64)
        ones = call(aten.new_ones.default, ids, [1, value.meta["val"].shape[2]])
        flat: dict[str, Any] = {"attn_mask": None, "is_causal": False, "window": [], "relative_bias": None}
        mean = _called(node, {**bound, **flat, "q_ids": ids, "k_ids": ones, "flat": True})
    total = write(node, node.next, aten.add.Tensor, node, mean)
    node.replace_all_uses_with(total, delete_user_cb=lambda user: user is not total)


def _is_seen(lowest: float, added: float) -> bool | None:
    """Whether a key is seen to whose score a number is added; None: in part."""
    return True if added == 0 else False if added <= lowest else None


def _grouped(bound: dict[str, Any]) -> dict[str, Any]:
    """The few heads of keys and values that are repeated for groups of query heads."""
    key, value = (_few_heads(bound[name]) for name in ("key", "value"))
    if key is None or value is None or key[1] != value[1]:
        return {}
    few, many = (each.meta["val"].shape for each in (key[0], bound["query"]))
    if len(few) != 4 or len(many) != 4 or many[1] != few[1] * key[1]:
        return {}
    return {"key": key[0], "value": value[0], "enable_gqa": True}


def _few_heads(node: Any) -> tuple[fx.Node, int] | None:
    """``x [b g t e]`` and ``n``, where a node is ``x`` with each head repeated ``n`` times in a row."""
    node = _beneath(node, aten.clone.default, aten.contiguous.default)
    if node.target is aten.repeat_interleave.self_int and len(node.args) > 2 and node.args[2] in (1, -3):
        return node.args[0], node.args[1]
    if node.target not in (aten.reshape.default, aten.view.default, aten._unsafe_view.default):
        return None
    many = node.meta["val"].shape
    repeated = _beneath(node.args[0], aten.clone.default, aten.contiguous.default)
    if repeated.target is not aten.expand.default:
        return None
    single = repeated.args[0]
    if single.target is not aten.unsqueeze.default or single.args[1] not in (2, -3):
        return None
    (x, _), shape = single.args, repeated.meta["val"].shape
    few = x.meta["val"].shape
    of_groups = (*few[:2], shape[2], *few[2:])
    if len(few) != 4 or tuple(shape) != of_groups or tuple(many) != (few[0], few[1] * shape[2], *few[2:]):
        return None
    return x, shape[2]


def _beneath(node: Any, *ops: Any) -> Any:
    """A node below copies."""
    while node.target in ops:
        node = node.args[0]
    return node
