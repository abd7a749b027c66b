"""A dry run: one rank's program alone, on torch's ``fake`` process group; the order of its starts and waits.

Numbers of other ranks are missing, so results say nothing. Shapes, calls, memory, and what starts and waits when are
those of the rank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.graph import Node
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.loop import stage_transfer
from shardfx.ir.ops.traits import is_view
from shardfx.ir.program.loops.loop_regions import execution_order, loop_role
from shardfx.ir.timing.rank_tasks import link_of

RANKS, UNDER_WAY = 8, 2
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
    "tp": (sx.Mesh(tp=8), {"specs": TENSOR}),
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
def test_dry_run_does_what_the_program_of_the_rank_says(name: str, tmp_path: Path) -> None:
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
        _check_waits(done)
        _check_starts(done)
        if "update" not in name:
            assert all(p.grad is not None and p.grad.shape == p.shape for p in pm.parameters())


def _is_called(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is None or row.loop in ("", "collects")


def _check_waits(calls: Sequence[fx.Node]) -> None:
    """No wait stands before work that does not need it: what is computed next does, or it is a reduce-scatter that is
    waited for so that no more than a few are under way."""
    scatters = [node for node in calls if _is(node, "c10d.reduce_scatter_tensor")]
    for at, wait in enumerate(calls):
        if not _waits(wait):
            continue
        behind = {wait}
        for node in calls[at + 1 :]:
            needs = not behind.isdisjoint(node.all_input_nodes)
            if needs:
                behind.add(node)
            if node in scatters and wait.args[0] in scatters[: -UNDER_WAY or None]:
                later = scatters.index(node) - scatters.index(wait.args[0])  # type: ignore[arg-type]
                if later == UNDER_WAY:
                    break
            if moves_only(node) or _starts(node):
                continue
            assert needs, f"{wait} stands before {node}, which does not need it"
            break


def _check_starts(calls: Sequence[fx.Node]) -> None:
    """What is started is started right behind the last call that makes an operand; gathers of what is stored behind the
    first use of the gather before the last."""
    starts = [node for node in calls if _starts(node) and not _is(node, "stage.receive")]
    gathers = [node for node in starts if not _computed(node)]
    for start in starts:
        if start in gathers:
            continue
        made = _computed(start)
        between = []
        for node in reversed(calls[: calls.index(start)]):
            if node in made:
                break
            between.append(node)
        late = [node for node in between if not (moves_only(node) or _starts(node) or _waits(node))]
        assert not late, f"{start} could start before {late[-1]}"
    uses = [min(calls.index(user) for user in _users(gather)) for gather in gathers]
    for number, gather in enumerate(gathers):
        assert number < 2 or calls.index(gather) <= uses[number - 1]


def _computed(start: fx.Node) -> set[fx.Node]:
    """The calls that compute what is sent, behind views and packing."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    todo = list(start.all_input_nodes)
    while todo:
        node = todo.pop()
        if node in seen or node.op != "call_function":
            continue
        seen.add(node)
        if moves_only(node) and not _waits(node):
            todo += node.all_input_nodes
        else:
            found.add(node)
    return found


def _users(start: fx.Node) -> set[fx.Node]:
    """The calls that compute with what was started."""
    found: set[fx.Node] = set()
    todo = list(start.users)
    while todo:
        node = todo.pop()
        if moves_only(node) or _waits(node):
            todo += list(node.users)
        elif node.op == "call_function":
            found.add(node)
    return found


def moves_only(call: fx.Node) -> bool:
    """Whether a call takes negligible time: views, memory ops, unpacking of received values."""
    row = row_of(call.target)
    if row is not None and row.name != "update.segment":
        return row.moves or row.memory or row.shares or bool(loop_role(call))
    planned = call.meta.get("shardfx")
    return isinstance(planned, Node) and planned.op is call.target and is_view(planned)


def _starts(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is not None and row.starts


def _waits(node: fx.Node) -> bool:
    row = row_of(node.target)
    return row is not None and row.waits


def _is(node: fx.Node, name: str) -> bool:
    row = row_of(node.target)
    return row is not None and row.name == name


@pytest.mark.long
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-v", 2)])
def test_messages_from_rank_to_rank_are_received_in_the_order_in_which_they_are_sent(
    schedule: str, chunks: int
) -> None:
    """On NCCL messages have no tags: the n-th that is received is the n-th that was sent."""
    hints = sx.Hints(
        (X,), loss=F.cross_entropy, targets=(Y,), pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=chunks)
    )
    pm = sx.parallelize(Blocks(6), sx.Mesh(pp=3, mb=sx.Loop(6)), hints, virtual=True)
    sent, received = (defaultdict[tuple[int, int], list[Any]](list) for _ in range(2))
    for rank in range(3):
        program = pm.rank_program(rank)
        for node, iterations in execution_order([n for n in program.graph.nodes if n.op == "call_function"]):
            if node.target is stage_transfer.send:
                sent[rank, node.args[1]].append((node.args[2], iterations))  # type: ignore[index]
            elif node.target is stage_transfer.receive:
                received[node.args[3], rank].append((node.args[4], iterations))  # type: ignore[index]
    assert sent == received and len(sent) >= 4


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
@pytest.mark.parametrize("name", ["zero 3, tp, update", "zero 3, no buckets"])
def test_memory_of_a_collective_under_way_is_not_lent(name: str) -> None:
    """The fake group holds no tensor: it is the program that holds what is sent until its wait."""
    with alone(3):
        pm = planned(name)
        watch = InFlight()
        pm._watch = watch
        for _ in range(3):
            run(pm, name)
        assert watch.lent and watch.most > 1


@pytest.mark.long
def test_gathers_on_cuda_send_what_lies_side_by_side_and_keep_no_memory() -> None:
    specs = {"args.0": "dp, -", "layers.*.0.weight": "tp dp, -", "layers.*.2.weight": "dp, -"}
    with torch.device("meta"):
        model = Blocks()
    texts = {}
    for device in ("cpu", "cuda"):
        hints = sx.Hints((X,), loss=F.cross_entropy, targets=(Y,), device=device, specs=specs)
        texts[device] = str(sx.parallelize(model, sx.Mesh(dp=4, tp=2), hints, virtual=True).rank_program(3))
    assert all("memory.adjoin" in text for text in texts.values())
    assert "c10d.all_gather_into(" in texts["cpu"] and "c10d.all_gather_into(" not in texts["cuda"]


@pytest.mark.long
def test_a_dry_run_takes_the_part_of_the_batch_that_is_the_ranks() -> None:
    with alone(3):
        pm = planned("zero 3, no buckets")
        pm(X[24:32], Y[24:32]).backward()
        assert {tuple(p.grad.shape) for p in pm.parameters()} == {tuple(p.shape) for p in pm.parameters()}


@pytest.mark.long
def test_an_error_in_a_dry_run_is_that_of_the_rank() -> None:
    with alone(1):
        pm = planned("tp")
        with pytest.raises(sx.Error, match="expected"):
            pm(X[:, :4], Y)
