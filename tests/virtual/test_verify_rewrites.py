"""Programs that write the model otherwise are proven by decompositions; what is not the same is refused."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

import shardfx as sx
from shardfx.ir.ops import memory_ops
from tests.captures import captured_once

aten = torch.ops.aten
Call = Callable[..., Any]
"""Writes a call of an op."""


class Block(nn.Module):
    """Attention, and a gated layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (2, 4)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return torch.as_tensor(self.c(F.gelu(self.a(x)) * F.silu(self.b(x))).mean(1))


def planned() -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randn(4, 5, 8), torch.randint(0, 6, (4,))
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.cross_entropy, specs={"args.0": "dp, -, -"})
    with captured_once("around attention"):
        return sx.parallelize(Block(), sx.Mesh(dp=2), hints, virtual=True)


def gelu(call: Call, x: Any, factor: float = math.sqrt(0.5)) -> Any:
    erf = call(aten.erf.default, call(aten.mul.Tensor, x, factor))
    return call(aten.mul.Tensor, call(aten.mul.Tensor, x, 0.5), call(aten.add.Tensor, erf, 1))


def transposed(call: Call, a: Any, b: Any) -> Any:
    """A product of matrices as that of both transposed, the other way round."""
    return call(aten.t.default, call(aten.mm.default, call(aten.t.default, b), call(aten.t.default, a)))


def scaled(call: Call, a: Any, b: Any, back: float = 0.5) -> Any:
    return call(aten.mul.Tensor, call(aten.mm.default, call(aten.mul.Tensor, a, 2.0), b), back)


@pytest.mark.long
@pytest.mark.parametrize("sound", [True, False])
def test_transposes_that_cancel_keep_the_order_in_memory(sound: bool) -> None:
    """What is transposed twice lies as it did; what is transposed once, and only looks the same, does not."""
    pm = planned()
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for module in changed.values():
        join = next(each for each in module.graph.nodes if each.target is memory_ops.join)
        parts: Any = list(join.args[1])
        at = next(i for i, part in enumerate(parts) if part.target is aten.mm.out)
        with module.graph.inserting_before(join):
            transposed_part = module.graph.call_function(aten.t.default, (parts[at],))
            back = (aten.t.default, (transposed_part,)) if sound else (aten.flatten.using_ints, (transposed_part,))
            parts[at] = module.graph.call_function(*back)
        join.args = (join.args[0], parts, join.args[2])
        module.recompile()
    verdict = pm.verify(changed)
    assert bool(verdict) is sound, verdict.why


def test_value_read_before_its_wait_is_refuted() -> None:
    """A copy of it, waited for, is the same by no law."""
    pm = planned()
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for module in changed.values():
        wait = next(each for each in module.graph.nodes if "wait_tensor" in str(each.target))
        with module.graph.inserting_before(wait):
            early = module.graph.call_function(aten.neg.default, (wait.args[0],))
            early = module.graph.call_function(aten.neg.default, (early,))
        wait.replace_all_uses_with(early)
        module.recompile()
    assert not pm.verify(changed)


