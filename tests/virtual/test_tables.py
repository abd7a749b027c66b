"""Embedding tables that are sharded over the batch's own axis, compared with one device; bytes; errors."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn, optim

import shardfx as sx
from shardfx.passes import EmbeddingTables
from tests.collective_counts import count_collectives
from tests.damage_tables import EXCHANGED, LOOKUPS, OF_GRADIENTS, STEPS
from tests.mutants import Programs
from tests.reference import check_step

pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
DLRM = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "dlrm.py"))
ROWS, BATCH = (300, 161, 97), 24
SPECS = {"args.*": "dp, -", "targets.0": "dp"}
BY_ROWS, BY_COLUMNS = {"tables.*.weight": "dp, -"}, {"tables.*.weight": "-, dp"}
LOSS = F.binary_cross_entropy_with_logits
Tensors = tuple[Tensor, Tensor, Tensor]


def batch(seed: int = 0, rows: tuple[int, ...] = ROWS, size: int = BATCH) -> Tensors:
    dense, ids, labels = DLRM["batch"](rows, size, seed)
    return dense.double(), ids, labels.double()


def plan(
    ranks: int, tables: dict[str, str], sparse: bool = False, **options: Any
) -> tuple[sx.ParallelModule, nn.Module]:
    """A plan of the example's model, and the model alone."""
    torch.manual_seed(0)
    model = DLRM["DLRM"](ROWS, 8, sparse=sparse).double()
    dense, ids, labels = batch()
    hints = sx.Hints(args=(dense, ids), loss=LOSS, targets=(labels,), specs=SPECS | tables, **options)
    alone = deepcopy(model)
    return sx.parallelize(model, sx.Mesh(dp=ranks), hints, virtual=True), alone


def travels(pm: sx.ParallelModule) -> list[tuple[int, ...]]:
    """The shapes of what is sent and is as large as the smallest table."""
    sent = [value for node in pm.planned.nodes if str(node.op).startswith("comm.") for value in node.operands]
    return [value.shape for value in sent if value.type.numel >= min(ROWS) * 8]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("tables", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_tables_over_the_batch_axis_match_single_device(ranks: int, tables: dict[str, str]) -> None:
    pm, alone = plan(ranks, tables)
    dense, ids, labels = batch(1)
    check_step(pm, alone, LOSS, (dense, ids), (labels,), bound=1e-12)
    assert travels(pm) == []


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda params: optim.SGD(params, lr=0.1),
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "Adam": lambda params: optim.Adam(params, lr=0.01),
}


def sparse_adam(params: Any) -> list[optim.Optimizer]:
    """One optimizer for the tables, another one for the rest."""
    a, b, c, *rest = params
    return [optim.SparseAdam([a, b, c], lr=0.01), optim.SGD(rest, lr=0.1)]


