"""Scaled dot-product attention: batch, heads and query rows may be sharded; query heads may share key heads in groups.

q[b (h r) s e!], k[b h t! e!], v[b h t! v!], mask, sinks[h r], bias[(h r) d!] -> out[b (h r) s v!], logsumexp[b (h r) s]

With a window, a rank's keys are those that its rows see, and their gradients come from the queries that see them:

q[b (h r) s e!], k[b h t~s e!], v[b h t~s v!] -> out[b (h r) s v!], logsumexp[b (h r) s]
grad, out[b (h r) u~s v], q[b (h r) u~s e!], k, v, logsumexp -> q[b (h r) s e], k[b h s e], v[b h s v]
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.context.window_tiles import reach
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import Template, has_argument, template
from shardfx.ir.rules.windows import seeing

aten = torch.ops.aten


def forward(node: Node) -> Template | ShardingRule:
    """The forward: keys are replicated, or those that the rows see; queries may be sharded."""
    form, seen = template(_words(node, "Q, b h t! e!, b h t! v!, M, , I, S, R -> O, L"), "2>0"), windows_of(node)
    return form if seen is None else seeing(form(node), {"t": ("s", seen[0])})


def backward(node: Node) -> Template | ShardingRule:
    """The backward: linear in the gradient, and in values and result together; the gradients of keys and values (of a
    broadcast mask, of sinks and a relative bias) are sums over queries, in a window over those that see the keys."""
    seen, linear = windows_of(node), "0|3&4>0&1&3&4&5"
    form = "O, Q, b h t!causal e!, b h t v!, O, L, M, , I, S, R -> Q, b h t e, b h t v, M, S, R"
    operands, results = _words(node, form).split("->")
    if seen is None:
        return template(f"{operands}->{results}", linear, unread="t>4")
    rows = operands.replace(") s", ") u!").replace("b s", "b u!")
    made = template(f"{rows}->{results.replace('h t', 'h s')}", linear)
    return seeing(made(node), {"t": ("s", seen[0]), "u": ("s", seen[1])})


def windows_of(node: Node) -> tuple[Window, Window] | None:
    """The keys that a row sees, and the rows that see a key, where a halo of them is less than all."""
    if not argument(node, "window") or argument(node, "mask") is not None:
        return None
    left, right = reach(argument(node, "causal"), argument(node, "window"))
    s, t = (argument(node, name).shape[2] for name in ("q", "k"))
    if s != t or 2 * (left + right) > s or min(left, right) < 0:
        return None
    return Window(s, 1, 1, -left, right), Window(s, 1, 1, -right, left)


def _words(node: Node, form: str) -> str:
    """The words of a template; torch's own op has no seed and no box. Dropout draws a box, which query heads in groups
    are not."""
    heads, own = "(h r)" if draw_slot(node) is None else "(h r!)", "" if has_argument(node.op, "box") else "!is_causal"
    tensors = {"Q": f"b {heads} s{own} e!", "O": f"b {heads} s v!", "L": f"b {heads} s", "M": f"~b {heads} s t"}
    tensors |= {"I": "b s, b t", "S": heads, "R": f"{heads} d!"}
    for letter, dims in tensors.items():
        form = form.replace(letter, dims)
    if not has_argument(node.op, "seed"):
        form = form.replace(f", , b s, b t, {heads}, {heads} d! ->", " ->").replace("!causal", "!is_causal")
    if argument(node, "window") or argument(node, "relative_bias") is not None:
        form = form.replace("!causal", "!")
    return form


def attention_local(emit: Emit) -> Any:
    """Attention by where this rank's queries and keys stand: causal masks, windows, and what dropout draws. In the
    backward of a window gradients are of the rank's own rows, among those that it has."""
    slot, args, named = draw_slot(emit.node), list(emit.args), dict(emit.kwargs)
    q, k = (emit.node.operands.index(argument(emit.node, name)) for name in ("q", "k"))
    by_place = argument(emit.node, "causal") or argument(emit.node, "window")
    by_place = by_place or argument(emit.node, "relative_bias") is not None
    if emit.node.op is attention_backward and windows_of(emit.node) and not emit.result_shard(0, 2).is_full:
        named["rows"] = [*emit.result_bounds(0, 2)]
    if slot is not None or (by_place and not all(emit.operand_shard(each, 2).is_full for each in (q, k))):
        shards = [*(emit.operand_shard(q, dim) for dim in range(3)), emit.operand_shard(k, 2)]
        plain = all(len(each.ranges) == 1 for each in shards)
        of_each = [[each.first] if plain else [len(each.ranges), *each.numbers] for each in shards]
        box = [number for numbers in of_each for number in numbers]
        if slot is None:
            return emit.call(emit.node.op, *args, **named, box=box)
        args[slot + 1 :] = [box]
    return emit.call(emit.node.op, *args, **named)


RULES: tuple[RuleEntry, ...] = (
    rule(attention, forward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(attention_backward, backward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu.default, forward, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, backward, contiguous=Contiguous.LAST_DIM),
)
