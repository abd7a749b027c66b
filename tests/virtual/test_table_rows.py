"""Tables that stay in the host's memory: rows come from there, and nothing but memory changes, to the bit."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.ir.graph import InputKind, Phase
from shardfx.ir.text import parse_graph, print_graph
from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import MESHES, plan
from tests.stepped import KINDS
from tests.zoo import make

DEEP: dict[str, Any] = {"zero": 3, "zero_min_numel": 0, "recompute": "layers.*"}


def rows(**options: Any) -> tuple[sx.Offload, ...]:
    """Tables, however small."""
    return (sx.Offload("rows", **{"min_numel": 0, **options}),)


class Looked(nn.Module):
    """A table, some bags of rows, and a head that may be tied to the table."""

    def __init__(self, mode: str = "sum", tied: bool = False) -> None:
        super().__init__()
        self.emb = nn.Embedding(64, 16, padding_idx=3, scale_grad_by_freq=mode == "mean")
        self.bag = nn.EmbeddingBag(64, 16, mode=mode) if mode else None
        self.head = nn.Linear(16, 64, bias=False)
        if tied:
            self.head.weight = self.emb.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.emb(x).sum(1)
        return self.head(found if self.bag is None else self.bag(x) + found)


def looked(mode: str = "sum", specs: dict[str, str] | None = None, tied: bool = False, **hints: Any) -> Any:
    torch.manual_seed(0)
    model, x, y = Looked(mode, tied).double(), torch.randint(0, 64, (8, 4)), torch.randint(0, 64, (8,))
    sharding = {"args.0": "dp, -", "targets.0": "dp"} if specs is None else specs
    given = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=sharding, **hints)
    return sx.parallelize(model, sx.Mesh(dp=2), given, virtual=True), x, y


@pytest.mark.parametrize(
    ("name", "mesh", "kind", "hints"),
    [
        ("gpt_separate", "dp2", "AdamW", {"zero": 1, "zero_min_numel": 0, "clip_grad_norm": 0.1}),
        ("gpt_separate", "dp2tp2", "Adafactor", {}),
        ("gpt_separate", "dp2", "Lamb", DEEP),
        ("gpt_fused", "tp2", "SGD", {"arena": True}),
        ("llama", "dp2tp2", "AdamW", {"zero": 2, "zero_min_numel": 0}),
        ("llama", "dp2tp2", "Adagrad", {"mixed_precision": torch.float64}),
    ],
    ids=str,
)
@pytest.mark.slow
def test_five_steps_are_the_same(name: str, mesh: str, kind: str, hints: dict[str, Any]) -> None:
    """Up to rounding: steps of what lies on the device run as fused kernels, or over segments."""
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-12)
    case = make(name)
    away = (*rows(), sx.Offload(("activations", "optimizer"), min_numel=0))
    plain, other = (plan(make(name), MESHES[mesh], optimizer=KINDS[kind], offload=o, **hints) for o in (away[1:], away))
    for _ in range(5):
        close(*(pm.step(*case.args, *case.targets, **case.kwargs) for pm in (plain, other)))
    close(plain.full_state_dict(), other.full_state_dict())
    mine, theirs = (pm.optimizer.full_state_dict()["state"] for pm in (plain, other))
    for key, held in mine.items():
        for of, value in held.items():
            close(torch.as_tensor(value), torch.as_tensor(theirs[key][of]))
    assert other.verify(), other.verify().why
    tables = [given for given in other.planned.of_kind(InputKind.PARAMETER) if given.pool]
    assert tables and all("emb" in given.name for given in tables)
    assert other.memory().host > plain.memory().host
    assert print_graph(parse_graph(print_graph(other.planned))) == print_graph(other.planned)


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "specs"),
    [("mean", None), *(pytest.param(m, s, marks=pytest.mark.slow) for m in ("sum", "max") for s in (None, {}))],
    ids=str,
)
def test_bags_and_gradients_that_are_means(mode: str, specs: dict[str, str] | None) -> None:
    hints: dict[str, Any] = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1)}
    plain, other = (looked(mode, specs, offload=offload, **hints) for offload in ((), rows()))
    for _ in range(3):
        assert torch.equal(*(pm.step(x, y) for pm, x, y in (plain, other)))
    state = other[0].full_state_dict()
    assert all(torch.equal(value, state[key]) for key, value in plain[0].full_state_dict().items())
    assert other[0].verify(), other[0].verify().why


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize("specs", [None, {"emb.weight": "dp, -"}], ids=str)
def test_a_step_brings_rows_alone(specs: dict[str, str] | None) -> None:
    """No more of a table is ever on the device, be its vocabulary sharding or not."""
    hints: dict[str, Any] = {
        "specs": specs,
        "optimizer": KINDS["AdamW"],
        "zero": 1,
        "zero_min_numel": 0,
        "clip_grad_norm": 0.1,
    }
    (plain, x, y), (pm, *_) = (looked("", offload=offload, **hints) for offload in ((), rows()))
    for _ in range(5):
        torch.testing.assert_close(plain.step(x, y), pm.step(x, y))
    state = pm.full_state_dict()  # its calls run one by one, not as a fused kernel
    for key, value in plain.full_state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-14)
    assert pm.verify(), pm.verify().why
    assert [given.name for given in pm.planned.of_kind(InputKind.PARAMETER) if given.pool] == ["emb.weight"]
    fetched = [storage for storage in pm.memory().footprint.storages if storage.category == "fetched"]
    batch = (8 if specs else 4) * 4
    assert sorted(storage.nbytes for storage in fetched) == [8, batch * 16 * 8], "a norm, and rows"
    assert {storage.node.phase for storage in fetched if storage.node} == {Phase.FORWARD, Phase.UPDATE}
    tables = 1 if specs else 2  # of what lies on the device the fused update makes no temporaries
    assert plain.memory().peak - pm.memory().peak > tables * 64 * 16 * 8 and "emb.weight" not in str(pm.memory())


@pytest.mark.long
def test_both_pools_are_predicted_as_a_step_holds_them() -> None:
    pm, x, y = looked("", optimizer=KINDS["AdamW"], offload=rows())
    case: Any = SimpleNamespace(args=(x,), targets=(y,), kwargs={})
    for run, kinds in ((pm, TRAIN), (pm.step, STEP)):
        for rank, held in held_in_a_step(pm, case, run).items():
            check_footprint(pm._programs.running(rank, kinds), held)


@pytest.mark.long
@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ({"tied": True, "offload": rows()}, "is not only looked up in"),
        ({"offload": rows(modules="embed")}, "matches none of the modules"),
        ({"offload": rows(), "grad_accumulation": 2}, "iterations over"),
    ],
    ids=str,
)
def test_mistakes_are_errors(hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error, match=what) as raised:
        looked(**{"specs": {"args.0": "dp, -", "targets.0": "dp"}, **hints})
    if "tied" in hints:
        assert "aten.mm" in str(raised.value.where) and "'parameters'" in str(raised.value.remedy)


def test_rows_of_files_are_not_fetched() -> None:
    with pytest.raises(sx.Error, match="looked up in the host's memory"):
        rows(to="disk")


@pytest.mark.long
def test_that_no_table_is_large_enough_is_said() -> None:
    pm, *_ = looked(offload=("rows",))
    assert any("no rows are offloaded" in note for note in pm.planned.notes) and not pm.memory().host