class RowWiseAdagrad(optim.Optimizer):
    """One number for each row, found by ids, as many write it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad.coalesce()
                if not state:
                    state["sum"] = p.new_zeros(p.shape[0], 1)
                ids, rows = grad.indices()[0], grad.values()
                state["sum"].index_add_(0, ids, rows.pow(2).mean(1, keepdim=True))
                p.index_add_(0, ids, rows / (state["sum"][ids].sqrt() + 1e-8), alpha=-group["lr"])


def row_wise(params: Any) -> list[optim.Optimizer]:
    a, b, c, *rest = params
    return [RowWiseAdagrad([a, b, c]), optim.SGD(rest, lr=0.1)]


SPARSE: dict[str, Callable[[Any], Any]] = {
    "row-wise Adagrad": row_wise,
    "SGD": OPTIMIZERS["SGD"],
    "Adagrad": lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.1, initial_accumulator_value=0.1),
    "SparseAdam": sparse_adam,
}


@pytest.mark.long
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", SPARSE)
def test_sparse_gradients_step_touched_rows_as_on_one_device(name: str, ranks: int) -> None:
    make, tables = SPARSE[name], {"tables.0.weight": "dp, -", "tables.1.weight": "-, dp"}
    pm, alone = plan(ranks, tables, sparse=True, optimizer=make)
    made = make([*alone.parameters()])
    theirs = made if isinstance(made, list) else [made]
    for seed in range(4):
        dense, ids, labels = batch(seed)
        alone.zero_grad()
        wanted = LOSS(alone(dense, ids), labels)
        wanted.backward()
        for each in theirs:
            each.step()
        torch.testing.assert_close(pm.step(dense, ids, labels), wanted.detach(), rtol=1e-12, atol=1e-12)
    state = pm.full_state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    assert pm.verify()


@pytest.mark.parametrize("inside", [True, False], ids=["step", "own optimizer"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_tables_train_as_on_one_device(name: str, inside: bool) -> None:
    make = OPTIMIZERS[name]
    tables = {"tables.0.weight": "dp, -", "tables.1.weight": "-, dp"}
    pm, alone = plan(4, tables, **({"optimizer": make} if inside else {}))
    theirs, ours = make(alone.parameters()), None if inside else make(pm.parameters())
    for seed in range(3):
        dense, ids, labels = batch(seed)
        theirs.zero_grad()
        wanted = LOSS(alone(dense, ids), labels)
        wanted.backward()
        theirs.step()
        if ours is None:
            got = pm.step(dense, ids, labels)
        else:
            ours.zero_grad()
            got = pm(dense, ids, labels)
            got.backward()
            ours.step()
        torch.testing.assert_close(got.detach(), wanted.detach(), rtol=1e-12, atol=1e-12)
    state = pm.full_state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    assert pm.verify()


class Bag(nn.Module):
    """A bag of rows, and a product with it."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table, self.linear = nn.EmbeddingBag(400, 6, **options), nn.Linear(6, 6)

    def forward(self, *args: Tensor | None) -> Tensor:
        made: Tensor = self.linear(self.table(*args))
        return made


def squares(out: Tensor) -> Tensor:
    return (out**2).sum()


PADDED = torch.tensor([[3, 7, 9, 7], [7, 7, 7, 7], [1, 3, 3, 399], [0, 2, 7, 200]])
RAGGED, OFFSETS, ENDS = PADDED.flatten()[:13], torch.tensor([0, 3, 3, 9]), torch.tensor([0, 3, 3, 9, 13])
BAGS: dict[str, tuple[dict[str, Any], tuple[Tensor | None, ...]]] = {
    "sum": ({"mode": "sum"}, (PADDED,)),
    "mean, padding": ({"mode": "mean", "padding_idx": 7}, (PADDED,)),
    "weights, padding": ({"mode": "sum", "padding_idx": 7}, (PADDED, None, torch.rand(4, 4))),
    "ragged mean, padding": ({"mode": "mean", "padding_idx": 7}, (RAGGED, OFFSETS)),
    "ragged weights": ({"mode": "sum", "include_last_offset": True}, (RAGGED, ENDS, torch.rand(13))),
    "maximum": ({"mode": "max"}, (RAGGED, OFFSETS)),
    "counts": ({"mode": "sum", "scale_grad_by_freq": True}, (PADDED,)),
}


@pytest.mark.parametrize("ids", ["sharded", "replicated"])
@pytest.mark.parametrize("table", ["dp, -", "-, dp"], ids=["rows", "columns"])
@pytest.mark.parametrize("case", BAGS)
def test_bags_match_single_device(case: str, table: str, ids: str) -> None:
    """Ragged bags too, one of them empty; sums of bags are sent, not their rows."""
    options, given = BAGS[case]
    args = tuple(each.double() if each is not None and each.is_floating_point() else each for each in given)
    sharded = {f"args.{i}": "dp" + ", -" * (each.ndim - 1) for i, each in enumerate(args) if each is not None}
    if ids == "replicated":
        sharded = {"args.1": "dp"} if len(args) > 1 and args[1] is not None else {}
    torch.manual_seed(0)
    model = Bag(**options).double()
    alone = deepcopy(model)
    hints = sx.Hints(args=args, loss=squares, specs=sharded | {"table.weight": table})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    check_step(pm, alone, squares, args, bound=1e-12)
    kept = case in ("maximum", "counts")
    gathered = kept and ids == "sharded"
    assert any("table.weight is gathered: bags of" in each for each in pm.report().warnings) >= gathered
    if not kept:
        sent = [each for node in pm.planned.nodes if str(node.op).startswith("comm.") for each in node.operands]
        assert max(each.type.numel for each in sent if each.type.dtype.is_floating_point) <= 6 * 6


