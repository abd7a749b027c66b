"""Scaled dot-product attention: batch, heads and query rows may be sharded; query heads may share key heads in groups.

q[b (h r) s e!], k[b h t! e!], v[b h t! v!], mask -> out[b (h r) s v!], logsumexp[b (h r) s]
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.node import draw_slot
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.template import Template, has_argument, template

aten = torch.ops.aten


def forward(node: Node) -> Template:
    """The forward: keys are replicated; queries may be sharded."""
    return _form(node, "Q, b h t! e!, b h t! v!, M, -> O, L", "2>0")


def backward(node: Node) -> Template:
    """The backward: linear in the gradient, and in values and result together; the gradients of keys and values (and of
    a broadcast mask) are sums over the queries."""
    return _form(node, "O, Q, b h t!causal e!, b h t v!, O, L, M, -> Q, b h t e, b h t v, M", "0|3&4>0&1&3")


def _form(node: Node, form: str, linear: str) -> Template:
    """The template; torch's own op has no seed and no box. Dropout draws a box, which query heads in groups are not."""
    heads, own = "(h r)" if draw_slot(node) is None else "(h r!)", "" if has_argument(node.op, "box") else "!is_causal"
    tensors = {"Q": f"b {heads} s{own} e!", "O": f"b {heads} s v!", "L": f"b {heads} s", "M": f"~b {heads} s t"}
    for letter, dims in tensors.items():
        form = form.replace(letter, dims)
    if not has_argument(node.op, "seed"):
        form = form.replace(", ->", " ->").replace("!causal", "!is_causal")
    if argument(node, "window"):
        form = form.replace("!causal", "!")
    return template(form, linear)


def attention_local(emit: Emit) -> Any:
    """Attention by where this rank's queries and keys stand: causal masks, and what dropout draws."""
    slot, args = draw_slot(emit.node), list(emit.args)
    q, k = (emit.node.operands.index(argument(emit.node, name)) for name in ("q", "k"))
    by_place = argument(emit.node, "causal") or argument(emit.node, "window")
    if slot is not None or (by_place and not emit.operand_shard(q, 2).is_full):
        shards = [*(emit.operand_shard(q, dim) for dim in range(3)), emit.operand_shard(k, 2)]
        plain = all(len(each.ranges) == 1 for each in shards)
        of_each = [[each.first] if plain else [len(each.ranges), *each.numbers] for each in shards]
        box = [number for numbers in of_each for number in numbers]
        if slot is None:
            return emit.call(emit.node.op, *args, **emit.kwargs, box=box)
        args[slot + 1 :] = [box]
    return emit.call(emit.node.op, *args, **emit.kwargs)


RULES: tuple[RuleEntry, ...] = (
    rule(attention, forward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(attention_backward, backward, local=attention_local, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu.default, forward, contiguous=Contiguous.LAST_DIM),
    rule(aten._scaled_dot_product_flash_attention_for_cpu_backward.default, backward, contiguous=Contiguous.LAST_DIM),
)