Rewrite = Callable[..., Any]
"""Of what writes a call, and the arguments of a node."""
REWRITES: Mapping[str, tuple[Any, Rewrite, str]] = {
    "addmm as Python's operators": (
        aten.addmm.default,
        lambda call, c, a, b: call(operator.add, call(operator.matmul, a, b), c),
        "proven",
    ),
    "silu as x * sigmoid(x)": (
        aten.silu.default,
        lambda call, x: call(aten.mul.Tensor, x, call(aten.sigmoid.default, x)),
        "proven",
    ),
    "gelu by erf": (aten.gelu.default, gelu, "proven"),
    "gelu by erf of another factor": (aten.gelu.default, lambda call, x: gelu(call, x, 0.7071), "refuted"),
    "F.gelu by tanh": (aten.gelu.default, lambda call, x: call(F.gelu, x, approximate="tanh"), "refuted"),
    "mm transposed": (aten.mm.default, transposed, "unknown"),
    "mm scaled and not quite back": (aten.mm.default, lambda call, a, b: scaled(call, a, b, 0.5000001), "refuted"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", REWRITES)
def test_rank_program_rewritten_around_attention_is_proven_only_if_equivalent(name: str) -> None:
    op, write, status = REWRITES[name]
    pm = planned()
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for module in changed.values():
        graph, found = module.graph, [node for node in module.graph.nodes if node.target is op]
        assert found
        for node in found:

            def call(of: Any, *args: Any, node: fx.Node = node, graph: fx.Graph = graph, **kwargs: Any) -> fx.Node:
                with graph.inserting_before(node):
                    return graph.call_function(of, args, kwargs)

            node.replace_all_uses_with(write(call, *node.args))
            graph.erase_node(node)
        module.recompile()
    verdict = pm.verify(changed)
    assert verdict.status == status, verdict
    assert status != "unknown" or "agrees on 3 random draws" in verdict.why


c10d = torch.ops._c10d_functional
REDUCE, GATHER, EXCHANGE = c10d.all_reduce.default, c10d.all_gather_into_tensor.default, c10d.all_to_all_single.default
RANKS = 3
WritesNode = Callable[..., fx.Node]


def hand_planned() -> sx.ParallelModule:
    """Three ranks, of which each has a share of the sum."""
    torch.manual_seed(0)
    hints = sx.Hints(args=(torch.randn(4, 6, dtype=torch.float64),), specs={"weight": "-, tp"})
    with captured_once("added by hand"):
        return sx.parallelize(nn.Linear(6, 4, dtype=torch.float64), sx.Mesh(tp=RANKS), hints, virtual=True)


def waited(call: WritesNode, op: Any, *args: Any) -> fx.Node:
    return call(c10d.wait_tensor.default, call(op, *args))


def shares(call: WritesNode, x: fx.Node, group: str) -> fx.Node:
    return waited(call, GATHER, call(aten.unsqueeze.default, x, 0), RANKS, group)


def reduced(call: WritesNode, x: fx.Node, group: str, kind: str = "sum") -> fx.Node:
    return waited(call, REDUCE, x, kind, group)


def rows(call: WritesNode, of: fx.Node, *which: int) -> fx.Node:
    """The sum of some rows."""
    first, *others = (call(aten.select.int, of, 0, i) for i in which)
    for other in others:
        first = call(aten.add.Tensor, first, other)
    return first


def of_each(call: WritesNode, x: fx.Node, group: str) -> fx.Node:
    copies = call(aten.cat.default, [call(aten.unsqueeze.default, x, 0)] * RANKS)
    return waited(call, EXCHANGE, copies, [1] * RANKS, [1] * RANKS, group)


def times(call: WritesNode, x: fx.Node, by: float) -> fx.Node:
    return call(aten.mul.Tensor, x, by)


Written = Callable[[WritesNode, fx.Node, str], fx.Node]
SOUND: dict[str, Written] = {
    "gathered and added": lambda c, x, g: c(aten.sum.dim_IntList, shares(c, x, g), [0]),
    "exchanged and added": lambda c, x, g: c(aten.sum.dim_IntList, of_each(c, x, g), [0]),
    "a mean times as many": lambda c, x, g: times(c, reduced(c, x, g, "avg"), 3.0),
    "the largest of copies": lambda c, x, g: reduced(c, reduced(c, x, g), g, "max"),
}
WRONG: dict[str, Written] = {
    "one for another": lambda c, x, g: rows(c, shares(c, x, g), 0, 1, 1),
    "shares reduced": lambda c, x, g: rows(c, reduced(c, shares(c, x, g), g), 0),
    "along another dim": lambda c, x, g: c(aten.sum.dim_IntList, of_each(c, c(aten.t.default, x), g), [0]),
    "scaled out of range": lambda c, x, g: times(c, reduced(c, times(c, x, 1e-300), g), 1e300),
    "the largest of scaled": lambda c, x, g: times(c, reduced(c, times(c, x, -1.0), g, "max"), -1.0),
    "a mean of means": lambda c, x, g: times(c, reduced(c, reduced(c, x, g, "avg"), g, "avg"), 9.0),
    "copies added": lambda c, x, g: reduced(c, reduced(c, x, g), g),
}


def written(pm: sx.ParallelModule, write: Written, ranks: range = range(RANKS)) -> dict[int, fx.GraphModule]:
    """The modules of some ranks, with the sum written otherwise."""
    changed = {rank: pm.rank_module(rank) for rank in ranks}
    for module in changed.values():
        graph = module.graph
        wait = next(node for node in graph.nodes if node.target is c10d.wait_tensor.default)
        started: Any = wait.args[0]
        with graph.inserting_before(wait):
            made = write(
                lambda op, *args, graph=graph: graph.call_function(op, args), started.args[0], started.args[-1]
            )
        wait.replace_all_uses_with(made)
        graph.erase_node(wait)
        graph.erase_node(started)
        module.recompile()
    return changed


@pytest.mark.parametrize("name", SOUND)
def test_sum_written_otherwise_is_unknown_and_agrees(name: str) -> None:
    pm = hand_planned()
    verdict = pm.verify(written(pm, SOUND[name]))
    assert verdict.status == "unknown" and "agrees on 3 random draws" in verdict.why, verdict


@pytest.mark.parametrize("name", WRONG)
def test_wrong_sum_is_refuted(name: str) -> None:
    pm = hand_planned()
    verdict = pm.verify(written(pm, WRONG[name]))
    assert verdict.status == ("unknown" if name == "scaled out of range" else "refuted")
