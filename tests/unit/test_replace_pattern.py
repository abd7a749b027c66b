"""Rewriting by example: what matches, what does not, and that the graph computes what it did."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx import Hints
from shardfx.ir.capture.canonical.patterns import replace_pattern
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Value, substitute
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph

TEXT = """
mesh tp=2
unplaced
argument %x : f32[4, 6]
argument %w : f32[6, 5]
argument %b : f32[5]
forward:
  %0 = aten.mm(%x, %w) : f32[4, 5]  at{1}  @ layers.0  model.py:3
  %1 = aten.add.Tensor(%0, %b) : f32[4, 5]  @ layers.0  model.py:4
  %2 = aten.relu(%1) : f32[4, 5]  @ layers.0  model.py:5
  %3 = aten.mul.Tensor(%2, %2) : f32[4, 5]
  %4 = aten.mul.Tensor(%3, 2.0) : f32[4, 5]
  %5, %6 = aten.max.dim(%4, 1) : f32[4], i64[4]
outputs:
  result results.0 = %5
"""


def run(graph: Graph) -> list[Tensor]:
    """What the graph gives for fixed inputs."""
    generator = torch.Generator().manual_seed(0)
    held: dict[Value, Tensor] = {g.value: torch.randn(g.value.shape, generator=generator) for g in graph.inputs}
    for node in graph.nodes:
        args = substitute(node.args, held.__getitem__)
        out = node.op(*args, **{key: substitute(arg, held.__getitem__) for key, arg in node.kwargs.items()})
        made = list(out) if isinstance(out, (list, tuple)) else [out]
        held.update((value, each) for value, each in zip(node.results, made, strict=True) if value is not None)
    return [held[output.value] for output in graph.outputs]


def rewritten(pattern: Any, replacement: Any, text: str = TEXT) -> tuple[int, list[str]]:
    """How often the pattern stood there, and the ops behind; the graph is right and computes what it did."""
    graph = parse_graph(text)
    before = run(graph)
    found = replace_pattern(graph, pattern, replacement)
    validate_graph(graph)
    torch.testing.assert_close(run(graph), before)
    lines = str(graph).split("forward:\n")[1].split("outputs:")[0].splitlines()
    return len(found), [line.split(" : ")[0].strip() for line in lines]


def test_what_is_put_there_has_source_stage_and_reason_of_what_it_stands_for() -> None:
    graph = parse_graph(TEXT)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.matmul(x, w)

    def transposed(x: Tensor, w: Tensor) -> Tensor:
        return torch.mm(w.t(), x.t()).t()

    (match,) = replace_pattern(graph, product, transposed)
    assert {name: value.name for name, value in match.inputs.items()} == {"x": "x", "w": "w"}
    assert len(match.nodes) == len(match.outputs) == 1
    made = graph.nodes[:4]
    assert {node.why for node in made} == {"transposed in place of product"}
    assert {(str(node.where), node.at) for node in made} == {("layers.0  model.py:3", (1,))}


def test_constants_are_the_same() -> None:
    assert rewritten(lambda x: x * 3.0, lambda x: x + x)[0] == 0
    assert rewritten(lambda x: x * 2, lambda x: x + x)[0] == 0
    assert rewritten(lambda x: torch.max(x, 0), lambda x: torch.max(x, 0))[0] == 0


def test_one_argument_is_one_value_but_two_may_be() -> None:
    assert rewritten(lambda x: x * x, torch.square) == (
        1,
        [
            "%0 = aten.mm(%x, %w)",
            "%1 = aten.add.Tensor(%0, %b)",
            "%2 = aten.relu(%1)",
            "%3 = aten.pow.Tensor_Scalar(%2, 2)",
            "%4 = aten.mul.Tensor(%3, 2.0)",
            "%5, %6 = aten.max.dim(%4, 1)",
        ],
    )
    assert rewritten(lambda x: x + x, lambda x: 2 * x)[0] == 0
    assert rewritten(lambda x, y: x * y, lambda x, y: y * x)[0] == 1


def test_one_of_several_results() -> None:
    count, lines = rewritten(lambda x: torch.max(x, 1)[0], lambda x: x.amax(1))
    assert (count, lines[-1]) == (1, "%5 = aten.amax(%4, [1])")
    assert rewritten(lambda x: torch.max(x, 1)[1], lambda x: x.argmax(1))[0] == 1

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        found = torch.max(x, 1)
        return found[0], found[1]

    count, lines = rewritten(both, lambda x: (x.amax(1), x.argmax(1)))
    assert (count, lines[-1]) == (1, "%5 = aten.amax(%4, [1])")


def test_inner_values_that_something_else_uses_stay() -> None:
    text = TEXT.replace("results.0 = %5", "results.0 = %5\n  result results.1 = %1")
    count, lines = rewritten(lambda x, b: torch.relu(x + b), lambda x, b: torch.clamp(x + b, min=0), text)
    assert count == 1
    assert [line.split(" = ")[1].split("(")[0] for line in lines[:4]] == [
        "aten.mm", "aten.add.Tensor", "aten.add.Tensor", "aten.clamp",
    ]  # fmt: skip


def test_matches_do_not_overlap() -> None:
    text = TEXT.replace("%3 = aten.mul.Tensor(%2, %2)", "%3 = aten.relu(%2)")
    assert rewritten(lambda x: x.relu().relu(), lambda x: x.relu(), text)[0] == 1
    again = text.replace("%4 = aten.mul.Tensor(%3, 2.0)", "%4 = aten.relu(%3)")
    assert rewritten(lambda x: x.relu().relu(), lambda x: x.relu(), again)[0] == 1


def test_in_a_placed_graph_the_new_nodes_are_placed() -> None:
    graph = parse_graph("""
        mesh tp=2
        established COMM_EXPLICIT, SHARDED
        argument %x : f32[4{tp}, 6]
        forward:
          %0 = aten.relu(%x) : f32[4{tp}, 6]  shards d0{tp}
        outputs:
          result results.0 = %0 : [4{tp}, 6]
    """)
    rules = default_rules()
    assert replace_pattern(graph, lambda x: torch.relu(x), lambda x: x * (x > 0), rules, why="no kinks")
    validate_graph(graph, rules=rules)
    assert [node.strategy is not None and node.strategy.shardings for node in graph.nodes] == [(("d0", ("tp",)),)] * 2
    with pytest.raises(Error, match="without a rule"):
        replace_pattern(graph, lambda x, y: x * y, lambda x, y: y * x)


class ByHand(nn.Module):
    """A linear layer, gelu and softmax written out, a norm, and a product of batches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))
        h = self.down(0.5 * h * (1 + torch.erf(h / math.sqrt(2))))
        scores = h @ h.mT
        e = torch.exp(scores - scores.amax(-1, keepdim=True))
        return x + (e / e.sum(-1, keepdim=True)) @ h


