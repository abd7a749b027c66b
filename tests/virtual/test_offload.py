"""Offload to host memory, disk, and of tables of which rows are fetched: nothing changes but the memory, which is
predicted in both pools, and proven."""

from __future__ import annotations

import gc
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardfx as sx
from shardfx.ir.graph import InputKind, Phase
from shardfx.ir.ops.pools import transfer
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.text import parse_graph, print_graph
from shardfx.ir.text.printer import size_text
from shardfx.ir.timing.rank_tasks import call_label, rank_tasks
from shardfx.ir.validate import validate_graph
from shardfx.module.programs import STEP, TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.on_gpu import allocated
from tests.plans import MESHES, plan
from tests.stepped import KINDS, batches, small_plan
from tests.virtual.test_memory import blocks
from tests.zoo import make

EVERY = ("activations", "optimizer", "parameters")


def away(*what: str, **options: Any) -> tuple[sx.Offload, ...]:
    """All of it, however small."""
    return (sx.Offload(what or EVERY, **{"min_numel": 0, **options}),)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2)


def nadam(params: Any) -> torch.optim.Optimizer:
    """torch has no fused kernel of it, so that offload changes no kernel."""
    return torch.optim.NAdam(params, lr=1e-2)


@pytest.mark.long
def test_five_steps_are_the_same_to_the_bit() -> None:
    hints: dict[str, Any] = {"optimizer": nadam, "zero": 3, "zero_min_numel": 0}
    plain, other = (plan(make("mlp3"), MESHES["dp2"], **hints, **m) for m in ({}, {"offload": away(prefetch=2)}))
    case = make("mlp3")
    for seed in range(5):
        losses = []
        for pm in (plain, other):
            torch.manual_seed(seed)
            losses.append(pm.step(*case.args, *case.targets, **case.kwargs))
        assert torch.equal(*losses)
    torch.manual_seed(9)
    plain(*case.args, *case.targets, **case.kwargs).backward()
    torch.manual_seed(9)
    other(*case.args, *case.targets, **case.kwargs).backward()
    grads, state, full = plain.full_grads(), plain.full_state_dict(), plain.optimizer.full_state_dict()
    assert all(torch.equal(value, other.full_grads()[key]) for key, value in grads.items())
    assert all(torch.equal(value, other.full_state_dict()[key]) for key, value in state.items())
    theirs = other.optimizer.full_state_dict()["state"]
    for key, held in full["state"].items():
        assert all(torch.equal(torch.as_tensor(value), torch.as_tensor(theirs[key][of])) for of, value in held.items())
    assert other.verify(), other.verify().why
    assert other.memory().host > 0 == plain.memory().host
    assert parse_graph(print_graph(other.planned)).inputs[0].pool == other.planned.inputs[0].pool


@pytest.mark.long
def test_offloaded_values_leave_the_device_and_are_shown(tmp_path: Path) -> None:
    """In memory, its picture, that of the plan, the report and the explanation."""
    plain, pm = blocks(optimizer=adamw).memory(), blocks(optimizer=adamw, offload=away())
    memory, stored = pm.memory(), plain.by_category
    beside = stored["activations"] + 3 * stored["parameters"]
    assert memory.peak < 0.32 * plain.peak and memory.host == pytest.approx(beside, rel=0.2)
    drawn = memory.draw(tmp_path / "memory.svg").read_text()
    assert f"host memory: {size_text(memory.host)} at most" in drawn
    pm.draw(tmp_path)
    assert "offload to the host, or fetch" in (tmp_path / "after.svg").read_text()
    report = pm.report()
    assert report.memory.host == memory.host and "offloaded and fetched" in str(report)
    assert "memory.to_device moves 4.1 kB per rank" in str(pm.explain("layers.0.up.weight"))


