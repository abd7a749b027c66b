"""A dry run: one rank's program alone, on torch's ``fake`` process group.

Numbers of other ranks are missing, so results say nothing. Shapes, calls, memory, and what starts and waits when are
those of the rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.loops.loop_regions import execution_order
from shardfx.ir.timing.rank_tasks import link_of

RANKS = 8
X, Y = torch.randn(64, 8), torch.randint(0, 4, (64,))


class Blocks(nn.Module):
    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8)) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


TENSOR = {"layers.*.0.weight": "tp, -"}
PLANS: dict[str, tuple[sx.Mesh, dict[str, Any]]] = {
    "zero 3, tp, update": (
        sx.Mesh(dp=4, tp=2),
        {"zero": 3, "zero_min_numel": 1, "optimizer": torch.optim.AdamW, "specs": {"args.0": "dp, -", **TENSOR}},
    ),
    "zero 3, no buckets": (
        sx.Mesh(dp=8),
        {"zero": 3, "zero_min_numel": 1, "bucket_mb": 0, "specs": {"args.0": "dp, -"}},
    ),
    "pipeline": (sx.Mesh(pp=4, dp=2, mb=sx.Loop(4)), {"pipeline": sx.Pipeline(), "specs": {"args.0": "mb dp, -"}}),
}


@contextmanager
def alone(rank: int) -> Iterator[None]:
    """This process as one rank, without the others."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS)
    try:
        yield
    finally:
        dist.destroy_process_group()


def planned(name: str, **more: Any) -> sx.ParallelModule:
    mesh, hints = PLANS[name]
    return sx.parallelize(Blocks(), mesh, sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), **hints, **more))


def run(pm: sx.ParallelModule, name: str) -> None:
    if "update" in name:
        pm.step(X, Y)
    else:
        pm(X, Y).backward()


@pytest.mark.long
@pytest.mark.parametrize("name", PLANS)
def test_dry_run_calls_what_the_program_of_the_rank_says(name: str, tmp_path: Path) -> None:
    rank = 3
    with alone(rank):
        pm = planned(name)
        assert pm._this_rank == rank
        run(pm, name)
        with pm.record(tmp_path / "step.json") as recording:
            run(pm, name)
        done = [node for node, _ in recording._open[-1][rank].stamps]
        program = pm.rank_program(rank)
        wanted = [node for node, _ in execution_order([n for n in program.graph.nodes if n.op == "call_function"])]
        assert [str(node) for node in done] == [str(node) for node in wanted if _is_called(node)]
        assert (tmp_path / "step.json").exists() and recording.step > 0
        links = {link_of(node) for node in done if _starts(node) or _is(node, "stage.send")}
        assert {each.partition(",")[0] for each in links} == {axis.name for axis in pm.mesh.space}
        assert sum(map(_starts, done)) == sum(map(_waits, done)) > 0

        if "update" not in name:
            assert all(p.grad is not None and p.grad.shape == p.shape for p in pm.parameters())


def _is_called(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is None or row.loop in ("", "collects")


def _starts(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is not None and row.starts


def _waits(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is not None and row.waits


def _is(node: fx.Node, name: str) -> bool:
    row = row_of(node.target)
    return row is not None and row.name == name


class InFlight:
    """A watch that sees each memory that a program asks for, and what collectives read and write until they are waited
    for."""

    def __init__(self) -> None:
        self.reads: dict[fx.Node, set[int]] = {}
        self.lent = self.most = 0

    def watch(self, rank: int) -> InFlight:
        return self

    def inputs(self, inputs: Any, tensors: Any) -> None:
        """A step begins: nothing is under way."""
        assert not self.reads

    def __call__(self, node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        if _is(node, "memory.empty"):
            place = result.untyped_storage().data_ptr()
            busy = [str(start) for start, places in self.reads.items() if place in places]
            assert not busy, f"{node} is memory that {busy} read"
            self.lent += 1
        elif _waits(node):
            del self.reads[node.args[0]]  # type: ignore[arg-type]
        elif _starts(node):
            tensors = [x for x in (*operands, result) if isinstance(x, Tensor)]
            self.reads[node] = {x.untyped_storage().data_ptr() for x in tensors}
            self.most = max(self.most, len(self.reads))


@pytest.mark.long
def test_memory_of_a_collective_in_flight_is_not_reused() -> None:
    """The fake group holds no tensor: it is the program that holds what is sent until its wait."""
    name = "zero 3, tp, update"
    with alone(3):
        pm = planned(name)
        watch = InFlight()
        pm._watch = watch
        for _ in range(3):
            run(pm, name)
        assert watch.lent and watch.most > 1


@pytest.mark.long
def test_gathers_on_cuda_send_adjoining_shards_and_keep_no_memory() -> None:
    specs = {"args.0": "dp, -", "layers.*.0.weight": "tp dp, -", "layers.*.2.weight": "dp, -"}
    with torch.device("meta"):
        model = Blocks()
    texts = {}
    for device in ("cpu", "cuda"):
        hints = sx.Hints((X,), loss=F.cross_entropy, targets=(Y,), device=device, specs=specs)
        texts[device] = str(sx.parallelize(model, sx.Mesh(dp=4, tp=2), hints, virtual=True).rank_program(3))
    assert all("memory.adjoin" in text for text in texts.values())
    assert "c10d.all_gather_into(" in texts["cpu"] and "c10d.all_gather_into(" not in texts["cuda"]
