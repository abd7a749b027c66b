"""What is offloaded beside the device: nothing changes but the memory, which is predicted in both pools, and proven."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import Phase
from shardfx.ir.ops.pools import transfer
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.text import parse_graph, print_graph
from shardfx.ir.text.printer import size_text
from shardfx.ir.timing.rank_tasks import StartTask, WaitTask, call_label, rank_tasks
from shardfx.ir.validate import validate_graph
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


@pytest.mark.slow
def test_what_is_offloaded_is_not_on_the_device() -> None:
    plain = blocks(optimizer=adamw).memory()
    states = 2 * plain.by_category["parameters"]
    assert plain.by_category["optimizer states"] == states + 8
    for offload, less, beside in (
        (("optimizer",), states, states),
        (("parameters",), 0.8 * states / 2, states / 2),
        (("activations",), 0.7 * plain.by_category["activations"], plain.by_category["activations"]),
    ):
        memory = blocks(optimizer=adamw, offload=away(*offload)).memory()
        assert plain.peak - memory.peak >= less and memory.host == pytest.approx(beside, rel=0.2), offload
    every = blocks(optimizer=adamw, offload=away()).memory()
    assert every.peak < 0.32 * plain.peak
    again = blocks(optimizer=adamw, offload=away("activations"), recompute="layers.*").memory()
    assert again.host < 0.2 * plain.by_category["activations"]  # what goes into the blocks alone


@pytest.mark.slow
def test_it_is_seen_in_pictures_reports_and_reasons(tmp_path: Path) -> None:
    pm = blocks(optimizer=adamw, offload=away())
    memory = pm.memory()
    drawn = memory.draw(tmp_path / "memory.svg").read_text()
    assert f"host memory: {size_text(memory.host)} at most" in drawn
    plain = blocks(optimizer=adamw).memory().draw(tmp_path / "plain.svg").read_text()
    assert "host memory" not in plain and plain.count("<path") < drawn.count("<path")
    pm.draw(tmp_path)
    assert "offload to the host, or fetch" in (tmp_path / "after.svg").read_text()
    report = pm.report()
    assert report.memory.host == pm.memory().host and "offloaded and fetched" in str(report)
    assert "memory.to_device moves 4.1 kB per rank" in str(pm.explain("layers.0.up.weight"))


@pytest.mark.long
def test_sources_of_copies_under_way_are_no_more_bytes_than_two_of_the_largest() -> None:
    pm = blocks(optimizer=adamw, offload=away("activations", "optimizer"))
    under_way, footprint = dict[fx.Node, int](), pm.memory().footprint
    last = {each.node: each.last for each in footprint.storages}
    largest = 0
    for place, node in enumerate(footprint.calls):
        if node.target in (transfer.to_host, transfer.put):
            source = node.args[-1]
            under_way[node] = node.meta["shardfx"].outs[0].local_bytes(pm.planned.mesh)
            largest = max(largest, under_way[node])
            assert sum(under_way.values()) <= 2 * largest
        elif node.target is transfer.stored:
            source = node.args[0].args[-1]
            del under_way[node.args[0]]
            if source.name.startswith("addmm"):
                assert last[source.meta["shardfx"]] == place, "it is freed behind the wait"
    assert not under_way


def _split_at_the_end_of_the_backward(pm: sx.ParallelModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """The fetches of states, those before the last product of the backward and those behind."""
    calls = pm.memory().footprint.calls
    planned = [node.meta.get("shardfx") for node in calls]
    end = max(i for i, p in enumerate(planned) if p is not None and p.phase is Phase.BACKWARD and is_heavy(p))
    fetches = [(i, node) for i, node in enumerate(calls) if node.target is transfer.to_device]
    return [node for i, node in fetches if i < end], [node for i, node in fetches if i > end]


@pytest.mark.long
@pytest.mark.parametrize("hints", [{}, {"zero": 1, "zero_min_numel": 0}, {"zero": 3, "zero_min_numel": 0}], ids=str)
def test_states_travel_during_the_backward(hints: dict[str, Any]) -> None:
    """So a step takes less time than what it computes and carries, one behind the other; and it does not wait at once
    for gradients that ranks reduce."""
    pm = blocks(optimizer=adamw, offload=away("optimizer"), machine="h100-dgx", bucket_mb=0.001, **hints)
    before, behind = _split_at_the_end_of_the_backward(pm)
    assert len(before) > 2 * len(behind)
    time = pm.report().time
    assert pm.timeline().step < time.compute + time.carrying
    memory, machine = pm.memory(), sx.Machine.load("h100-dgx")
    order = rank_tasks(memory.program, memory.footprint, machine, machine.connect(pm.mesh))
    waits = {each.call: i for i, each in enumerate(order) if isinstance(each, WaitTask)}
    starts = {each.call: i for i, each in enumerate(order) if isinstance(each, StartTask) and each.call is not None}
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


@pytest.mark.long
def test_parameters_that_lie_elsewhere_are_stepped_by_their_owner() -> None:
    """Gradients lie where their parameters do."""
    pms = [small_plan(None, MESHES["dp2"], **more) for more in ({}, {"offload": away("parameters")})]
    optimizers = [torch.optim.AdamW(pm.parameters(), lr=1e-2) for pm in pms]
    for x, y in batches(3):
        losses = []
        for pm, optimizer in zip(pms, optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(pm(x, y))
            losses[-1].backward()
            optimizer.step()
        assert torch.equal(*losses)


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


LARGE = """
import resource, sys, torch, shardfx as sx
wide = 2048
x = torch.randn(16, wide)
model = torch.nn.Sequential(*(torch.nn.Linear(wide, wide, bias=False, device="meta") for _ in range(6)))
away = [sx.Offload(("optimizer", "parameters"), to="disk", directory=sys.argv[1])] if len(sys.argv) > 1 else ()
adamw = lambda params: torch.optim.AdamW(params, lr=1e-5)
hints = sx.Hints(args=(x,), targets=(x,), loss=torch.nn.functional.mse_loss, optimizer=adamw, offload=away)
pm = sx.parallelize(model, sx.Mesh(dp=1), hints, virtual=True)
held = next(line for line in open("/proc/self/status") if line.startswith("VmData"))
most = int(held.split()[1]) * 1024 + 16 * wide * wide * 4
resource.setrlimit(resource.RLIMIT_DATA, (most, most))
pm.load_full_state_dict({f"{i}.weight": torch.eye(wide) for i in range(6)})
losses = [float(pm.step(x, x + 1)) for _ in range(3)]
assert losses[2] < losses[0], losses
"""


@pytest.mark.slow
def test_what_memory_does_not_hold_is_trained_from_files(tmp_path: Path) -> None:
    """Parameters and states of 18 blocks, and gradients of 6, in room for 16: anonymous memory is limited, files are
    not."""
    script = tmp_path / "large.py"
    script.write_text(LARGE, encoding="utf-8")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "1000000"}
    runs = [
        subprocess.run([sys.executable, str(script), *more], env=env, capture_output=True, text=True, check=False)
        for more in ([str(tmp_path)], [])
    ]
    assert runs[0].returncode == 0, runs[0].stderr
    assert runs[1].returncode != 0 and "allocate memory" in runs[1].stderr, runs[1].stderr


# ---- mistakes


@pytest.mark.parametrize(
    ("hints", "what"),
    [
        ({"offload": ("optimiser",)}, "Offload(what=...) is of another kind"),
        ({"offload": "optimizer"}, "a tuple of 'activations'"),
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
        ("%0 = aten.mul.Tensor(%w, %x) : f32[8]  shards -", "result results.0 = %0", "takes %w"),
        ("%0 = aten.relu(%w) : f32[8]  shards -", "result results.0 = %0", "%0 leaves in another pool"),
        ("%0 = memory.to_host(%x) : f32[8]", "result results.0 = %0", "leaves in another pool"),
        ("%0 = aten.relu(%x) : f32[8]  shards -", "gradient w = %0 : [8]", "leaves in another pool"),
        ("%0 = memory.to_host(%x, axes=[dp]) : f32[8]", "gradient w = %0 : [8]", "does not take the keyword axes"),
    ],
)
def test_a_graph_in_which_pools_are_mixed_up_is_none(nodes: str, gives: str, what: str) -> None:
    head = "mesh dp=2\nestablished COMM_EXPLICIT, SHARDED\nargument %x : f32[8]\nparameter %w : f32[8] in host\n"
    graph = parse_graph(f"{head}forward:\n  {nodes}\noutputs:\n  {gives}\n")
    with pytest.raises(sx.Error, match=what):
        validate_graph(graph)


@pytest.mark.parametrize("what", EVERY)
def test_inference_keeps_nothing(what: str) -> None:
    with pytest.raises(sx.Error, match="one for inference"):
        sx.parallelize(torch.nn.Linear(4, 4), sx.Mesh(dp=2), sx.Hints(args=(torch.ones(4, 4),), offload=(what,)))


@pytest.mark.slow
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


@pytest.mark.long
def test_that_nothing_is_large_enough_is_said() -> None:
    pm = blocks(optimizer=adamw, offload=("optimizer",))
    assert pm.memory().host == 0 and any("nothing of optimizer is offloaded" in note for note in pm.planned.notes)


def test_torch_compile_plans_the_memory_of_an_arena_itself() -> None:
    pm = blocks(arena=True)
    with pytest.raises(sx.Error, match="Hints\\(arena=True\\)"):
        pm.compile()


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
