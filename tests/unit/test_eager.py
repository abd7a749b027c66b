"""The eager form of a program: what is written into buckets, what is reduced where it lies, and what must not be."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx

import shardfx as sx
from shardfx.ir.graph import Output, OutputKind, Value
from shardfx.ir.ops import pack
from shardfx.ir.program.rank_program import Program
from shardfx.ir.spec import TensorType
from shardfx.runtime.distributed.buckets import Bucket, Pool, joined, spread
from shardfx.runtime.distributed.eager import Eager
from tests.plans import plan
from tests.zoo import make

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
CPU = torch.device("cpu")


def eager(write: Callable[[fx.Graph, fx.Node, fx.Node], tuple[fx.Node, ...]]) -> Eager:
    """The eager form of a program that a test writes, of inputs ``a`` and ``b``, with gradients as results."""
    graph = fx.Graph()
    results = write(graph, graph.placeholder("a"), graph.placeholder("b"))
    graph.output(results)
    value = Value(TensorType((2, 2), torch.float32))
    for node in graph.nodes:
        node.meta["shardfx"] = SimpleNamespace(outs=[value])
    outputs = tuple(Output(OutputKind.GRADIENT, str(i), value) for i in range(len(results)))
    return Eager(Program(fx.GraphModule(torch.nn.Module(), graph), (), outputs), CPU)


def reduced(graph: fx.Graph, x: Any) -> fx.Node:
    started = graph.call_function(c10d.all_reduce.default, (x, "sum", "dp2/dp@0"))
    return graph.call_function(c10d.wait_tensor.default, (started,))


def test_fresh_memory_is_reduced_where_it_lies() -> None:
    def write(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        product = graph.call_function(aten.mm.default, (a, b))
        return (reduced(graph, graph.call_function(aten.t.default, (product,))),)

    assert "_all_reduce_(_dense(t_default)" in eager(write).source


def test_an_input_is_not_reduced_where_it_lies() -> None:
    def write(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        return (reduced(graph, graph.call_function(aten.t.default, (a,))),)

    assert "_all_reduce(t_default" in eager(write).source


def test_what_is_used_later_is_not_reduced_where_it_lies() -> None:
    def write(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        product = graph.call_function(aten.mm.default, (a, b))
        seen = graph.call_function(aten.t.default, (product,))
        whole = reduced(graph, product)
        return whole, graph.call_function(aten.add.Tensor, (seen, whole))

    assert "_all_reduce(mm_default" in eager(write).source


def test_gradients_that_share_memory_are_copied() -> None:
    def write(graph: fx.Graph, a: fx.Node, b: fx.Node) -> tuple[fx.Node, ...]:
        product = graph.call_function(aten.mm.default, (a, b))
        return product, graph.call_function(aten.t.default, (product,)), graph.call_function(aten.t.default, (a,))

    made = eager(write)
    a, b = torch.rand(2, 2), torch.rand(2, 2)
    first, second, third = made(a, b)
    assert torch.equal(first.t(), second) and torch.equal(third, a.t())
    assert len({t.untyped_storage().data_ptr() for t in (first, second, third, a)}) == 4


def test_products_are_computed_into_their_bucket() -> None:
    case = make("gpt_fused")
    source = Eager(plan(case, sx.Mesh(dp=2))._program(0, True), CPU).source
    assert source.count("_mm_out(") >= 4 * 2 + 1
    assert "_flatten(" not in source and "_all_reduce(" not in source
    stored = plan(case, sx.Mesh(dp=2), specs={"layers.*.fc*.weight": "dp, -"})
    source = Eager(stored._program(0, True), CPU).source
    assert "_mm_pieces(" in source and "_joined(" in source


def test_a_bucket_is_lent_again_when_nobody_holds_a_part() -> None:
    bucket = Bucket([(2, 3), (4,)], 1, torch.float32, CPU)
    flat, views = bucket.take()
    assert [tuple(v.shape) for v in views] == [(2, 3), (4,)] and flat.numel() == 10
    handed = pack.unflatten(flat, [(2, 3), (4,)], 1)
    assert bucket.take()[0] is not flat
    del handed
    assert bucket.take()[0] is flat


def test_a_bucket_in_pieces_is_laid_out_as_flatten_lays_out() -> None:
    shapes, tensors = [(4, 3), (2,)], [torch.rand(4, 3), torch.rand(2)]
    flat, views = Bucket(shapes, 2, torch.float32, CPU).take()
    for view, tensor in zip(views, tensors, strict=True):
        view.copy_(tensor.view(view.shape))
    assert torch.equal(flat, pack.flatten(tensors, 2))


def test_neighbours_are_joined_without_a_copy() -> None:
    flat = torch.arange(10.0)
    a, b = flat[:6].view(2, 3), flat[6:]
    assert joined([a, b], 1).data_ptr() == flat.data_ptr()
    assert torch.equal(joined([a, b], 1), flat)
    assert torch.equal(joined([b, a], 1), torch.cat([b, a.reshape(-1)]))
    assert torch.equal(joined([a.t(), b], 1), torch.cat([a.t().reshape(-1), b]))


def test_a_pool_lends_what_nobody_holds_and_lets_go_of_what_is_not_asked_for() -> None:
    pool, like = Pool(), torch.zeros(1)
    first = pool.take(6, like).view(2, 3)
    second = pool.take(6, like).view(6)
    assert first.data_ptr() != second.data_ptr()
    at = first.data_ptr()
    del first
    assert pool.take(6, like).data_ptr() == at
    pool.next_step()
    assert pool.take(6, like).data_ptr() == at  # the second is held
    pool.next_step()
    del second
    assert [each.flat.data_ptr() for each in pool._kept] == [at]


def test_what_comes_apart_in_the_pool_is_what_layout_makes_of_it() -> None:
    shapes = [(4, 3), (2,), (6, 1, 2)]
    buffer = pack.flatten([torch.rand(shape) for shape in shapes], 2)
    for mine, other in zip(spread(Pool(), buffer, shapes, 2), pack.unflatten(buffer, shapes, 2), strict=True):
        assert torch.equal(mine, other)