def softmax_by_hand(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("pattern", "replacement", "count", "gone"),
    [
        (lambda h: 0.5 * h * (1 + torch.erf(h / 2)), F.gelu, 0, ""),
        (softmax_by_hand, lambda x: x.softmax(-1), 1, "exp.default"),
        (lambda x, w, b: F.linear(x, w, b), lambda x, w, b: x @ w.t() + b, 2, "addmm"),
        (
            lambda x, w, b, v, c: F.linear(F.layer_norm(x, (8,), w, b), v, c),
            lambda x, w, b, v, c: F.layer_norm(x, (8,), w, b) @ v.t() + c,
            1,
            "",
        ),
        (lambda x, y: x @ y, lambda x, y: torch.bmm(x, y), 1, ""),  # the other one shares an op with it
    ],
)
def test_calls_of_several_ops(pattern: Any, replacement: Any, count: int, gone: str) -> None:
    torch.manual_seed(0)
    graph = sx.api.trace(ByHand().double(), Hints(args=(torch.randn(4, 6, 8, dtype=torch.float64),)))
    before = run(graph)
    found = replace_pattern(graph, pattern, replacement)
    validate_graph(graph)
    torch.testing.assert_close(run(graph), before)
    assert len(found) == count
    assert not gone or not any(gone in str(node.op) for node in graph.nodes)


def test_wrong_replacements() -> None:
    with pytest.raises(Error, match="the replacement gives other types") as caught:
        rewritten(lambda x: torch.relu(x), lambda x: x.double())
    assert (caught.value.expected, caught.value.got) == ("[4, 5] of torch.float32", "[4, 5] of torch.float64")
    with pytest.raises(Error, match="holds a constant tensor"):
        rewritten(lambda x: torch.relu(x), lambda x: x + torch.tensor(1.0))
    with pytest.raises(Error, match="cannot be applied here") as caught:
        rewritten(lambda x: torch.relu(x), lambda x: x @ x)
    assert "[4, 5] of torch.float32" in str(caught.value.expected)
    with pytest.raises(Error, match="random numbers"):
        rewritten(lambda x: torch.relu(x), lambda x: F.dropout(x, 0.5))
    with pytest.raises(Error, match="is no Python function"):
        rewritten(torch.relu, lambda x: x)
    with pytest.raises(Error, match="gives what it does not compute"):
        rewritten(lambda x: x, lambda x: x)
