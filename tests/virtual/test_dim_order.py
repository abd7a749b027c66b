"""Memory layout: weights and inputs that do not lie row by row, and dims that are compounds of sharded ones."""

from __future__ import annotations

import copy
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.text import parse_graph, print_graph
from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.reference import check_step
from tests.zoo import Case

LAST = (0, 2, 3, 1)


class Net(nn.Module):
    """Convolutions, one of them of one pixel, and a weight that was read transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.body, self.point = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.head = nn.Linear(8, 4)
        self.head.weight = nn.Parameter(torch.randn(8, 4).t())

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.stem(x)))
        return self.head((self.point(x) + self.body(x)).mean((2, 3)))


def case(of_model: bool, of_input: bool) -> Case:
    torch.manual_seed(0)
    model, x, y = Net().double(), torch.randn(4, 3, 8, 8).double(), torch.randint(4, (4,))
    if of_model:
        model = model.to(memory_format=torch.channels_last)
    return Case("net", model, (x.to(memory_format=torch.channels_last) if of_input else x,), {}, F.cross_entropy, (y,))


def planned(given: Case, **hints: Any) -> sx.ParallelModule:
    specs = {"args.0": "dp, -, -, -", "targets.0": "dp"}
    told = sx.Hints(args=given.args, loss=given.loss, targets=given.targets, specs=specs, zero_min_numel=0, **hints)
    return sx.parallelize(copy.deepcopy(given.model), sx.Mesh(dp=2), told, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("of_model", "of_input", "hints"),
    [(False, True, {}), (True, False, {"zero": 1, "optimizer": torch.optim.AdamW})],
    ids=str,
)
def test_memory_of_channels_last_tensors_is_predicted(of_model: bool, of_input: bool, hints: dict[str, Any]) -> None:
    given = case(of_model, of_input)
    pm = planned(given, **hints)
    assert pm.planned.input("args.0").dim_order == (LAST if of_input else ())
    assert pm.planned.input("head.weight").dim_order == (1, 0)
    for name in ("stem.weight", "body.weight", "point.weight"):
        assert pm.planned.input(name).dim_order == (LAST if of_model else ())
    check_step(pm, given.model, given.loss, given.args, given.targets, bound=1e-12, proven=False)
    pm.zero_grad()
    if "optimizer" in hints:
        assert pm.planned.input("body.weight.exp_avg").dim_order == LAST
    for run, kinds in ((pm, TRAIN), *([(pm.step, STEP)] if "optimizer" in hints else [])):
        for rank, held in held_in_a_step(pm, given, run).items():
            check_footprint(pm._programs.running(rank, kinds), held)
    assert pm.verify()


@pytest.mark.long
def test_input_of_other_strides_than_the_example_is_copied_into_its_order() -> None:
    given = case(True, True)
    pm, rows = planned(given), case(True, False)
    with torch.no_grad():
        assert torch.equal(pm(*given.args, *given.targets), pm(*rows.args, *rows.targets))


@pytest.mark.long
def test_dim_order_round_trips_as_text() -> None:
    pm = planned(case(True, False))
    text = print_graph(pm.planned)
    assert "parameter %stem.weight : f32[8, 3, 3, 3] dim_order [0, 2, 3, 1]".replace("f32", "f64") in text
    for back in (parse_graph(text), pm.planned.copy()):
        assert [given.dim_order for given in back.inputs] == [given.dim_order for given in pm.planned.inputs]
    with pytest.raises(sx.Error, match="the dims 0 to 3 in a list, each once"):
        parse_graph(text.replace("dim_order [0, 2, 3, 1]", "dim_order [0, 2, 2, 1]", 1))


class RowsFirst(nn.Module):
    """Attention of rows, batch, columns, as in ``nn.MultiheadAttention`` of torch 2.11: its result is viewed."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        rows, batch, _ = x.shape
        heads = (each.contiguous().view(rows, batch * 2, 4).transpose(0, 1) for each in self.qkv(x).chunk(3, -1))
        made = F.scaled_dot_product_attention(*(each.view(batch, 2, rows, 4) for each in heads))
        return self.out(made.permute(2, 0, 1, 3).contiguous().view(rows * batch, 8))


def test_attention_of_rows_before_the_batch_is_viewed() -> None:
    torch.manual_seed(0)
    model, x = RowsFirst().double(), torch.randn(5, 4, 8).double()
    hints = sx.Hints(args=(x,), specs={"args.0": "-, dp, -"}, loss=Tensor.mean)
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    check_step(pm, model, Tensor.mean, (x,), proven=False)


MESH = sx.Mesh(dp=2, tp=2)


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Positions(nn.Module):
    """Position ids and ranges of numbers beside rows that come from two sharded dims."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Embedding(24, 5, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        ids, numbers = torch.arange(24), torch.arange(0.1, 2.5, 0.1, dtype=torch.float64)
        return (x.flatten(0, 1) * numbers[:, None] + self.places(ids)).sin()


class Table(nn.Module):
    """A table of which the rows come from two dims, and the gradient of how often each is looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(randn(4, 6, 5))

    def forward(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.table.flatten(0, 1), padding_idx=9, scale_grad_by_freq=True).sin()


class Classes(nn.Module):
    """Logits whose classes come from two dims, of which some may be picked."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(randn(5))

    def forward(self, x: Tensor, index: Tensor | None = None) -> Tensor:
        logits = (x * self.scale[:, None, None]).flatten(1, 2)
        return logits if index is None else logits.gather(1, index)


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


def class_loss(out: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(out, target, ignore_index=3)


IDS = torch.tensor([0, 23, 9, 5, 17, 5, 12, 5, 23, 18])
TARGET = torch.tensor([23, 3, 8, 14, 0])
CASES: dict[str, tuple[Any, tuple[Tensor, ...], dict[str, str]]] = {
    "positions": (Positions, (randn(4, 6, 5),), {"args.0": "dp, tp, -"}),
    "table": (Table, (IDS,), {"table": "dp, tp, -"}),
    "picked": (Classes, (randn(5, 4, 6), IDS.view(5, 2)), {"args.0": "-, dp, tp"}),
    "classes": (Classes, (randn(5, 4, 6),), {"args.0": "-, -, tp"}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
def test_compounds_of_two_sharded_dims_equal_one_device(name: str) -> None:
    torch.manual_seed(0)
    make, args, specs = CASES[name]
    model = make()
    loss, targets = (class_loss, (TARGET,)) if name.startswith("classes") else (squares, ())
    alone = deepcopy(model)
    pm = sx.parallelize(model, MESH, sx.Hints(args=args, loss=loss, targets=targets, specs=specs), virtual=True)
    assert any(sharding.parts for value in pm.planned.values() if value.spec for sharding in value.spec.dims)
    check_step(pm, alone, loss, args, targets)  # type: ignore[arg-type]
