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
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import validate_program
from shardfx.ir.text.printer import size_text
from shardfx.passes.rank import Arena
from tests.stepped import KINDS, batches, small_plan


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
def test_steps_are_the_same_to_the_bit_and_proven() -> None:
    plain, pm = arena_plans(3)
    for x, y in batches(3):
        assert torch.equal(plain.step(x, y), pm.step(x, y))
    known, found = plain.full_state_dict(), pm.full_state_dict()
    assert all(torch.equal(known[name], found[name]) for name in known)
    program = pm.rank_program(0)
    use = arena_use(program)
    assert use is not None and use.slots > 5 and use.live <= use.nbytes
    verdict = pm.verify()
    assert verdict and verdict.status == "proven"
    assert str(parse_program(str(program), pm.planned)) == str(program)
    text = " ".join(str(pm.report()).split())
    assert f"{use.slots} slots in one arena, of which {size_text(use.live)} are live at once" in text
    assert pm.memory().by_category["arena"] == use.nbytes


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
def test_slots_lie_in_their_arena_and_no_result_in_one() -> None:
    program = arena_plans(1)[1].rank_program(0)
    node = slots(program)[0]
    right: Any = node.args
    for begin in (8 * 10**6, 4, -64):
        node.args = (right[0], begin, *right[2:])
        assert "does not lie in its arena" in refused(program)
    node.args = right
    share = Aliasing(program.graph.nodes)
    places = {share.root(node) for node in slots(program)}
    *_, last = (node for node in program.graph.nodes if share.root(node) in places and node not in places)
    end = program.result()
    results: Any = end.args[0]
    end.args = ((last, *results[1:]),)
    assert "lies in an arena" in refused(program)
