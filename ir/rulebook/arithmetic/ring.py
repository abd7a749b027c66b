"""The steps of ring attention: blocks ``p`` of queries and keys are sharded, those of keys seen from ``shift`` away.

q[b (h r) m! p n! e!], k[b h u! k~p t! e!], v[b h u! k~p t! v!] -> out[b (h r) m! p n! v!], logsumexp[b (h r) m! p n!]
"""

from __future__ import annotations

from typing import Any

from shardfx.ir.dim_sharding import Window
from shardfx.ir.graph import Node
from shardfx.ir.ops.context.attention_steps import attention_step, attention_step_backward, rotate
from shardfx.ir.rulebook.dims import argument, at_dim
from shardfx.ir.rules.book import Contiguous, RuleEntry, rule
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.template import template
from shardfx.ir.rules.windows import seeing

QUERIES, KEYS, VALUES = "b (h r) m! p n! e!", "b h u! k! t! e!", "b h u! k! t! v!"
OUT, ROWS = "b (h r) m! p n! v!", "b (h r) m! p n!"
IDS, SINKS, BIAS = "b m! p n!, b u! k! t!", "(h r)", "(h r) d!"


def _step(node: Node, form: str, linear: str) -> ShardingRule:
    blocks, shift = argument(node, "q").shape[3], argument(node, "shift")
    if shift % max(blocks, 1) == 0:
        return template(form.replace("k!", "p"), linear)(node)
    return seeing(template(form, linear)(node), {"k": ("p", Window(blocks, 1, 1, -shift, -shift, wraps=True))})


def forward(node: Node) -> ShardingRule:
    """A step is linear in values and the result so far together."""
    linear = "2>0" if argument(node, "out") is None else "2&9>0"
    operands = f"{QUERIES}, {KEYS}, {VALUES}, , , {IDS}, {SINKS}, {BIAS}, {OUT}, {ROWS}"
    return _step(node, f"{operands} -> {OUT}, {ROWS}", linear)


def backward(node: Node) -> ShardingRule:
    """The gradients of keys stand where the queries are that see them."""
    of_keys = f"{KEYS}, {VALUES}".replace("k!", "p")
    operands = f"{OUT}, {QUERIES}, {KEYS}, {VALUES}, {OUT}, {ROWS}, , , {IDS}, {SINKS}, {BIAS}"
    return _step(node, f"{operands} -> {QUERIES}, {of_keys}, {SINKS}, {BIAS}", "0|3&4>0&1&3&4")


def step_local(emit: Emit) -> Any:
    """A step by where this rank's blocks are."""
    q, k = (emit.node.operands.index(argument(emit.node, name)) for name in ("q", "k"))
    own, keys = emit.operand_shard(q, 3), emit.operand_shard(k, 3)
    if own.is_full:
        return emit.call(emit.node.op, *emit.args, **emit.kwargs)
    return emit.call(emit.node.op, *emit.args, **emit.kwargs, place=[own.ranges[0].size, own.first, keys.first])


def rotated(node: Node) -> ShardingRule:
    """A dim of blocks, each of which comes from another place."""
    dim, x = argument(node, "dim"), node.operands[0]
    names = [f"d{i}" for i in range(x.type.ndim)]
    operand = " ".join("k!" if i == dim else name for i, name in enumerate(names))
    made = template(f"{operand} -> {' '.join(names)}", "0", moves_only=True)(node)
    shift = argument(node, "shift")
    return seeing(made, {"k": (f"d{dim}", Window(x.shape[dim], 1, 1, -shift, -shift, wraps=True))})


def rotate_local(emit: Emit) -> Any:
    """The blocks of this rank, of those that it has got."""
    dim = at_dim(emit, emit.node.operands[0])
    got, own = emit.operand_shard(0, dim), emit.result_shard(0, dim)
    if own.is_full:
        return emit.call(rotate, *emit.args)
    return emit.call(rotate, *emit.args, place=[own.ranges[0].size, own.first, own.length, got.first])


RULES: tuple[RuleEntry, ...] = (
    rule(attention_step, forward, local=step_local, contiguous=Contiguous.LAST_DIM),
    rule(attention_step_backward, backward, local=step_local, contiguous=Contiguous.LAST_DIM),
    rule(rotate, rotated, local=rotate_local),
)
