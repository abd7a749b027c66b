"""Rows by expert: what the ops of dispatch give, and the laws by which a plan that has them is proven."""

from __future__ import annotations

import itertools
import re
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Graph
from shardfx.ir.ops.experts.dispatch import expert_rows, expert_slots, parts_mm, parts_outer, take_rows
from shardfx.ir.ops.experts.routed_product import routed_mm, routed_outer
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text.parser import parse_graph
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.proof.terms import same_function

SIZES = list(itertools.product((1, 2), (1, 3), (1, 2), (1, 3), (0, 5), (1, 2), (0, 3)))
"""Blocks of tokens that stay, and that are sent, parts of experts, experts of each, tokens, experts of one, room."""


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_come_back_to_their_tokens(sizes: tuple[int, ...]) -> None:
    d, e, p, g, t, k, few = sizes
    torch.manual_seed(0)
    count, experts, room = d * e * t, p * g, few or max(t * k, 1)
    ids = torch.randint(-1, experts + 1, (count, k))
    x, grad, w = (torch.randn(shape).double() for shape in ((count, 1, 4), (count, k, 6), (experts, 4, 6)))
    each = [x[i, 0] @ w[n] if 0 <= n < experts else grad.new_zeros(6) for i in range(count) for n in ids[i].tolist()]
    expected = torch.stack(each).view(count, k, 6) if each else grad
    torch.testing.assert_close(routed_mm(x, w, ids), expected)
    slots, places, counts = expert_slots(ids.view(d, e, t, k), experts, p, room)
    sources, back, ends = expert_rows(counts, room)

    def rows(pairs: Tensor, index: Tensor) -> Tensor:
        packed = take_rows(pairs, index).transpose(1, 2)
        return take_rows(packed.reshape(d * p, e * room, -1), sources)

    sent = rows(x.view(d, e, t, 4), torch.div(slots, k, rounding_mode="floor"))
    home = take_rows(parts_mm(sent, w, ends), back).view(d, p, e, room, 6).transpose(1, 2)
    made = take_rows(home.reshape(d, e, p * room, 6), places).view(count, k, 6)
    kept = (places >= 0).view(count, k, 1)
    torch.testing.assert_close(made, expected * kept)
    outer = parts_outer(sent, rows(grad.view(d, e, t * k, 6), slots), ends, p)
    torch.testing.assert_close(outer, routed_outer(x, grad * kept, ids, experts))
    inside = ((ids >= 0) & (ids < experts)).view(count, k, 1)
    assert (counts.sum(3) - room).clamp(0).sum() == (inside & ~kept).sum()


@pytest.mark.parametrize(
    "wrong", ["fewer ids", "ids that are no integers", "rows of two dims", "matrices of other rows"]
)
def test_wrong_operands_of_a_product_are_named(wrong: str) -> None:
    x, w, ids = torch.randn(5, 1, 4), torch.randn(3, 4, 6), torch.zeros(5, 2, dtype=torch.int64)
    x, w, ids = {
        "fewer ids": (x, w, ids[:3]),
        "ids that are no integers": (x, w, ids.double()),
        "rows of two dims": (x[:, 0], w, ids),
        "matrices of other rows": (x, w[:, :3], ids),
    }[wrong]
    with pytest.raises(ValueError, match="routed_mm takes x"):
        routed_mm(x, w, ids)


class Two(nn.Module):
    """Two products with the matrices of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(4, 6, 6)) for _ in range(2))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return routed_mm(routed_mm(x[:, None], self.up, ids).relu(), self.down, ids).sum(1)


@cache
def planned(swapped: bool = False) -> tuple[Graph, str]:
    x, ids = torch.randn(8, 6), torch.tensor([[0, 1], [2, 3]] * 4)
    mesh, tokens = (sx.Mesh(ep=2, dp=2), "ep dp, -") if swapped else (sx.Mesh(ep=2), "ep, -")
    specs = {"args.*": tokens, "up": "ep, -, -", "down": "ep, -, -"}
    hints = sx.Hints(args=(x, ids), loss=lambda y: y.square().sum(), specs=specs)
    pm = sx.parallelize(Two(), mesh, hints, virtual=True)
    assert pm.verify()
    return pm.captured, str(pm.planned)


def test_rows_without_room_are_counted() -> None:
    """A plan that counts those of another room, or none, or adds up nothing of them, is refused."""
    captured, text = planned()
    for wrong in (
        re.sub(r"clamp\((%\d+), 0\)", r"clamp(\1, 1)", text),
        re.sub(r"sub.Tensor\((%\d+), 5\)", r"sub.Tensor(\1, 6)", text),
        re.sub(r'(overflow ".*" = )%\d+', r"\1" + re.findall(r"(%\d+) = aten.mul.Tensor\(%\d+, 0\)", text)[0], text),
        re.sub(r"\n *overflow .*", "", text),
    ):
        assert wrong != text
        fault = same_function(captured, parse_graph(wrong), default_rules())
        assert isinstance(fault, Fault) and "not counted" in fault.what


WRONG = {
    "rows of other tokens": (r"floor_divide.Scalar\((%\d+), 2\)", r"floor_divide.Scalar(\1, 3)"),
    "rows in the order of their blocks": (r"take_rows\((%\d+), (%\d+)\)( : f32\[2\{ep\}, 10, 6\])", "UNSORTED"),
    "the matrices of other products": (r"(parts_mm\(%\d+, )%up", r"\1%down"),
    "pairs in the place of tokens": (r"(take_rows\(%\d+, )%\d+(\) : f32\[1, 2\{ep\}, 2, 5, 6\])", "PAIRS"),
    "another op between": (r"aten.relu\(", "aten.neg("),
    "another number of parts": (r"(parts_outer\(.*), 2\)", r"\1, 1)"),
    "rows of other blocks": (r"permute\((%\d+), \[0, 2, 1, 3, 4\]\)", r"permute(\1, [0, 1, 2, 3, 4])"),
    "the gradient of another product": (r"(gradient up = )%\d+", "OTHER"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_rows_are_not_proven(wrong: str) -> None:
    captured, text = planned()
    pattern, by = WRONG[wrong]
    slots = re.search(r"(%\d+), %\d+, %\d+ = shardfx.expert_slots", text)
    back = re.search(r"%\d+, (%\d+), %\d+ = shardfx.expert_rows", text)
    assert slots is not None and back is not None
    by = {
        "UNSORTED": rf"take_rows(\1, {back[1]})\3",
        "PAIRS": rf"\1{slots[1]}\2",
        "OTHER": r"\1" + re.findall(r"gradient down = (%\d+)", text)[0],
    }.get(by, by)
    damaged = re.sub(pattern, by, text, count=1)
    assert damaged != text
    assert isinstance(same_function(captured, parse_graph(damaged), default_rules()), Fault)


def test_tokens_in_another_order_are_not_those_of_the_ids() -> None:
    """Blocks of tokens that the experts' axis shards first: x and ids are permuted alike."""
    captured, text = planned(True)
    assert not isinstance(same_function(captured, parse_graph(text), default_rules()), Fault)
    damaged = re.sub(r"permute\((%\d+), \[1, 0, 2, 3\]\)", r"permute(\1, [0, 1, 2, 3])", text, count=1)
    assert damaged != text
    assert isinstance(same_function(captured, parse_graph(damaged), default_rules()), Fault)
