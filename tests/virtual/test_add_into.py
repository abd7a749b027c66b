"""What an iteration adds to a sum is computed into it: gradients are the same, and never there twice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.registry import PROGRAM_OPS
from shardfx.module.programs import TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.reference import check_step
from tests.zoo import Case

WORDS, WIDTH = 61, 8


class Language(nn.Module):
    def __init__(self, words: int = WORDS, **table: Any) -> None:
        super().__init__()
        self.embed, self.inner = nn.Embedding(words, WIDTH, **table), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(self.embed(x))))


def next_tokens(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten(), ignore_index=-100)


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(WORDS - 1, (8, 6)), torch.randint(WORDS - 1, (8, 6))
    y[0, :5] = -100
    return x, y


def planned(model: nn.Module, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    given = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=3, **hints)
    return sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), given, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("table", [{}, {"padding_idx": 5}, {"padding_idx": 0}, {"words": 60}], ids=str)
@pytest.mark.parametrize("hints", [{}, {"zero": 2, "zero_min_numel": 0, "reduce": "last"}], ids=str)
@pytest.mark.one_in(9)
def test_gradients_are_those_of_one_device(table: dict[str, Any], hints: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Language(**table).double()
    pm = planned(model, **hints)
    x, y = batch()
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)
    text = str(pm.rank_program(1))
    in_shards = "zero" in hints and "words" in table  # rows of both ranks stand together: so is a product added
    assert "loop.addmm" in text and ("loop.index_add" in text) != in_shards


@pytest.mark.long
def test_a_gradient_is_never_there_twice() -> None:
    x, y = batch()
    pm = planned(Language().double())
    held = held_in_a_step(pm, Case("language", Language().double(), (x,), {}, next_tokens, (y,)))
    for rank in range(2):
        check_footprint(pm._programs.running(rank, TRAIN), held[rank])
    table = WORDS * WIDTH * 8
    assert all(storage.nbytes != table for storage in pm.memory(0).footprint.storages)


@pytest.mark.long
@pytest.mark.parametrize("damage", ["other operand", "twice", "not from zero"])
def test_a_damaged_product_is_refused(damage: str) -> None:
    pm = planned(Language().double())
    program = pm.rank_program(1)
    node = next(n for n in program.graph.nodes if n.target is PROGRAM_OPS["loop.addmm"].function)
    total, a, b = node.args
    if damage == "other operand":
        with program.graph.inserting_before(node):
            other = program.graph.call_function(torch.ops.aten.neg.default, (a,))
        other.meta = dict(node.meta)
        node.args = (total, other, b)
    elif damage == "twice":
        with program.graph.inserting_after(node):
            again = program.graph.call_function(node.target, (node, a, b))
        again.meta = dict(node.meta)
        node.replace_all_uses_with(again, delete_user_cb=lambda user: user is not again)
    else:
        filled = next(
            n for n in program.graph.nodes if n.target is PROGRAM_OPS["memory.filled"].function and len(n.args[0])
        )
        filled.args = (filled.args[0], 1.0, *filled.args[2:])
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.why
