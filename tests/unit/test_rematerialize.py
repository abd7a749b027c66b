"""Passes for compiled programs: what is recomputed, how attention's operands lie, what Inductor stores once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardfx as sx
from shardfx.ir.cost.replay import values
from shardfx.ir.graph import Node, Phase
from shardfx.ir.program.lower import lower
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module.programs import TRAIN
from shardfx.passes.rank import AttentionLayout, RankContext, Rematerialize, run_rank_passes
from shardfx.runtime.inductor_passes import STORED, WholeStep
from tests.reference import check_step


class Block(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.norm, self.p = nn.Parameter(torch.rand(6)), p
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.norm
        return x + F.dropout(self.down(F.silu(self.gate(h)) * self.up(h)), self.p)


def plan(p: float = 0.0, mesh: sx.Mesh | None = None, **hints: object) -> tuple[nn.Module, Tensor, sx.ParallelModule]:
    torch.manual_seed(0)
    model, x = nn.Sequential(Block(p), Block(p)).double(), torch.rand(8, 6, dtype=torch.float64)
    given = sx.Hints(args=(x,), loss=torch.sum, **hints)  # type: ignore[arg-type]
    return model, x, sx.parallelize(model, mesh or sx.Mesh(dp=1), given, virtual=True)


def phase(node: fx.Node) -> Phase | None:
    made = node.meta.get("shardfx")
    return made.phase if isinstance(made, Node) else None


def split(program: RankProgram) -> tuple[list[fx.Node], list[fx.Node]]:
    """The calls in front of the backward, and the others; the gradient of the loss, a constant, is in front."""
    nodes = list(program.graph.nodes)
    begin = next(i for i, node in enumerate(nodes) if phase(node) is Phase.BACKWARD and node.all_input_nodes)
    return nodes[:begin], nodes[begin:]


def saved(program: RankProgram) -> set[str]:
    """The ops whose results the backward reads."""
    forward, backward = split(program)
    read = {used for node in backward for used in node.all_input_nodes}
    return {str(node.target).removeprefix("aten.").partition(".")[0] for node in forward if node in read}


def rematerialized(pm: sx.ParallelModule) -> tuple[RankProgram, RankProgram]:
    before, after = (
        lower(pm.planned, 0, pm._rule_book, TRAIN, torch.device("cpu")),
        lower(pm.planned, 0, pm._rule_book, TRAIN, torch.device("cpu")),
    )
    return before, run_rank_passes(after, [Rematerialize()], RankContext(pm.planned))


@pytest.mark.long
def test_activations_are_recomputed_and_operands_of_products_are_saved() -> None:
    before, after = rematerialized(plan()[2])
    assert {"mul", "silu"} <= saved(before)
    assert "silu" not in saved(after) and {"addmm", "add", "mul"} <= saved(after)


def test_reshape_of_transposed_activation_is_saved_where_a_product_reads_it() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(12, 4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x.transpose(1, 2)).reshape(8, 12) @ self.weight

    hints = sx.Hints(args=(torch.rand(8, 4, 3, dtype=torch.float64),), loss=torch.sum)
    pm = sx.parallelize(Transposed(), sx.Mesh(dp=1), hints, virtual=True)
    _, after = rematerialized(pm)
    assert not [node for node in split(after)[1] if phase(node) is Phase.FORWARD and node.name.startswith("tanh")]


def test_copies_stand_before_their_first_use() -> None:
    _, after = rematerialized(plan()[2])
    _, backward = split(after)
    copies = {node for node in backward if phase(node) is Phase.FORWARD}
    assert copies
    for node in copies:
        place = backward.index(node)
        assert copies.issuperset(backward[place : min(map(backward.index, node.users))])


@pytest.mark.long
def test_compiled_programs_are_proven_and_right() -> None:
    model, x, pm = plan(mesh=sx.Mesh(dp=2), specs={"args.0": "dp, -"}, zero=3, zero_min_numel=0)
    pm.compile(backend="eager")
    check_step(pm, model, torch.sum, (x,))


class Attention(nn.Module):
    """Self-attention [batch, rows, 8] with rotary positions and a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))
        self.register_buffer("mask", torch.ones(6, 6, dtype=torch.bool).tril())
        self.register_buffer("angles", torch.rand(6, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.rotated(q), self.rotated(k), v, self.mask)
        return x + self.o(out.transpose(1, 2).flatten(2))

    def rotated(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.angles.cos(), self.angles.sin()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


@pytest.mark.long
def test_queries_and_keys_lie_row_by_row_and_gradients_are_right() -> None:
    torch.manual_seed(0)
    model, x = Attention().double(), torch.rand(2, 6, 8, dtype=torch.float64)
    hints = sx.Hints(args=(x,), loss=torch.sum, specs={"args.0": "dp, -, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    program = lower(pm.planned, 0, pm._rule_book, TRAIN, torch.device("cpu"))
    laid = run_rank_passes(program, [AttentionLayout()], RankContext(pm.planned))
    lies, calls = values(laid), [n for n in laid.graph.nodes if "attention" in str(n.target)]
    assert len(calls) == 2
    for call, first in zip(calls, (0, 1), strict=True):  # in the backward the gradient is in front
        assert all(lies[each.name].transpose(1, 2).is_contiguous() for each in call.args[first : first + 3])
    pm.compile(backend="aot_eager")
    check_step(pm, model, torch.sum, (x,))


aten = torch.ops.aten
W = torch.rand(4, 4)


def traced(function: object, *given: Tensor) -> fx.GraphModule:
    return make_fx(function)(*(each.clone() for each in given))  # type: ignore[arg-type]


def test_sum_between_products_is_stored_once() -> None:
    def normed(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = x + torch.tanh(x) @ w
        return x

    module = traced(normed, torch.rand(64, 4), W)
    WholeStep()(module.graph)
    stored = [node.name for node in module.graph.nodes if STORED in node.meta]
    assert stored == ["add"]