def _split_at_the_end_of_the_backward(pm: sx.ParallelModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """The fetches of states, those before the last product of the backward and those behind."""
    calls = pm.memory().footprint.calls
    planned = [node.meta.get("shardfx") for node in calls]
    end = max(i for i, p in enumerate(planned) if p is not None and p.phase is Phase.BACKWARD and is_heavy(p))
    fetches = [(i, node) for i, node in enumerate(calls) if node.target is transfer.to_device]
    return [node for i, node in fetches if i < end], [node for i, node in fetches if i > end]


@pytest.mark.long
def test_states_travel_during_the_backward() -> None:
    """So a step takes less time than what it computes and carries, one behind the other; and it does not wait at once
    for gradients that ranks reduce."""
    pm = blocks(
        optimizer=adamw, offload=away("optimizer"), machine="h100-dgx", bucket_mb=0.001, zero=3, zero_min_numel=0
    )
    before, behind = _split_at_the_end_of_the_backward(pm)
    assert len(before) > 2 * len(behind)
    time = pm.report().time
    assert pm.timeline().step < time.compute + time.carrying
    memory, machine = pm.memory(), sx.Machine.load("h100-dgx")
    order = rank_tasks(memory.program, memory.footprint, machine, machine.connect(pm.mesh))
    waits = {each.call: i for i, each in enumerate(order) if each.kind == "wait"}
    starts = {each.call: i for i, each in enumerate(order) if each.kind == "start" and each.call is not None}
    labels = {call: call_label(call) for call in starts}
    reduced = [call for call, label in labels.items() if "reduce" in label and "layers" in label]
    assert len(reduced) > 4
    for first, second in pairwise(reduced):
        assert waits[first] > starts[second]
    assert pm.verify()


@pytest.mark.long
def test_states_are_saved_and_loaded() -> None:
    """In shards, whole, and into a plan that keeps them on the device."""
    first, same, other = (
        small_plan(KINDS["AdamW"], MESHES["dp2"], zero=1, **more)
        for more in ({"offload": away()}, {"offload": away(to="disk")}, {})
    )
    for x, y in batches(2):
        first.step(x, y)
    for pm in (same, other):
        pm.load_full_state_dict(first.full_state_dict())
    same.optimizer.load_state_dict(first.optimizer.state_dict())
    other.optimizer.load_full_state_dict(first.optimizer.full_state_dict())
    for x, y in batches(4)[2:]:
        losses = [pm.step(x, y) for pm in (first, same, other)]
        assert losses[0] == losses[1] == losses[2]


# ---- files


@pytest.mark.long
def test_files_go_with_what_lies_in_them(tmp_path: Path) -> None:
    kept = transfer.to_disk(torch.arange(6.0).reshape(2, 3).t(), str(tmp_path))
    assert kept.stride() == (1, 3) and torch.equal(kept, torch.arange(6.0).reshape(2, 3).t())
    assert not list(tmp_path.iterdir()), "it has no name"
    assert transfer.to_disk(torch.zeros(0, 3)).shape == (0, 3)
    with pytest.raises(OSError, match="nowhere"):
        transfer.to_disk(kept, str(tmp_path / "nowhere"))
    pm = blocks(optimizer=adamw, offload=away(to="disk", directory=str(tmp_path)))
    x = torch.randn(256, 16)
    pm.step(x, x)
    assert str(tmp_path) in Path("/proc/self/maps").read_text()
    del pm, kept
    gc.collect()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()


# ---- mistakes


@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ({"offload": ("optimiser",)}, "Offload(what=...) is not valid"),
        ({"offload": ("optimizer",)}, "an optimizer in the program"),
        ({"offload": away("activations", to="disk", directory="/nowhere")}, "a directory that exists"),
        ({"offload": away("activations", modules="layer.*")}, "matches none of the modules"),
    ],
    ids=str,
)
def test_mistakes_are_errors(hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error) as raised:
        blocks(**hints)
    assert what in str(raised.value)


@pytest.mark.parametrize(
    "options", [{"to": "tape"}, {"directory": "/tmp"}, {"prefetch": -1}, {"min_numel": 1.5}], ids=str
)
def test_options_that_are_none(options: dict[str, Any]) -> None:
    with pytest.raises(sx.Error, match="offload"):
        sx.Offload(**options)


