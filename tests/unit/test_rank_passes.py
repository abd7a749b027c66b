"""Rank passes: what is computed into buckets, reduced where it lies, gathered into memory; and what must not be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import Graph, Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.program.plain import plain
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.spec import TensorType
from shardfx.passes.rank import GatherInto, InPlace, OwnOutputs, RankContext, RankPass, run_rank_passes
from shardfx.runtime.memory_pool import MemoryPool
from tests.plans import plan
from tests.rank_golden import CASES, FOLDER, made
from tests.rank_programs import GROUP, Call, Write, written
from tests.zoo import make

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
MESH = Mesh(dp=2)


def after(each: RankPass, write: Write) -> str:
    made = written(write)
    run_rank_passes(made, [each], RankContext(Graph(MESH)))
    return str(made.graph)


def reduced(call: Call, x: Any) -> fx.Node:
    return call(c10d.wait_tensor.default, call(c10d.all_reduce.default, x, "sum", GROUP))


@pytest.mark.parametrize("case", CASES)
def test_golden_texts(case: str) -> None:
    """If a change is meant: ``python -m tests.rank_golden`` writes them anew."""
    assert made(case) == (FOLDER / f"{case}.txt").read_text(encoding="utf-8")


@pytest.mark.long
def test_a_text_that_is_no_program_of_the_plan_is_an_error() -> None:
    pm = plan(make("mlp3"), MESH)
    text = str(pm.rank_program(0))
    for damaged, what in (
        (text.replace("program 1:", "program 9:"), "of another version"),
        (text.replace("dp=2", "dp=4"), "for another mesh"),
        (text.replace('"fc1.weight"', '"fc9.weight"'), "of another plan"),
        (text.replace("aten.relu", "aten.rulu"), "cannot be read"),
        (text.partition("return")[0], "cut short"),
    ):
        with pytest.raises(sx.Error, match=what):
            parse_program(damaged, pm.planned)


def fresh(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [reduced(call, call(aten.t.default, call(aten.mm.default, a, b)))]


def an_input(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    return [reduced(call, call(aten.t.default, a))]


def used_later(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    product = call(aten.mm.default, a, b)
    seen, full = call(aten.t.default, product), reduced(call, product)
    return [full, call(aten.add.Tensor, seen, full)]


def still_sent(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
    product = call(aten.mm.default, a, b)
    pair = product, call(aten.t.default, product)
    both = [call(c10d.all_reduce.default, x, "sum", GROUP) for x in pair]
    return [call(c10d.wait_tensor.default, x) for x in both]


@pytest.mark.parametrize(("write", "may"), {fresh: True, an_input: False, used_later: False, still_sent: False}.items())
def test_memory_that_nobody_else_needs_is_reduced_in_place(write: Write, may: bool) -> None:
    assert ("memory_ops.all_reduce_" in after(InPlace(), write)) is may


@pytest.mark.parametrize("made", [False, True])
def test_what_was_made_apart_is_not_taken_for_one_memory(made: bool) -> None:
    """A first result, joined with a later one, would else be read after "its" memory was written over."""

    def write(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        flat = call(pack.flatten, [call(aten.mm.default, x, b) for x in (a, b)] if made else [a, b], 1)
        flat.meta["shardfx"] = Node("comm.all_gather", [Value(TensorType((2, 2), torch.float32))], {}, [])
        return [flat]

    assert ("adjoin" in after(GatherInto(), write)) is not made


def test_gradients_that_share_memory_are_copied() -> None:
    def write(call: Call, a: fx.Node, b: fx.Node) -> list[fx.Node]:
        product = call(aten.mm.default, a, b)
        return [product, call(aten.t.default, product), call(aten.t.default, a)]

    made = written(write)
    run_rank_passes(made, [OwnOutputs()], RankContext(Graph(MESH)))
    a, b = torch.rand(2, 2), torch.rand(2, 2)
    first, second, third = made.module()(a, b)
    assert torch.equal(first.t(), second) and torch.equal(third, a.t())
    assert len({t.untyped_storage().data_ptr() for t in (first, second, third, a)}) == 4


@pytest.mark.long
def test_products_are_computed_into_their_bucket() -> None:
    case = make("gpt_fused")
    text = str(plan(case, sx.Mesh(dp=2)).rank_program(0))
    assert text.count("aten.mm.out(") >= 4 * 2 + 1
    assert "pack.flatten(" not in text and "c10d.all_reduce(" not in text
    text = str(plan(case, sx.Mesh(dp=2), specs={"layers.*.fc*.weight": "dp, -"}).rank_program(0))
    assert "memory.mm_shards(" in text and "memory.adjoin(" in text


@pytest.mark.long
def test_a_valid_program_computes_what_its_plain_form_does() -> None:
    case = make("mlp3")
    pm = plan(case, sx.Mesh(dp=2))
    programs = {rank: pm.rank_program(rank) for rank in range(2)}
    assert "memory." not in str(plain(programs[0])) and "memory." in str(programs[0])
    pm(*case.args, *case.targets).backward()
    mine = pm.full_grads()
    pm.zero_grad()
    pm.use({rank: plain(each).module() for rank, each in programs.items()})
    pm(*case.args, *case.targets).backward()
    assert all(torch.equal(mine[name], grad) for name, grad in pm.full_grads().items())


@dataclass(frozen=True)
class Spoil(RankPass):
    """Reads what was reduced in place, or iterations two collectives round."""

    name: ClassVar[str] = "spoil"
    how: str = "read"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        calls = [n for n in program.graph.nodes if n.target is memory_ops.all_reduce_]
        if self.how == "raise":
            raise KeyError("no such node")
        if self.how == "iteration":
            first, second = calls[:2]
            first.args, second.args = (first.args[0], *second.args[1:]), (second.args[0], *first.args[1:])
            second.update_arg(2, "dp2/tp@0")
            return True
        for user in list(next(iter(calls[0].users)).users):
            user.replace_input_with(next(iter(calls[0].users)), calls[0].args[0])
        return True


def test_a_rank_pass_that_breaks_a_program_is_named() -> None:
    for how, what in (
        ("read", "after rank pass 'spoil'"),
        ("iteration", "order of collectives"),
        ("raise", "KeyError"),
    ):
        pm = plan(make("mlp3"), MESH, rank_passes=[Spoil(how)])
        with pytest.raises(sx.Error, match=what) as caught:
            pm.rank_module(1)
        assert "'spoil'" in str(caught.value) and "rank 1" in str(caught.value)
    with pytest.raises(sx.Error, match="is not valid"):
        plan(make("mlp3"), MESH, rank_passes=[object()])


def test_a_rank_pass_that_stands_too_early_is_named() -> None:
    @dataclass(frozen=True)
    class Late(Spoil):
        name: ClassVar[str] = "late"
        requires: ClassVar[frozenset[str]] = frozenset({"WAITED"})

    graph = plan(make("mlp3"), sx.Mesh(dp=2)).planned
    with pytest.raises(sx.Error, match="rank pass 'late' stands too early") as caught:
        run_rank_passes(RankProgram(0, graph.mesh, fx.Graph(), (), ()), [Late()], RankContext(graph))
    assert (caught.value.expected, caught.value.got) == ("WAITED established before it", "nothing before it")


def test_a_pool_lends_what_nobody_holds_and_lets_go_of_what_is_not_asked_for() -> None:
    pool = MemoryPool()
    first, second = pool.empty([2, 3], torch.float32), pool.empty([6], torch.float32)
    assert first.data_ptr() != second.data_ptr()
    at = first.data_ptr()
    del first
    assert pool.empty([6], torch.float32).data_ptr() == at
    pool.next_step()
    assert pool.empty([6], torch.float32).data_ptr() == at  # the second is held
    pool.next_step()
    del second
    assert [each.flat.data_ptr() for each in pool._kept] == [at]


def test_neighbours_are_joined_without_a_copy() -> None:
    whole = torch.arange(10.0)
    a, b = whole[:6].view(2, 3), whole[6:]
    assert memory_ops.adjoin([a, b]).data_ptr() == whole.data_ptr()
    for pair in ([a, b], [b, a], [a.t(), b]):
        assert torch.equal(memory_ops.adjoin(pair), torch.cat([each.reshape(-1) for each in pair]))
