"""Ops that raise where their operands are not what they should be: ``torch.linalg.inv`` of a singular matrix.

    with_effects(token, aten._linalg_check_errors, info, "linalg.inv")     ->  a guard: info is 0 everywhere

What one device would raise, a program says after its run, before results are handed out and buffers are stored.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch._functorch._aot_autograd.descriptors import BackwardTokenAOTInput, ForwardTokenAOTInput

from shardfx.ir.builder import GraphBuilder
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Guard, InputKind, Output, OutputKind, Phase

aten = torch.ops.aten
TOKENS = (ForwardTokenAOTInput, BackwardTokenAOTInput)


def is_token(node: torch.fx.Node) -> bool:
    """Whether a node of a traced graph says only what comes before what: it has no number."""
    if node.op == "placeholder":
        return isinstance(node.meta["desc"], TOKENS)
    if node.target is operator.getitem:
        return is_effect(node.args[0]) and operator.index(node.args[1]) == 0  # type: ignore[arg-type]
    return False


def is_effect(node: Any) -> bool:
    """Whether a node is a call for its effect."""
    return isinstance(node, torch.fx.Node) and node.target is torch.ops.higher_order.with_effects


def convert_effect(builder: GraphBuilder, node: torch.fx.Node) -> None:
    """Write a call for its effect as a guard.

    Raises:
        Error: its effect is not known.
    """
    _, op, info, *rest = node.args
    if op is not aten._linalg_check_errors.default:
        raise Error(
            f"{op} is called for an effect that no program has",
            where=str(builder.where),
            expected="ops that give tensors, and the checks of torch.linalg",
            got=str(op),
            remedy="leave it out of the model and of its loss",
        )
    assert isinstance(info, torch.fx.Node)
    wrong = builder.add(aten.any.default, (builder.add(aten.ne.Scalar, (builder.env[info], 0)),))
    number = sum(output.kind is OutputKind.GUARD for output in builder.graph.outputs)
    guard = Guard(False, builder.where, builder.phase is Phase.BACKWARD, op=str(rest[0]))
    builder.graph.outputs.append(Output(OutputKind.GUARD, f"checks.{number}", wrong, guard=guard))


def of_targets(graph: Graph) -> None:
    """Say of each check whether it stands in the loss: it then asks of what depends on a target."""
    known = {given.value for given in graph.inputs if given.kind is InputKind.TARGET}
    for node in graph.nodes:
        if not known.isdisjoint(node.operands):
            known.update(node.outs)
    for output in graph.outputs:
        if output.guard is not None and output.guard.op and output.value in known:
            output.guard = output.guard.in_loss()