@pytest.mark.parametrize(
    ("nodes", "gives", "what"),
    [
        (
            "%0 = memory.to_host(%x) : f32[8]\n  %1 = aten.add.Tensor(%0, %x) : f32[8]  shards -",
            "result results.0 = %1",
            "takes %0",
        ),
        (
            "%0 = memory.to_host(%x) : f32[8]\n  %1 = aten.relu(%0) : f32[8]  shards -",
            "result results.0 = %1",
            "%1 leaves in another pool",
        ),
        ("%0 = memory.to_host(%w) : f32[8]", "gradient w = %0 : [8]", "takes %w"),
        ("%0 = memory.to_device(%x) : f32[8]", "result results.0 = %0", "takes %x"),
        ("%0 = aten.relu(%w) : f32[8]  shards -", "result results.0 = %0", "%0 leaves in another pool"),
        ("%0 = memory.to_host(%x) : f32[8]", "result results.0 = %0", "leaves in another pool"),
        ("%0 = memory.to_host(%x, axes=[dp]) : f32[8]", "gradient w = %0 : [8]", "does not take the keyword axes"),
    ],
)
def test_a_graph_in_which_pools_are_mixed_up_is_none(nodes: str, gives: str, what: str) -> None:
    head = "mesh dp=2\nestablished COMM_EXPLICIT, SHARDED\nargument %x : f32[8]\nparameter %w : f32[8] in host\n"
    graph = parse_graph(f"{head}forward:\n  {nodes}\noutputs:\n  {gives}\n")
    with pytest.raises(sx.Error, match=what):
        validate_graph(graph)


def test_inference_keeps_nothing() -> None:
    with pytest.raises(sx.Error, match="one for inference"):
        sx.parallelize(
            torch.nn.Linear(4, 4), sx.Mesh(dp=2), sx.Hints(args=(torch.ones(4, 4),), offload=("activations",))
        )


@pytest.mark.long
def test_other_calls_fetch_what_lies_elsewhere(tmp_path: Path) -> None:
    """In evaluation, of another size, with gradients of results, watched for NaN, as files that need torch alone."""
    plain, pm = (small_plan(KINDS["AdamW"], MESHES["dp2"], **more) for more in ({}, {"offload": away()}))
    (x, y), *_ = batches(1)
    for each in (plain, pm):
        each.step(x, y)
    assert torch.equal(pm(x), plain(x)) and torch.equal(pm(x[:4]), plain(x[:4]))
    assert torch.equal(pm(x[:4], y[:4]), plain(x[:4], y[:4]))
    for each in (plain, pm):
        each(x).square().sum().backward()
    theirs = plain.full_grads()
    assert all(torch.equal(grad, theirs[name]) for name, grad in pm.full_grads().items())
    with pm.debug_nan():
        assert torch.equal(pm(x, y), plain(x, y))
    for each in (plain, pm):
        each.eval()
    assert torch.equal(pm(x), plain(x)) and pm.verify()
    pm.train()
    code = (pm.save_programs(tmp_path) / "rank0.py").read_text()
    assert "import transfer" in code and "transfer.to_device(" in code and (tmp_path / "transfer.py").exists()


def test_torch_compile_plans_the_memory_of_an_arena_itself() -> None:
    pm = blocks(arena=True)
    with pytest.raises(sx.Error, match="Hints\\(arena=True\\)"):
        pm.compile()


# ---- tables of which rows are fetched


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


def dampened(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.1)


def looked(mode: str = "sum", specs: dict[str, str] | None = None, tied: bool = False, **hints: Any) -> Any:
    torch.manual_seed(0)
    model, x, y = Looked(mode, tied).double(), torch.randint(0, 64, (8, 4)), torch.randint(0, 64, (8,))
    sharding = {"args.0": "dp, -", "targets.0": "dp"} if specs is None else specs
    given = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=sharding, **hints)
    return sx.parallelize(model, sx.Mesh(dp=2), given, virtual=True), x, y