@pytest.mark.long
def test_sparse_tables_in_host_memory_step_the_same_rows() -> None:
    make: dict[str, Any] = {"sparse": True, "optimizer": SPARSE["Adagrad"]}
    near, _ = plan(2, BY_ROWS, **make)
    away, _ = plan(2, BY_ROWS, offload=(sx.Offload("rows", min_numel=0),), **make)
    for seed in range(3):
        torch.testing.assert_close(near.step(*batch(seed)), away.step(*batch(seed)), rtol=1e-12, atol=1e-12)
    assert away.verify()
    assert sum(given.pool == "host" for given in away.planned.inputs) == 6
    assert str(away.rank_program(0)).count("update.rows") == 3


SUMS = ((), (EmbeddingTables(capacity=0),))


class Shop(nn.Module):
    """Tables that are looked up in once and twice, by rows that ranks divide, or do not; short bags, and long ones."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.items = nn.Embedding(800, 6, padding_idx=3, sparse=sparse)
        self.odd = nn.Embedding(801, 6, sparse=sparse)
        self.words = nn.EmbeddingBag(1200, 6, mode="mean", padding_idx=5, sparse=sparse)
        self.long = nn.EmbeddingBag(1200, 6, mode="sum", sparse=sparse)
        self.linear = nn.Linear(6, 4)

    def forward(self, item: Tensor, seen: Tensor, words: Tensor, more: Tensor) -> Tensor:
        found = self.items(item) + self.words(words) + self.items(seen).tanh().sum(1)
        made: Tensor = self.linear(found + self.odd(item) + self.long(more))
        return made


def visits(seed: int = 0, size: int = 128) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(seed)
    sizes = (800, (size,)), (800, (size, 3)), (1200, (size, 2)), (1200, (size, 8))
    item, seen, words, more = (torch.randint(0, rows, shape, generator=draw) for rows, shape in sizes)
    item[:3], seen[::9, 0], words[:2] = 3, 3, 5
    return item, seen, words, more


def shop(
    mesh: sx.Mesh, batch: str, table: str, virtual: bool | None = True, sparse: bool = False, **options: Any
) -> tuple[sx.ParallelModule, nn.Module]:
    torch.manual_seed(0)
    model = Shop(sparse or "optimizer" in options).double()
    specs = {"args.0": batch, **{f"args.{i}": f"{batch}, -" for i in (1, 2, 3)}}
    placed = table if "," in table else f"{table}, -"
    specs |= {f"{name}.weight": placed for name in ("items", "odd", "words", "long")}
    hints = sx.Hints(args=visits(), loss=mean, specs=specs, **options)
    return sx.parallelize(deepcopy(model), mesh, hints, virtual=virtual), model


def mean(out: Tensor) -> Tensor:
    return (out**2).mean()


def exchanged(pm: sx.ParallelModule) -> list[str]:
    """The modules whose ids are sent to the ranks of their rows."""
    return [node.where.module for node in pm.planned.nodes if "numbered_rows" in str(node.op)]


EXCHANGES: dict[str, tuple[sx.Mesh, str, str]] = {
    "two ranks": (sx.Mesh(dp=2), "dp", "dp"),
    "four ranks": (sx.Mesh(dp=4), "dp", "dp"),
    "batch over more": (sx.Mesh(dp=2, tp=2), "dp tp", "dp"),
    "other order": (sx.Mesh(dp=2, tp=2), "dp tp", "tp dp"),
    "micro-batches": (sx.Mesh(dp=2, mb=sx.Loop(2)), "mb dp", "dp"),
}


@pytest.mark.long
@pytest.mark.parametrize("how", EXCHANGES)
def test_ids_sent_to_the_ranks_of_their_rows_match_single_device(how: str) -> None:
    """Rows that ranks do not divide, and sums of long bags, are partial sums: a lookup of 8 rows a bag sends more."""
    pm, alone = shop(*EXCHANGES[how])
    check_step(pm, alone, mean, visits(), bound=1e-12)
    few = how in ("two ranks", "batch over more", "micro-batches")
    assert sorted(exchanged(pm)) == ["items", "items"] + ["words"] * (not few)
    kinds = {row.kind for row in pm.report().communication.rows}
    assert {"id-exchange", "row-exchange"} <= kinds


@pytest.mark.long
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@pytest.mark.parametrize("more", ["alone", "clipped", "micro-batches", "in host memory"])
def test_exchanged_rows_are_stepped_as_on_one_device(name: str, more: str) -> None:
    hints: dict[str, Any] = {
        "alone": {},
        "clipped": {"clip_grad_norm": 0.5},
        "micro-batches": {"grad_accumulation": 2},
        "in host memory": {"offload": (sx.Offload("rows", min_numel=0),)},
    }[more]
    pm, alone = shop(sx.Mesh(dp=4), "dp", "dp", optimizer=OPTIMIZERS[name], **hints)
    theirs = OPTIMIZERS[name](alone.parameters())
    for seed in range(3):
        theirs.zero_grad()
        wanted = mean(alone(*visits(seed)))
        wanted.backward()
        if more == "clipped":
            for each in alone.parameters():
                assert each.grad is not None
                each.grad = each.grad.to_dense() if each.grad.is_sparse else each.grad
            nn.utils.clip_grad_norm_(alone.parameters(), 0.5)
        theirs.step()
        torch.testing.assert_close(pm.step(*visits(seed)), wanted.detach(), rtol=1e-12, atol=1e-12)
    state = pm.full_state_dict()
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    assert pm.verify() and bool(exchanged(pm)) == (more != "in host memory")
    assert any(given.pool == "host" for given in pm.planned.inputs) == (more == "in host memory")
    assert more in ("clipped", "micro-batches") or str(pm.rank_program(0)).count("update.rows") == 4


@pytest.mark.long
@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_of_sparse_gradients_is_that_of_dense_ones_outside_the_program(nesterov: bool) -> None:
    def momentum(params: Any) -> optim.Optimizer:
        return optim.SGD(params, lr=0.1, momentum=0.9, nesterov=nesterov)

    with pytest.raises(sx.Error, match="the step of SGD cannot be traced"):
        shop(sx.Mesh(dp=2), "dp", "dp", optimizer=momentum)
    torch.manual_seed(0)
    alone, specs = Shop(sparse=True).double(), {"args.0": "dp", "items.weight": "dp, -", "long.weight": "-, dp"}
    hints = sx.Hints(args=visits(), loss=mean, specs=specs)
    pm = sx.parallelize(deepcopy(alone), sx.Mesh(dp=2), hints, virtual=True)
    theirs, ours = momentum(alone.parameters()), momentum(pm.parameters())
    for seed in range(3):
        for model, each in ((alone, theirs), (pm, ours)):
            each.zero_grad()
            out = model(*visits(seed))
            (mean(out) if model is alone else out).backward()
            each.step()
    for key, value in pm.full_state_dict().items():
        torch.testing.assert_close(value, alone.state_dict()[key], rtol=1e-12, atol=1e-12)


def sparse_steps(pm: sx.ParallelModule, alone: nn.Module) -> None:
    """Steps of SparseAdam on the tables of both: several backwards a step, gradients kept and cleared in both ways, and
    a row that is looked up and has a gradient of zero."""
    pairs = list[tuple[nn.Module, list[optim.Optimizer]]]()
    for model in (alone, pm):
        of = dict(model.named_parameters())
        rest = [of.pop("linear.weight"), of.pop("linear.bias")]
        pairs.append((model, [optim.SparseAdam([*of.values()], lr=0.01), optim.SGD(rest, lr=0.1)]))
    for step, to_none in enumerate([True, None, False, True]):
        for model, optimizers in pairs:
            for each in optimizers if to_none is not None else ():
                each.zero_grad(set_to_none=bool(to_none))
            for seed in range(2 - step % 2):
                given = visits(2 * step + seed)
                given[0].masked_fill_(given[0] == 7, 8)
                given[1][5] = 7
                loss = model(*given)
                (mean(loss) if model is alone else loss).backward()
            for each in optimizers:
                each.step()
        saturated = pm.full_state_dict()
        if not step:
            saturated["items.weight"][7] = 1e3  # tanh has no slope there
            pm.load_full_state_dict(saturated), alone.load_state_dict(saturated)
    state, (table_adam, _) = pm.full_state_dict(), pairs[1][1]
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-12, atol=1e-12)
    kept, theirs = pm.full_optimizer_state_dict(table_adam), pairs[0][1][0].state_dict()
    for number, states in theirs["state"].items():
        torch.testing.assert_close(dict(kept["state"][number]), states, rtol=1e-12, atol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("table", ["dp, -", "-, dp"])
@pytest.mark.parametrize("how", ["two ranks", "four ranks", "micro-batches"])
def test_sparse_adam_of_ones_own_steps_touched_rows_as_on_one_device(how: str, table: str) -> None:
    pm, alone = shop(*EXCHANGES[how][:2], table, sparse=True)
    sparse_steps(pm, alone)
    assert pm.verify()


def test_sparse_adam_takes_no_dense_gradients_and_no_closure() -> None:
    pm, _ = shop(sx.Mesh(dp=2), "dp", "dp", sparse=True)
    pm(*visits()).backward()
    with pytest.raises(sx.Error, match=r"that of 'linear.weight' is dense(.|\n)*sparse=True"):
        optim.SparseAdam(pm.parameters()).step()
    with pytest.raises(sx.Error, match="before the step"):
        optim.SparseAdam([pm.items.weight]).step(lambda: 0.0)


@pytest.mark.long
def test_ids_without_room_run_again_with_more_bitwise_as_there() -> None:
    """Uniform ids, then more for one rank than twice the mean of a capacity of 1, and all for it."""
    pm, alone = shop(sx.Mesh(dp=4), "dp", "dp")
    larger = [shop(sx.Mesh(dp=4), "dp", "dp", passes=(EmbeddingTables(room=room),))[0] for room in (1, 2)]
    assert exchanged(larger[0]) and not exchanged(larger[1])
    for step in range(4):
        given = visits(step)
        if step == 1:
            given[1].masked_fill_(given[1] % 5 == 1, 0)
        elif step == 2:
            given[0].remainder_(200)
        check_step(pm, alone, mean, given, bound=1e-12, proven=step == 3)
        if step:
            each = larger[step > 1]
            for one in (pm, each):
                one.zero_grad()
            losses = [one(*given) for one in (pm, each)]
            assert torch.equal(*losses)
            for loss in losses:
                loss.backward()
            assert all(torch.equal(p.grad, q.grad) for p, q in zip(pm.parameters(), each.parameters(), strict=True))
        pm.zero_grad()
        alone.zero_grad()
        told = [text for text in pm.report().warnings if "room" in text]
        assert ["twice the mean" in "".join(told), "for all rows" in "".join(told)] == [step > 0, step > 1]


@pytest.mark.long
@pytest.mark.parametrize("by", ["rows", "sums", "columns"])
def test_a_step_sends_what_the_formula_says_and_holds_no_table(by: str) -> None:
    """Counted at run time: ids, and rows there and back. The peak is that of shards, and of rows."""
    rows, ranks, dim, size = (48000, 32000, 64000), 4, 8, 256
    model = DLRM["DLRM"](rows, dim, sparse=True).double()
    dense, ids, labels = batch(0, rows, size)
    options: dict[str, Any] = {"args": (dense, ids), "loss": LOSS, "targets": (labels,), "passes": SUMS[by == "sums"]}
    tables = BY_COLUMNS if by == "columns" else BY_ROWS
    hints = sx.Hints(specs=SPECS | tables, optimizer=SPARSE["SGD"], **options)
    pm = sx.parallelize(model, sx.Mesh(dp=ranks), hints, virtual=True)
    with count_collectives() as counts:
        pm.step(dense, ids, labels)
    sent = sum(count.nbytes for (kind, _), count in counts.items() if "all_reduce" not in kind)
    of_ids, of_rows = {"rows": (32 * ranks / size,) * 2, "sums": (1, 1), "columns": (1, 1 / ranks)}[by]
    assert sent == pytest.approx(3 * (ranks - 1) / ranks * size * (4 * of_ids + 16 * dim * of_rows), rel=0.05)
    assert pm.memory().peak <= 1.25 * sum(rows) * dim * 8 / ranks
    assert not any("room" in each for each in pm.report().warnings)


@pytest.mark.parametrize("wrong", [-1, 300])
@pytest.mark.parametrize("tables", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_an_id_beyond_the_table_is_an_error_at_the_call(tables: dict[str, str], wrong: int) -> None:
    pm, _ = plan(2, tables)
    dense, ids, labels = batch()
    ids[-1, 0] = wrong
    with pytest.raises(sx.Error, match=r"IndexError: index .*out of range"):
        pm(dense, ids, labels)


@pytest.mark.parametrize("wrong", [-1, 800])
def test_an_id_beyond_an_exchanged_table_is_an_error_and_nothing_is_stepped(wrong: int) -> None:
    pm, _ = shop(sx.Mesh(dp=2), "dp", "dp", optimizer=OPTIMIZERS["SGD"])
    given, before = visits(), pm.full_state_dict()
    given[1][-1, 0] = wrong
    with pytest.raises(sx.Error, match=r"IndexError: index .*out of range"):
        pm.step(*given)
    assert all(torch.equal(each, before[name]) for name, each in pm.full_state_dict().items())


class Tied(nn.Module):
    """A table that is a head, too."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(400, 6), nn.Linear(6, 400, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        made: Tensor = self.head(self.table(ids))
        return made


