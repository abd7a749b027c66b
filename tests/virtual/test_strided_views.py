"""``as_strided`` and kernels that read memory: their operands may lie anywhere in a storage that others share."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import shardfx as sx
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rules.book import replicated, rule
from shardfx.ir.text.parser import parse_graph
from shardfx.ir.validate import validate_graph
from shardfx.runtime.verify.families import many_ranks
from tests.reference import check_step

aten = torch.ops.aten
F64 = torch.float64


def square(y: Tensor) -> Tensor:
    return y.square().sum()


class Views(nn.Module):
    """A product, and one with a strided view of a weight, so that both weights are gathered in one segment."""

    def __init__(self, view: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.w, self.v, self.u = (nn.Parameter(torch.randn(8, 8, dtype=F64)) for _ in range(3))
        self.view = view

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + x @ self.view(self.v, self.u).sum(1, keepdim=True) + x @ self.u


VIEWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "overlapping": lambda v, u: (v * 1).as_strided((8, 6), (3, 2), 3),
    "copy": lambda v, u: torch.as_strided_copy(v, (8, 7), (1, 8), 1),
    "scatter at 5": lambda v, u: torch.as_strided_scatter(v.detach().t(), u[:3, :4], (3, 4), (1, 9), 5) + v,
    "slice": lambda v, u: v[2:].as_strided((8, 6), (5, 1), 17),
}


def planned(model: nn.Module, *args: Tensor, dp: int = 2, **hints: Any) -> sx.ParallelModule:
    given: dict[str, Any] = {"args": args, "specs": {"args.0": "dp" + ", -" * (args[0].dim() - 1)}, "loss": square}
    return sx.parallelize(model, sx.Mesh(dp=dp), sx.Hints(**given | hints), virtual=True)


def check(model: nn.Module, x: Tensor, pm: sx.ParallelModule) -> None:
    check_step(pm, model, square, (x,), bound=1e-12)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "where"), [*((name, "segment") for name in VIEWS), ("slice", "arena"), ("overlapping", "meta")]
)
def test_strided_view_of_a_gathered_weight_matches_single_device(name: str, where: str) -> None:
    torch.manual_seed(0)
    model, x = Views(VIEWS[name]), torch.randn(4, 8, dtype=F64)
    given = copy.deepcopy(model).to("meta") if where == "meta" else copy.deepcopy(model)
    pm = planned(given, x, zero=3, zero_min_numel=1, arena=where == "arena")
    if where == "meta":
        pm.load_full_state_dict(model.state_dict())
    check(model, x, pm)


class Overlapping(nn.Module):
    """Windows that overlap, of a tensor that is not contiguous: torch writes the backward with ``as_strided``."""

    def __init__(self) -> None:
        super().__init__()
        self.e, self.q, self.o = (nn.Linear(a, b, dtype=F64) for a, b in ((8, 8), (8, 8), (4, 64)))

    def forward(self, x: Tensor) -> Tensor:
        h = self.q(self.e(x).tanh().transpose(0, 1)).view(8, 8, 4).transpose(0, 1)
        return torch.tanh(self.o(h.as_strided((8, 3, 4, 4), (4, 64, 32, 1))).view(4, 2, 3, 4, 64))


@pytest.mark.long
def test_gradients_of_overlapping_windows_match_single_device() -> None:
    torch.manual_seed(0)
    model, x = Overlapping(), torch.randn(4, 8, 8, dtype=F64)
    check(model, x, planned(copy.deepcopy(model), x))


STRIDED = """
mesh dp=2
argument %x : f32[8, 4]
forward:
  %0 = aten.as_strided(%x, [4, 4], [1, 4]OFFSET) : f32[4, 4]
outputs:
  result results.0 = %0
