"""Products with the matrices of experts, and the rows that are sent to them (:mod:`shardfx.ir.ops.experts`).

Experts are looked up by their numbers: where they are sharded, each rank multiplies the rows of its own, and gives
zeros for the rest, as in a lookup of embeddings. Rows that are taken by an index are looked up as well.
"""

from __future__ import annotations

from typing import Any

import torch

from shardfx.ir.graph import Node
from shardfx.ir.ops.experts.dispatch import expert_rows, expert_slots, parts_mm, parts_outer, take_rows
from shardfx.ir.ops.experts.routed_product import routed_mm, routed_outer
from shardfx.ir.rules.book import RuleEntry, rule
from shardfx.ir.rules.local import Emit, mine
from shardfx.ir.rules.template import Template, template

aten = torch.ops.aten
ROWS, ENDS, MATRICES = "(d p) r!", "(d p) g!", "(p g)"


def own_experts(emit: Emit) -> Any:
    """A product with the experts of this rank, by the numbers that they have there."""
    is_mm = emit.node.op is routed_mm
    shard = emit.operand_shard(1, 0) if is_mm else emit.result_shard(0, 0)
    x, y, ids = emit.args[:3]
    return emit.call(emit.node.op, x, y, _own(emit, ids, shard), *([] if is_mm else [shard.length]))


def _own(emit: Emit, index: Any, shard: Any) -> Any:
    """A global index within this rank's shard: -1 for what lies outside."""
    if shard.is_full:
        return index
    local, outside = mine(emit, index, shard)
    return emit.call(aten.masked_fill.Scalar, local, outside, -1)


def taken(node: Node) -> Template:
    """``x[b.. n h], index[b.. m..] -> y[b.. m.. h]``: n is looked up."""
    blocks, dims = (value.type.ndim for value in node.operands)
    b = " ".join(f"b{i}" for i in range(blocks - 2))
    m = " ".join(f"m{i}" for i in range(dims - blocks + 2))
    return template(f"{b} n h, {b} {m} -> {b} {m} h", "0")


def own_rows(emit: Emit) -> Any:
    """The rows of this rank's shard, zeros for the rest."""
    shard = emit.operand_shard(0, emit.node.operands[0].type.ndim - 2)
    return emit.call(take_rows, emit.args[0], _own(emit, emit.args[1], shard))


def own_parts(emit: Emit) -> Any:
    """The sums of products of the parts that this rank has."""
    experts = emit.result_shape(0)[0] // emit.operand_shape(2)[1]
    return emit.call(parts_outer, *emit.args[:3], experts)


RULES: tuple[RuleEntry, ...] = (
    rule(routed_mm, "~n k a, g a m, n k -> n k m", linear="0|1", local=own_experts),
    rule(routed_outer, "~n k a, n k m, n k -> g a m", linear="0|1", local=own_experts),
    rule(expert_slots, "d e t! k! -> d e p! c!, d e t! k!, d e p! g!"),
    rule(expert_rows, f"d e! p g! -> {ROWS}, (d p) m!, {ENDS}"),
    rule(take_rows, taken, local=own_rows),
    rule(parts_mm, f"{ROWS} a, {MATRICES} a m, {ENDS} -> {ROWS} m", linear="0|1"),
    rule(parts_outer, f"{ROWS} a, {ROWS} m, {ENDS} -> {MATRICES} a m", linear="0|1", local=own_parts),
)