def test_a_tied_table_is_gathered_and_hints_that_disagree_on_it_are_an_error() -> None:
    model, ids = Tied().double(), torch.randint(0, 400, (8,))
    alone, specs = deepcopy(model), {"args.0": "dp", "table.weight": "dp, -"}
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(ids,), loss=squares, specs=specs), virtual=True)
    check_step(pm, alone, squares, (ids,), bound=1e-12)
    assert any(str(n.op) == "comm.all_gather" and n.operands[0].shape == (400, 6) for n in pm.planned.nodes)
    with pytest.raises(sx.Error, match=r"two hints disagree on %table\.weight"):
        sx.parallelize(
            model,
            sx.Mesh(dp=2),
            sx.Hints(args=(ids,), loss=squares, specs=specs | {"head.weight": "-, dp"}),
            virtual=True,
        )


def test_a_table_of_few_rows_is_gathered() -> None:
    """It takes fewer bytes than what is looked up in it."""
    model, ids = nn.Embedding(20, 6), torch.randint(0, 20, (64,))
    hints = sx.Hints(args=(ids,), loss=squares, specs={"args.0": "dp", "weight": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    assert not pm.planned.notes and pm.verify()


def check_refused(pm: sx.ParallelModule, mutations: Any, as_they_run: bool) -> set[str]:
    """Check that programs with each damage are refused, at two places; returns what was tried."""
    tried, programs = set[str](), Programs.of(pm, as_they_run)
    for mutation in mutations:
        for place, changed in programs.damaged(mutation, 2):
            tried.add(mutation.name)
            try:
                refused = not pm.verify({rank: program.module() for rank, program in changed.items()})
            except sx.Error:
                refused = True
            assert refused, f"{mutation.name} at {place}"
    return tried


@pytest.mark.long
def test_damaged_exchanges_are_refused() -> None:
    dense, ids, labels = batch(0, (800, 800, 800), 256)
    model = DLRM["DLRM"]((800, 800, 800), 8).double()
    hints = sx.Hints(args=(dense, ids), loss=LOSS, targets=(labels,), specs=SPECS | BY_ROWS)
    pm = sx.parallelize(model, sx.Mesh(dp=4), hints, virtual=True)
    tried = check_refused(pm, EXCHANGED, False)
    assert len(tried) == len(EXCHANGED), tried


@pytest.mark.long
def test_damaged_ids_of_gradients_are_refused() -> None:
    """Of one lookup of 128 ids, and one of 384: four times the first are as many."""
    pm, _ = shop(sx.Mesh(dp=2), "dp", "dp", sparse=True)
    assert len(check_refused(pm, OF_GRADIENTS, False)) == len(OF_GRADIENTS)


def test_a_capacity_that_is_none_is_an_error() -> None:
    for capacity in (-1, float("inf")):
        with pytest.raises(sx.Error, match="no capacity for ids"):
            EmbeddingTables(capacity=capacity)


@pytest.mark.long
@pytest.mark.parametrize("tables", [BY_ROWS, BY_COLUMNS], ids=["rows", "columns"])
def test_damaged_lookups_and_steps_of_rows_are_refused(tables: dict[str, str]) -> None:
    pm, _ = plan(2, tables, sparse=True, optimizer=SPARSE["Adagrad"])
    tried = check_refused(pm, LOOKUPS, False) | check_refused(pm, STEPS, True)
    assert len(tried) == (12 if tables is BY_ROWS else 9), tried