"""


def test_storage_offset_is_refused_in_a_graph() -> None:
    validate_graph(parse_graph(STRIDED.replace("OFFSET", "")))
    for offset in (", 0", ", 4"):
        with pytest.raises(sx.Error, match=r"as_strided has a storage offset(.|\n)*expected: *storage_offset None"):
            validate_graph(parse_graph(STRIDED.replace("OFFSET", offset)))


@pytest.mark.long
def test_storage_offset_is_refused_in_a_rank_program() -> None:
    torch.manual_seed(0)
    pm = planned(Overlapping(), torch.randn(4, 8, 8, dtype=F64))
    module = pm.rank_module(0)
    node = next(n for n in module.graph.nodes if n.target is aten.as_strided.default)
    node.args = (*node.args, 0)
    module.recompile()
    verdict = pm.verify(modules={0: module})
    assert verdict.status == "refuted" and "storage offset" in verdict.why and node.name in verdict.why


def test_operands_of_a_trial_lie_in_a_larger_storage() -> None:
    """A kernel that reads from the begin of the storage is refuted, though on operands of their own it is right."""
    of = instance(aten.as_strided.default, (torch.randn(4, 6, dtype=F64), [3, 2], [1, 3], 2))
    entry = rule(aten.as_strided, lambda node: replicated(node, "0"))
    assert refutations(entry, of)
    relative = instance(aten.as_strided.default, (of.tensors[0], [3, 2], [1, 3]))
    assert not refutations(entry, relative)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.o = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return torch.as_tensor(self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))


def transposed(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.transpose.int, (x, -1, -2))


def column_major(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return transposed(graph, graph.call_function(aten.contiguous.default, (transposed(graph, x),)))


def row_major(graph: fx.Graph, x: fx.Node) -> fx.Node:
    return graph.call_function(aten.contiguous.default, (column_major(graph, x),))


FLASH = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


@pytest.mark.long
@pytest.mark.parametrize(
    ("op", "layout", "status", "every"),
    [
        (FLASH, row_major, "proven", 16),
        (FLASH, column_major, "refuted", 16),  # the kernel misreads it
        (FLASH, column_major, "refuted", 1),
        (BACKWARD, column_major, "unknown", 16),  # the kernel takes it, which its row does not say
    ],
    ids=["row major", "column major", "column major, as on many ranks", "column major, backward"],
)
def test_a_kernel_is_proven_on_the_operand_layout_of_its_row_alone(
    op: Any, layout: Any, status: str, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many_ranks, "EVERY", every)
    torch.manual_seed(0)
    pm = planned(Attention(), torch.randn(4, 6, 16))
    module = pm.rank_module(0)
    node = next(n for n in module.graph.nodes if n.target is op.default)
    with module.graph.inserting_before(node):
        node.args = (layout(module.graph, node.args[0]), *node.args[1:])
    module.recompile()
    verdict = pm.verify(modules={0: module})
    assert verdict.status == status
    assert verdict or ("takes operands contiguous in last dim" in verdict.why and node.name in verdict.why)


class Wider(nn.Module):
    """Complex numbers, or integers, read from a weight that is gathered behind one of 81 elements."""

    def __init__(self, wide: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(9, n, dtype=dtype)) for n in (9, 2))
        self.wide = wide

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a) @ self.wide(self.b)


@pytest.mark.long
@pytest.mark.parametrize(
    ("wide", "dtype"),
    [
        (lambda b: torch.view_as_complex(b).square().real, F64),
        (lambda b: b.sum(1) + b.detach().view(torch.int64).sum(1) % 8, torch.float32),
    ],
    ids=["complex", "int64 of float32"],
)
def test_wider_numbers_of_a_weight_at_an_odd_offset_match_single_device(
    wide: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    model, x = Wider(wide, dtype), torch.randn(6, 9, dtype=dtype)
    pm = planned(copy.deepcopy(model), x, dp=3, zero=3, zero_min_numel=1)
    torch.testing.assert_close(pm(x), square(model(x)))
    assert pm.verify()