@pytest.mark.long
@pytest.mark.parametrize(
    ("mode", "specs", "hints", "close"),
    [
        ("mean", None, {"optimizer": dampened}, 0.0),
        ("max", {}, {"optimizer": dampened}, 0.0),
        ("sum", None, {"optimizer": KINDS["Lamb"], "zero": 3, "zero_min_numel": 0}, 1e-9),
    ],
    ids=["mean", "max", "Lamb, zero 3"],
)
def test_bags_of_rows_and_steps_of_tables(
    mode: str, specs: dict[str, str] | None, hints: dict[str, Any], close: float
) -> None:
    """Up to rounding where norms are taken: steps of what lies on the device run over segments."""
    plain, other = (looked(mode, specs, offload=offload, **hints) for offload in ((), rows()))
    for _ in range(3):
        torch.testing.assert_close(*(pm.step(x, y) for pm, x, y in (plain, other)), rtol=close, atol=0)
    state = other[0].full_state_dict()
    torch.testing.assert_close(plain[0].full_state_dict(), state, rtol=close, atol=close / 1e3)
    assert other[0].verify(), other[0].verify().why


@pytest.mark.long
def test_a_step_brings_rows_alone() -> None:
    """No more of a table is ever on the device; here its vocabulary is sharded."""
    hints: dict[str, Any] = {
        "specs": {"emb.weight": "dp, -"},
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
    batch = 8 * 4
    assert sorted(storage.nbytes for storage in fetched) == [8, batch * 16 * 8], "a norm, and rows"
    assert {storage.node.phase for storage in fetched if storage.node} == {Phase.FORWARD, Phase.UPDATE}
    # of what lies on the device the fused update makes no temporaries
    assert plain.memory().peak - pm.memory().peak > 64 * 16 * 8 and "emb.weight" not in str(pm.memory())


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
        ({"offload": rows(), "grad_accumulation": 2}, "iterations over"),
    ],
    ids=str,
)
def test_rows_of_a_table_that_is_used_otherwise_are_an_error(hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error, match=what) as raised:
        looked(**{"specs": {"args.0": "dp, -", "targets.0": "dp"}, **hints})
    if "tied" in hints:
        assert "aten.mm" in str(raised.value.where) and "'parameters'" in str(raised.value.remedy)


def test_rows_of_files_are_not_fetched() -> None:
    with pytest.raises(sx.Error, match="looked up in the host's memory"):
        rows(to="disk")


# ---- on a GPU


@pytest.mark.gpu
def test_on_a_gpu_copies_run_beside_the_step() -> None:
    """From pinned memory, on a stream for each direction; what is computed stays the same."""
    plain, pm = (blocks(optimizer=adamw, device="cuda", **more) for more in ({}, {"offload": away(prefetch=4)}))
    x = torch.randn(256, 16, device="cuda")
    for _ in range(5):
        torch.testing.assert_close(plain.step(x, x), pm.step(x, x))
    theirs = plain.full_state_dict()
    for name, value in pm.full_state_dict().items():
        # Kernels of the update differ, and Adam divides a gradient near zero by its own size: a step is 1e-2.
        torch.testing.assert_close(value.cpu(), theirs[name].cpu(), rtol=1e-3, atol=1e-3)
    assert all(p.is_pinned() for p in pm.parameters())
    device = torch.device("cuda", torch.cuda.current_device())
    streams = {transfer._stream(device, to_host) for to_host in (True, False)} | {torch.cuda.current_stream()}
    assert len(streams) == 3
    mine, back = transfer.to_host(x), transfer.to_device(transfer.stored(transfer.to_host(x)), "cuda")
    assert torch.equal(transfer.arrived(mine), x.cpu()) and torch.equal(transfer.arrived(back), x)


@pytest.mark.gpu
def test_on_a_gpu_a_source_is_freed_in_stream_order() -> None:
    """Its memory is free behind the wait, not before, and what takes it then does not change the copy."""
    before = allocated()
    x = torch.arange(1 << 24, device="cuda")
    expected, away = x.cpu(), transfer.to_host(x)
    at, nbytes = x.data_ptr(), x.nbytes
    del x
    assert torch.cuda.memory_allocated() - before == nbytes
    transfer.stored(away)
    assert torch.cuda.memory_allocated() == before == torch.cuda.memory_stats()["active_bytes.all.current"]
    other = torch.full((1 << 24,), -1, device="cuda")
    assert other.data_ptr() == at and torch.equal(transfer.arrived(away), expected)
