"""Pipelines of many ranks and iterations: proven from a few programs, and a rank that does otherwise is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops, stage_transfer
from shardfx.ir.program.lower import Lowering
from shardfx.runtime.verify import loop_proof
from shardfx.runtime.verify.families import many_ranks

OTHER = 2
"""A rank of the middle stage that is not in the line of ranks whose whole programs are interpreted."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Language(nn.Module):
    def __init__(self, blocks: int, words: int = 12, width: int = 8) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words, bias=False)
        self.layers = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


@cache
def in_stages(pp: int = 3, dp: int = 1, count: int = 4, schedule: str = "1f1b", chunks: int = 1) -> sx.ParallelModule:
    x, y = torch.randint(12, (4 * count, 3)), torch.randint(12, (4 * count, 3))
    specs = {"args.0": "mb dp, -", "targets.0": "mb dp, -"}
    specs |= {"layers.*.up.weight": "tp, -", "layers.*.down.weight": "-, tp"}
    stages = sx.Pipeline(schedule=schedule, stages_per_rank=chunks)
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs, pipeline=stages)
    mesh = sx.Mesh(pp=pp, dp=dp, tp=2, mb=sx.Loop(count))
    return sx.parallelize(Language(pp * chunks), mesh, hints, virtual=True)


@pytest.fixture
def each(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on every program is interpreted."""
    return lambda: monkeypatch.setattr(many_ranks, "EVERY", 1 << 20)


@pytest.mark.parametrize(
    ("pp", "dp", "schedule", "chunks"),
    [
        pytest.param(4, 2, "1f1b", 1, marks=pytest.mark.slow),
        pytest.param(3, 1, "zb-h1", 1, marks=pytest.mark.slow),
        pytest.param(2, 2, "interleaved", 2, marks=pytest.mark.slow),
    ],
)
def test_one_line_of_ranks_is_interpreted(
    pp: int, dp: int, schedule: str, chunks: int, each: Callable[[], None]
) -> None:
    """And all programs, one by one, are proven as well."""
    pm = in_stages(pp, dp, 4, schedule, chunks)
    verdict = pm.verify()
    assert verdict, verdict
    of_all = len(verdict.programs) * pp
    assert verdict.checked["programs read"] == of_all * dp * 2 * 4
    assert verdict.checked["whole programs"] == 2 * of_all
    each()
    one_by_one = pm.verify()
    assert one_by_one, one_by_one
    assert "programs read" not in one_by_one.checked
    assert one_by_one.checked["outputs"] == verdict.checked["outputs"]


# ---- what is wrong on one rank


def calls(graph: fx.Graph, target: Any) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.target is target)


def sent(graph: fx.Graph) -> fx.Node:
    return next(calls(graph, stage_transfer.send))


def renamed(node: fx.Node) -> None:
    node.args = (*node.args[:-3], 99, *node.args[-2:])


def exchanged(node: fx.Node) -> None:
    iteration = node.args[-2]
    assert isinstance(iteration, fx.Node)
    with node.graph.inserting_after(iteration):
        other = node.graph.call_function(
            loop_ops.piecewise_index, (iteration.args[0], [(0, 1, 0), (1, 0, 0), (2, 2, 1)])
        )
    node.args = (*node.args[:-2], other, node.args[-1])


def an_add_left_out(graph: fx.Graph) -> None:
    *_, add = calls(graph, torch.ops.aten.add.Tensor)
    add.replace_all_uses_with(add.args[0])  # type: ignore[arg-type]


def something_else_is_sent(graph: fx.Graph) -> None:
    node, came = sent(graph), next(calls(graph, stage_transfer.receive))
    node.args = (next(iter(came.users)), *node.args[1:])


def sent_twice(graph: fx.Graph) -> None:
    node = sent(graph)
    with graph.inserting_after(node):
        graph.node_copy(node)


DAMAGE: dict[str, Callable[[fx.Graph], object]] = {
    "to the wrong place": lambda graph: sent(graph).update_arg(1, 0),
    "a wrong tag": lambda graph: renamed(sent(graph)),
    "two iterations exchanged": lambda graph: exchanged(sent(graph)),
    "an add left out": an_add_left_out,
    "something else is sent": something_else_is_sent,
    "not sent": lambda graph: graph.erase_node(sent(graph)),
    "sent twice": sent_twice,
}
NOT_OF_MESSAGES = ("an add left out", "something else is sent")


@pytest.mark.long
@pytest.mark.one_in(12)
@pytest.mark.parametrize("name", DAMAGE)
@pytest.mark.parametrize("ordered", [True, False], ids=["ordered", "whatever order"])
def test_what_is_wrong_on_one_rank_is_refused(name: str, ordered: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the order of messages; and by the proof, if that would let it pass."""
    if not ordered:
        monkeypatch.setattr(loop_proof, "out_of_order", lambda *_: None)
    program = in_stages().rank_program(OTHER)
    DAMAGE[name](program.graph)
    verdict = in_stages().verify(modules={OTHER: program.module()})
    assert not verdict and verdict.fault is not None
    assert ("programs read" in verdict.checked) == (not ordered or name in NOT_OF_MESSAGES)


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("change", [renamed, exchanged])
def test_what_both_ends_name_otherwise_is_proven(change: Callable[[fx.Node], None]) -> None:
    there, here = in_stages().rank_program(OTHER), in_stages().rank_program(OTHER + 2)
    change(sent(there.graph))
    change(next(calls(here.graph, stage_transfer.receive)))
    verdict = in_stages().verify(modules={OTHER: there.module(), OTHER + 2: here.module()})
    assert verdict, verdict
    assert verdict.checked["programs read"] < len(verdict.programs) * 24


@pytest.mark.long
def test_a_message_that_one_rank_alone_names_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where lowering is wrong: the plan's own program of one rank, and no other."""
    call = Lowering.call

    def other(self: Lowering, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        if op is stage_transfer.send and self.mesh.size == 6 and self.rank == OTHER:
            args = (*args[:2], args[2] + 1, *args[3:])
        return call(self, op, *args, **kwargs)

    monkeypatch.setattr(Lowering, "call", other)
    assert "is sent" in in_stages().verify().why
    monkeypatch.setattr(loop_proof, "out_of_order", lambda *_: None)
    verdict = in_stages().verify()
    assert not verdict
    assert verdict.checked["programs read"] == 20
