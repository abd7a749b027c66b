"""One memory for what a program makes for itself: right, proven; places that overlap are refused."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.aliasing import Aliasing
from shardfx.ir.program.arena_layout import (
    ALIGNMENT,
    BufferIntervals,
    Interval,
    arena_slots,
    arena_use,
    pack,
    peak_bytes,
)
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import validate_program
from shardfx.ir.text.printer import size_text
from shardfx.passes.rank import Arena
from tests.plans import plan
from tests.stepped import KINDS, batches, small_plan
from tests.zoo import make


def arena_plans(zero: int) -> tuple[sx.ParallelModule, sx.ParallelModule]:
    """A plan without an arena, and one with."""
    passes: tuple[list[Arena], ...] = ([], [Arena(least=16)])
    plain, pm = (small_plan(KINDS["AdamW"], sx.Mesh(dp=2), zero=zero, rank_passes=each) for each in passes)
    return plain, pm


def slots(program: RankProgram) -> list[fx.Node]:
    return [node for node in program.graph.nodes if node.target is memory_ops.slot]


@pytest.mark.parametrize("seed", range(20))
def test_blocks_that_are_there_at_once_do_not_overlap(seed: int) -> None:
    draw = random.Random(seed)
    blocks = []
    for _ in range(draw.randrange(1, 40)):
        born = draw.randrange(50)
        blocks.append(Interval(draw.randrange(1, 1000), born, born + draw.randrange(20)))
    packing, bound = pack(blocks), peak_bytes(blocks)
    assert bound <= packing.nbytes <= 1.5 * bound + ALIGNMENT
    for i, (mine, at) in enumerate(zip(blocks, packing.offsets, strict=True)):
        assert at % ALIGNMENT == 0 and at + mine.nbytes <= packing.nbytes
        for other, there in zip(blocks[:i], packing.offsets, strict=False):
            together = mine.born <= other.last and other.born <= mine.last
            assert not together or at + mine.nbytes <= there or there + other.nbytes <= at


@pytest.mark.long
@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.one_in(3)
def test_steps_are_the_same_to_the_bit_and_proven(zero: int) -> None:
    plain, pm = arena_plans(zero)
    for x, y in batches(3):
        assert torch.equal(plain.step(x, y), pm.step(x, y))
    known, found = plain.full_state_dict(), pm.full_state_dict()
    assert all(torch.equal(known[name], found[name]) for name in known)
    program = pm.rank_program(0)
    use = arena_use(program)
    assert use is not None and use.slots > 5 and use.live <= use.nbytes
    verdict = pm.verify()
    assert verdict and verdict.status == "proven"
    assert parse_program(str(program), pm.planned).graph.nodes.__len__() == len(program.graph.nodes)


@pytest.mark.long
def test_a_backward_of_ones_own_gives_gradients_that_lie_elsewhere() -> None:
    plain, pm = (small_plan(None, sx.Mesh(dp=2, tp=2), rank_passes=each) for each in ([], [Arena(least=16)]))
    for x, y in batches(2):
        for each in (plain, pm):
            each(x, y).backward()
        known, found = plain.full_grads(), pm.full_grads()
        assert known and all(torch.equal(known[name], found[name]) for name in known)
    assert slots(pm.rank_program(0)) and pm.verify()


@pytest.mark.long
def test_the_report_says_how_large_it_is_and_could_be() -> None:
    _, pm = arena_plans(1)
    use = arena_use(pm.rank_program(0))
    assert use is not None
    text = " ".join(str(pm.report()).split())
    assert f"{use.slots} slots in one arena, of which {size_text(use.live)} are live at once" in text
    assert pm.memory().by_category["arena"] == use.nbytes


@pytest.mark.slow
def test_what_is_made_in_iterations_has_no_place() -> None:
    turned = small_plan(KINDS["AdamW"], sx.Mesh(dp=2), zero=1, rank_passes=[Arena(least=16)], grad_accumulation=2)
    x, y = batches(1)[0]
    program = turned.rank_program(0)
    inside = regions(program.graph.nodes)
    assert slots(program) and not any(inside[node] for node in slots(program))
    assert turned.verify()
    assert torch.equal(
        turned.step(x, y), small_plan(KINDS["AdamW"], sx.Mesh(dp=2), zero=1, grad_accumulation=2).step(x, y)
    )
    units = sx.Mesh(mb=sx.Loop(2, interleave=True), tp=2)
    specs = {"args.0": "mb, -", "targets.0": "mb, -"}
    sharding = small_plan(KINDS["AdamW"], units, rank_passes=[Arena(least=16)], specs=specs)
    assert (
        torch.equal(sharding.step(x, y), small_plan(KINDS["AdamW"], units, specs=specs).step(x, y))
        and sharding.verify()
    )


@pytest.mark.long
def test_slots_that_are_live_at_once_do_not_overlap() -> None:
    """Each slot is moved onto each other one: what is refused is just what overlaps while both are live."""
    program = arena_plans(1)[1].rank_program(0)
    nodes = list(program.graph.nodes)
    there, live = arena_slots(nodes), BufferIntervals(nodes)
    spans = {node: interval for node in there if (interval := live.of(node, 1)) is not None}
    told = {True: 0, False: 0}
    assert spans.keys() == there.keys()
    for mine, other in permutations(there, 2):
        moved, slot, begin = program.copy(), there[mine], there[other].begin
        copied = next(node for node in moved.graph.nodes if node.name == mine.name)
        copied.update_arg(1, begin)
        slot = slot._replace(begin=begin, end=begin + slot.end - slot.begin)
        beside = (each for each in there if each is not mine and slot.overlaps(there[each]))
        together = any(spans[each].born <= spans[mine].last and spans[mine].born <= spans[each].last for each in beside)
        wrong = together or slot.end > slot.arena.args[0]  # type: ignore[operator]
        told[wrong] += 1
        assert bool(refused(moved)) == wrong, (mine, other, refused(moved))
    assert told[True] > 10 and told[False] > 10


def refused(program: RankProgram) -> str:
    """Why a program is not valid; empty where it is."""
    try:
        validate_program(program)
    except sx.Error as error:
        return error.what
    return ""


@pytest.mark.long
@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda args: (args[0], 8 * 10**6, *args[2:]), "does not lie in its arena"),
        (lambda args: (args[0], 4, *args[2:]), "does not lie in its arena"),
        (lambda args: (args[0], -64, *args[2:]), "does not lie in its arena"),
    ],
)
def test_a_place_lies_in_its_arena(change: Any, what: str) -> None:
    program = arena_plans(1)[1].rank_program(0)
    node = slots(program)[0]
    node.args = change(node.args)
    assert what in refused(program)


@pytest.mark.long
def test_nothing_leaves_in_an_arena() -> None:
    program = arena_plans(1)[1].rank_program(0)
    share = Aliasing(program.graph.nodes)
    places = {share.root(node) for node in slots(program)}
    *_, last = (node for node in program.graph.nodes if share.root(node) in places and node not in places)
    end = program.result()
    results: Any = end.args[0]
    end.args = ((last, *results[1:]),)
    assert "lies in an arena" in refused(program)


def test_an_arena_is_a_switch_of_the_hints() -> None:
    with pytest.raises(sx.Error, match="arena"):
        sx.Hints(arena="yes")  # type: ignore[arg-type]
    with pytest.raises(sx.Error, match="of another kind"):
        Arena(least=0)
    assert str(small_plan(None, sx.Mesh(dp=2), arena=True).rank_program(0)).count("memory.arena") <= 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:redundant compute", "ignore:the loop")
def test_what_iterations_put_side_by_side_may_lie_in_it() -> None:
    """Where iterations are gone through twice, for all must have come to a place before any goes on."""
    pm = plan(make("mlp3"), sx.Mesh(dp=3), optimizer=torch.optim.AdamW, grad_accumulation=3, arena=True)
    program = pm.rank_program(0)
    assert any(node.target is loop_ops.write and node.args[0].target is memory_ops.slot for node in program.graph.nodes)
    assert pm.verify(), pm.verify().why
