"""What ranks do with their programs: run, change, compile and save them (see :mod:`.workers`)."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import shardfx as sx
from shardfx.ir.cost import calibrate, probes
from shardfx.runtime.distributed import groups, shm
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import MESHES, plan, stored_specs
from tests.printed import check_printed, noting_programs
from tests.reference import rel_err
from tests.zoo import make

from .workers import WORKERS, worker

__all__ = ["WORKERS"]
c10d = torch.ops._c10d_functional


def step(pm: sx.ParallelModule, name: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and whole gradients of a step."""
    case = make(name)
    pm.zero_grad()
    loss = pm(*case.args, *case.targets, **case.kwargs)
    loss.backward()
    return loss.detach(), pm.full_grads()


def same(a: tuple[torch.Tensor, dict[str, torch.Tensor]], b: tuple[torch.Tensor, dict[str, torch.Tensor]]) -> bool:
    return rel_err(a[0], b[0]) < 1e-12 and all(rel_err(a[1][n], g) < 1e-12 for n, g in b[1].items())


@worker
def saves_programs(name: str, folder: str) -> None:
    """Each rank writes its own file, and what it writes computes what the plan computes."""
    case = make(name)
    pm = plan(case, MESHES["tp2"])
    pm.save_programs(folder)
    dist.barrier()
    sys.path.insert(0, folder)
    rank = dist.get_rank()
    program = importlib.import_module(f"rank{rank}")
    state = torch.load(f"{folder}/rank{rank}.pt", weights_only=True)
    with torch.no_grad():
        results = dict(zip(program.OUTPUTS, program.forward(*[state[n] for n in program.INPUTS]), strict=True))
    loss = pm(*case.args, *case.targets)
    loss.backward()
    assert results["loss:loss"].item() == loss.item()
    for name, parameter in pm.named_parameters():
        assert torch.equal(results[f"gradient:{name}"], pm._state.store._shards[name].unwrap(parameter.grad)), name


@worker
def runs_what_is_printed(name: str, mesh: str, stored: str = "") -> None:
    """The engine is given the program that ``rank_program`` prints, and holds what the report predicts."""
    case = make(name)
    with noting_programs() as ran:
        pm = plan(case, MESHES[mesh], specs=stored_specs(case) if stored else {})
        held = held_in_a_step(pm, case)
    check_printed(pm, ran)
    ((rank, mine),) = held.items()
    found = check_footprint(pm.rank_program(rank), mine, exact=False, ahead=pm._target.ahead_here)
    assert rank or pm.report().memory.footprint.peak == found.peak


@contextmanager
def on_gloo() -> Iterator[None]:
    """Groups of programs on gloo, as if no two ranks were on one machine."""
    known, connect = dict(groups._made), shm.connect
    for name in [name for name in known if name != groups.CPU_GROUP]:
        groups._unregister_process_group(name)
        del groups._made[name]
    shm.connect = lambda *_: []
    try:
        yield
    finally:
        shm.connect = connect
        for name, group in known.items():
            if groups.find_group(name) is not None:
                groups._unregister_process_group(name)
            groups._register(name, group)


@worker
def shared_memory_does_what_gloo_does() -> None:
    """Every kind of collective, several under way at once, small ones and those that are shared out."""
    groups.initialise(torch.device("cpu"))
    assert dist.get_backend() == shm.NAME
    n, rank = dist.get_world_size(), dist.get_rank()
    mesh, generator = sx.Mesh(dp=n), torch.Generator().manual_seed(rank)
    groups.make_groups(mesh, [("dp",)])
    near = mesh.group_name(rank, ("dp",))
    assert all(groups.share_memory())
    far = dist.new_group(backend="gloo").group_name
    sent = [(rank + to) % 2 for to in range(n)]
    received = [(of + rank) % 2 for of in range(n)]
    wait = c10d.wait_tensor
    for rows in (n, 3 * n, 17 * n * shm.LARGE // 64):
        x = torch.randn(rows, 7, generator=generator)
        given = [x, x.double(), x.bfloat16(), (x * 9).long(), x.expand(2, *x.shape)[1]]
        given = given[:1] if rows > 100 * n else given  # what is shared out takes a while
        flat = shm.shared_bytes(x.nbytes).view(x.dtype).view(x.shape)
        for each in given:
            for op in ("sum", "max", "min", "product", *(["avg"] if each.dtype.is_floating_point else [])):
                exchanged = each[: sum(sent)].contiguous()
                started = [
                    c10d.all_reduce(each, op, near),
                    c10d.reduce_scatter_tensor(each, op, n, near),
                    c10d.all_gather_into_tensor(each, n, near),
                    c10d.all_reduce_(flat.copy_(x), "sum", near),
                    c10d.all_to_all_single(exchanged, received, sent, near),
                ]
                summed = wait(c10d.all_reduce(each, op, far))
                everyone = wait(c10d.all_gather_into_tensor(wait(c10d.all_reduce(x, "sum", far)), n, far))
                expected = [
                    summed,
                    summed.chunk(n)[rank],
                    wait(c10d.all_gather_into_tensor(each, n, far)),
                    everyone.chunk(n)[rank],
                    wait(c10d.all_to_all_single(exchanged, received, sent, far)),
                ]
                tolerance = {"rtol": 2e-2, "atol": 1e-1} if each.dtype is torch.bfloat16 else {}
                for begun, right in reversed(list(zip(started, expected, strict=True))):
                    torch.testing.assert_close(wait(begun), right, **tolerance)
                joined = wait(c10d.all_gather_into_tensor(flat, n, near))
                assert all(torch.equal(part, flat) for part in joined.chunk(n))
    assert wait(c10d.all_reduce(torch.tensor(2.0), "sum", near)) == 2 * n
    assert wait(c10d.all_reduce(torch.ones(0), "sum", near)).shape == (0,)
    for i in range(40):  # gloo's threads let go of tensors meanwhile
        root = torch.full((500,), float(rank + i))
        assert bool((wait(c10d.broadcast(root, i % n, near)) == i % n + i).all())
    truths = torch.tensor([rank == 0, True, False])
    assert wait(c10d.all_reduce(truths, "max", near)).tolist() == [True, True, False]


@worker
def torchs_own_calls_work_in_shared_memory() -> None:
    """Of a job whose process group it is: objects, DTensors, DDP, messages in another order."""
    groups.initialise(torch.device("cpu"))
    n, rank = dist.get_world_size(), dist.get_rank()
    every: list[object] = [None] * n
    dist.all_gather_object(every, {"rank": rank})
    assert every == [{"rank": i} for i in range(n)]
    pair = torch.empty(2)
    dist.reduce_scatter_tensor(pair, torch.arange(2.0 * n))
    assert torch.equal(pair, n * torch.tensor([2.0 * rank, 2.0 * rank + 1]))
    if rank == 0:
        sent = [dist.isend(torch.full((tag,), float(tag)), 1, tag=tag) for tag in (3, 8, 3)]
        for work in sent:
            assert work is not None
            work.wait()
    elif rank == 1:
        for tag in (8, 3, 3):
            dist.recv(got := torch.empty(tag), 0, tag=tag)
            assert bool((got == tag).all())
    whole = torch.arange(8.0).view(4, 2)
    assert torch.equal(distribute_tensor(whole, init_device_mesh("cpu", (n,)), [Shard(0)]).full_tensor(), whole)
    model = torch.nn.Linear(4, 4)
    torch.nn.parallel.DistributedDataParallel(model)(torch.randn(2, 4)).sum().backward()
    assert model.weight.grad is not None
    dist.all_gather_object(every, model.weight.grad.tolist())
    assert every == every[:1] * n
    dist.barrier()


@worker
def runs_compiled_and_changed(name: str, mesh: str) -> None:
    """``pm.compile`` and ``pm.use`` give the same numbers."""
    pm = plan(make(name), MESHES[mesh])
    expected = step(pm, name)
    pm.use({rank: pm.rank_module(rank) for rank in range(dist.get_world_size())})
    assert same(step(pm, name), expected)
    pm = plan(make(name), MESHES[mesh])
    pm.compile(backend="aot_eager")
    assert "memory." not in str(pm.rank_program(dist.get_rank()))
    assert same(step(pm, name), expected)


@worker
def measures_links() -> None:
    """All ranks measure one machine, the same on each, with a link that a mesh may have; roughly, and with figures that
    a machine may have."""
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    calibrate.LARGEST, calibrate.GATHERED, calibrate.RUNS = 256, 1 << 20, 1
    probes.RING, probes.PASSES = {"cpu": 1 << 18}, 1
    machine = sx.Machine.measure("cpu")
    (level,) = machine.links
    assert level.name == "measured" and f"among {dist.get_world_size()} ranks" in machine.source
    assert 1e6 < level.link.bandwidth < 1e12 and 1e-6 < level.link.latency < 1
    found: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(found, machine)
    assert found == [machine] * len(found), "all plan for the same"
    assert machine.connect(sx.Mesh(dp=2))["dp"].link == level.link
    assert 1e8 < machine.bandwidth < 1e13 and {"float64", "float32", "bfloat16"} <= set(machine.flops)
    assert sx.Machine.parse(machine.json()) == machine


@worker
def records_steps(name: str, mesh: str, folder: str) -> None:
    """All ranks know what each of them did, by one clock; the first one writes it."""
    case, path = make(name), Path(folder) / "measured.json"
    pm = plan(case, MESHES[mesh])
    with pm.record(path) as recording:
        for _ in range(2):
            pm(*case.args, *case.targets, **case.kwargs)
    assert [sorted(each.rows) for each in recording.steps] == [list(range(pm.mesh.size))] * 2
    for each in recording.steps:
        assert {" ".join(str(action) for action, _ in row if action.kind != "U") for row in each.rows.values()} == {
            "F0.0 B0.0"
        }
        begins, ends = zip(*((row[0][1].start, row[-1][1].end) for row in each.rows.values()), strict=True)
        assert each.span.start <= min(begins) <= max(begins) < min(ends)  # for they wait for one another
    if dist.get_rank() == 0:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        assert {event["tid"] for event in events if event["ph"] == "X"} == set(range(pm.mesh.size))
    report = pm.report()
    assert report.measured is recording
    assert report.as_measured == report.time.step
