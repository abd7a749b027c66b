"""Masks and repeated heads that are read from a graph as arguments of attention, and those that must not be."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import check_step

T, F64 = 6, torch.float64
LOWEST = torch.finfo(F64).min


def rows_and_columns() -> tuple[Tensor, Tensor]:
    return torch.arange(T)[:, None], torch.arange(T)[None, :]


def causal() -> Tensor:
    rows, columns = rows_and_columns()
    return columns <= rows


def window(width: int) -> Tensor:
    rows, columns = rows_and_columns()
    return causal() & (columns > rows - width)


def distance() -> Tensor:
    rows, columns = rows_and_columns()
    return columns - rows


def by_head() -> Tensor:
    return causal() & (distance() > torch.arange(4)[:, None, None] - 4)


def packed(lengths: list[int]) -> Tensor:
    """Positions that begin anew make another document, as in transformers."""
    positions = torch.cat([torch.arange(length) for length in lengths])
    documents = (torch.diff(positions, prepend=positions[:1] - 1) != 1).cumsum(0)
    return causal() & (documents[:, None] == documents[None, :])


def filled_beside_a_view() -> Tensor:
    zeros = torch.zeros(T, T, dtype=F64)
    view = zeros.T
    zeros.masked_fill_(~causal(), -torch.inf)
    return view.T


MASKS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "compared positions": (causal, "causal"),
    "in four dims": (lambda: causal()[None, None].expand(2, 1, T, T), "causal"),
    "tril": (lambda: torch.ones(T, T, dtype=torch.bool).tril(), "causal"),
    "triu, negated": (lambda: ~torch.ones(T, T, dtype=torch.bool).triu(1), "causal"),
    "infinite numbers above": (lambda: torch.full((T, T), -torch.inf, dtype=F64).triu(1), "causal"),
    "lowest numbers above": (lambda: torch.where(causal(), 0.0, LOWEST).to(F64), "causal"),
    "filled": (lambda: torch.zeros(T, T, dtype=F64).masked_fill(~causal(), -torch.inf), "causal"),
    "a window of all": (lambda: window(T), "causal"),
    "one document": (lambda: packed([T]), "causal"),
    "filled in place": (lambda: torch.zeros(T, T, dtype=F64).masked_fill_(~causal(), -torch.inf), "causal"),
    "filled in place beside a view": (lambda: filled_beside_a_view(), "dense"),
    "last rows looked up": (lambda: causal()[torch.arange(T) - T // 2], "dense"),
    "ones": (lambda: torch.ones(T, T, dtype=torch.bool), "full"),
    "a window": (lambda: window(3), "causal 2 0"),
    "a window of all but one": (lambda: window(T - 1), "causal 4 0"),
    "itself alone": (lambda: window(1), "causal 0 0"),
    "a window by lowest numbers": (lambda: torch.where(window(3), 0.0, LOWEST).to(F64), "causal 2 0"),
    "a window, filled": (lambda: torch.zeros(T, T, dtype=F64).masked_fill(~window(3), -torch.inf), "causal 2 0"),
    "a window to both sides": (lambda: distance().abs() <= 2, "full 2 2"),
    "a window, negated": (lambda: ~(distance().abs() >= 3), "full 2 2"),
    "a band": (lambda: torch.ones(T, T, dtype=torch.bool).triu(-1).tril(2), "full 1 2"),
    "two windows": (lambda: window(4) & window(2), "causal 1 0"),
    "outside a window": (lambda: distance().abs() > 2, "dense"),
    "a window by head": (lambda: by_head(), "dense"),
    "two documents": (lambda: packed([2, T - 2]), "causal ids"),
    "strictly before, and itself by or": (lambda: causal().logical_or(causal().mT), "dense"),
    "from itself on": (lambda: causal().transpose(0, 1), "full 0 5"),
    "one more": (lambda: torch.ones(T, T, dtype=torch.bool).tril(1), "full 5 1"),
    "strictly before, by lowest numbers": (
        lambda: torch.zeros(T, T, dtype=F64).masked_fill(distance() >= 0, LOWEST),
        "dense",
    ),
    "strictly before": (lambda: torch.ones(T, T, dtype=torch.bool).tril(-1), "full 5 -1"),
    "finite numbers above": (lambda: torch.full((T, T), -1.0, dtype=F64).triu(1), "dense"),
    "numbers below": (lambda: torch.full((T, T), -torch.inf, dtype=F64).tril(-1), "full 0 5"),
}


class Attention(nn.Module):
    """Attention of 4 query heads with 2 key heads, by a mask and a way to repeat the heads."""

    def __init__(self, mask: Callable[[], Tensor], repeat: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.qkv, self.mask, self.repeat = nn.Linear(8, 16, dtype=F64), mask, repeat

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(x).split([8, 4, 4], -1))
        return F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), self.mask())


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def interleaved(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, 1)


def captured(mask: Callable[[], Tensor], repeat: Callable[[Tensor], Tensor]) -> tuple[str, int]:
    """How attention is masked in the graph of a model, and the number of its key heads. Capture itself compares the
    graph with eager code."""
    torch.manual_seed(0)
    x = torch.randn(2, T, 8, dtype=F64)
    hints = sx.Hints(args=(x,), loss=squares)
    graph = sx.parallelize(Attention(mask, repeat), sx.Mesh(dp=1), hints, virtual=True).captured
    (node,) = (node for node in graph.nodes if str(node.op) == "shardfx.attention.default")
    given, is_causal = (*node.args[3:5], None, False)[:2]
    kind = "dense" if given is not None else "causal" if is_causal else "full"
    kind = " ".join([kind, *map(str, node.kwargs.get("window", ()))])
    return kind + " ids" * ("q_ids" in node.kwargs), node.operands[1].shape[1]


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    mask, expected = MASKS[name]
    assert captured(mask, interleaved) == (expected, 2)


OfData = Callable[[Tensor, Tensor], Tensor]


def same(docs: Tensor) -> Tensor:
    return docs[:, None, :, None] == docs[:, None, None]


def looked_up(docs: Tensor) -> Tensor:
    """As transformers' index functions are evaluated."""
    rows, columns = rows_and_columns()
    batch = torch.arange(2)[:, None, None, None]
    return docs[batch, rows] == docs[batch, columns]


def numbered(positions: Tensor, dim: int = -1, step: int = 1) -> Tensor:
    """Documents, by positions that begin anew, as in transformers."""
    return (torch.diff(positions, prepend=positions[:, :1] - 1, dim=dim) != step).cumsum(dim)


def up_to(positions: Tensor, back: int = T) -> Tensor:
    rows, columns = positions[:, None, :, None], positions[:, None, None]
    return (columns <= rows) & (columns > rows - back) if back < T else columns <= rows


OF_DATA: dict[str, tuple[OfData, str]] = {
    "documents": (lambda docs, kept: causal() & same(docs), "causal ids"),
    "documents, looked up": (lambda docs, kept: looked_up(docs) & causal(), "causal ids"),
    "documents, not causal": (lambda docs, kept: same(docs), "full ids"),
    "documents, negated": (
        lambda docs, kept: ~(docs[:, None, None] != docs[:, None, :, None]) & causal(),
        "causal ids",
    ),
    "positions in documents": (lambda docs, kept: same(numbered(docs)) & up_to(docs), "causal ids"),
    "positions in a window": (lambda docs, kept: same(numbered(docs)) & up_to(docs, 3), "causal 2 0 ids"),
    "positions of other documents": (
        lambda docs, kept: same(numbered(docs.flip(1))) & up_to(docs),
        "dense [2, 1, 6, 6]",
    ),
    "positions in steps of two": (lambda docs, kept: same(numbered(docs, step=2)) & up_to(docs), "dense [2, 1, 6, 6]"),
    "positions and ids of them": (lambda docs, kept: same(docs) & up_to(docs), "dense [2, 1, 6, 6]"),
    "documents in a window": (lambda docs, kept: window(3) & same(docs), "causal 2 0 ids"),
    "documents and padding": (lambda docs, kept: causal() & same(docs) & kept[:, None, None], "causal ids"),
    "two flags": (lambda docs, kept: kept[:, None, None] & causal() & (docs != 1)[:, None, None], "causal ids"),
    "padding": (lambda docs, kept: causal() & kept[:, None, None], "causal ids"),
    "padding by numbers": (
        lambda docs, kept: torch.zeros(2, 1, T, T, dtype=F64).masked_fill(
            ~(causal() & (docs != 0)[:, None, None]), -torch.inf
        ),
        "causal ids",
    ),
    "padding by lowest numbers": (
        lambda docs, kept: torch.zeros(2, 1, T, T, dtype=F64).masked_fill(
            ~(causal() & (docs != 0)[:, None, None]), LOWEST
        ),
        "dense [2, 1, 6, 6]",  # a query that sees no key has the mean of all
    ),
    "keys of two documents": (
        lambda docs, kept: causal() & (docs[:, None, None] == docs.flip(1)[:, None, :, None]),
        "causal ids",
    ),
    "padding of keys alone": (lambda docs, kept: kept[:, None, None], "dense [2, 1, 1, 6]"),
    "padding of keys alone, expanded": (
        lambda docs, kept: kept[:, None, None] & torch.ones(T, 1, dtype=torch.bool),
        "dense [2, 1, 1, 6]",
    ),
    "queries that are padded": (lambda docs, kept: causal() & kept[:, None, :, None], "dense [2, 1, 6, 6]"),
    "part of a longer tensor": (lambda docs, kept: causal() & same(docs.repeat(1, 2)[:, :T]), "dense [2, 1, 6, 6]"),
    "documents up to": (lambda docs, kept: docs[:, None, None] <= docs[:, None, :, None], "dense [2, 1, 6, 6]"),
    "other documents": (lambda docs, kept: docs[:, None, None] != docs[:, None, :, None], "dense [2, 1, 6, 6]"),
    "documents or causal": (lambda docs, kept: causal() | same(docs), "dense [2, 1, 6, 6]"),
    "documents of another sample": (lambda docs, kept: causal() & same(docs)[:1], "dense [1, 1, 6, 6]"),
}


class OfTokens(nn.Module):
    """Attention by a mask of ids and flags of tokens."""

    def __init__(self, mask: OfData) -> None:
        super().__init__()
        self.qkv, self.mask = nn.Linear(8, 16, dtype=F64), mask

    def forward(self, x: Tensor, docs: Tensor, kept: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, 2)).transpose(1, 2) for each in self.qkv(x).split([8, 4, 4], -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask(docs, kept), enable_gqa=True)


@pytest.mark.parametrize("name", OF_DATA)
def test_masks_of_data(name: str) -> None:
    torch.manual_seed(0)
    mask, expected = OF_DATA[name]
    docs, kept = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 0, 0]]), torch.ones(2, T, dtype=torch.bool)
    kept[0, 0] = kept[1, 4:] = False
    args, model = (torch.randn(2, T, 8, dtype=F64), docs, kept), OfTokens(mask)
    pm = sx.parallelize(model, sx.Mesh(dp=1), sx.Hints(args=args, loss=squares), virtual=True)
    (node,) = (node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default")
    given, is_causal = (*node.args[3:5], None, False)[:2]
    kind = f"dense {[*given.shape]}" if given is not None else "causal" if is_causal else "full"
    assert " ".join([kind, *map(str, node.kwargs.get("window", ()))]) + " ids" * ("q_ids" in node.kwargs) == expected
    check_step(pm, model, squares, args, bound=1e-12)
    other = (args[0], docs.flip(0), kept.flip(0))
    torch.testing.assert_close(pm(*other), squares(model(*other)), rtol=1e-12, atol=1e-12)


def of_data(name: str, **options: bool) -> sx.ParallelModule:
    docs, kept = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 0, 0]]), torch.ones(2, T, dtype=torch.bool)
    hints = sx.Hints(args=(torch.randn(2, T, 8, dtype=F64), docs, kept), loss=squares, **options)
    return sx.parallelize(OfTokens(OF_DATA[name][0]), sx.Mesh(dp=1), hints, virtual=True)


def test_a_mask_that_is_not_read_is_an_error_if_strict() -> None:
    with pytest.raises(sx.Error, match=r"(?s): a mask \[2, 1, 6, 6\] of 72 B that is not read.*causal, a window"):
        of_data("documents or causal", strict=True)
    assert not of_data("documents", strict=True).captured.notes


class LongBias(nn.Module):
    """Attention with a bias of positions, as ALiBi has it."""

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[2], dtype=F64)
        return F.scaled_dot_product_attention(x, x, x, (places - places[:, None]).abs() * -0.1)


def test_a_dense_mask_is_noted_with_its_bytes() -> None:
    x = torch.randn(1, 1, 32, 8, dtype=F64, requires_grad=True)
    pm = sx.parallelize(LongBias(), sx.Mesh(dp=1), sx.Hints(args=(x,), loss=squares, strict=True), virtual=True)
    assert "a mask [32, 32] of 8.2 kB that is not read as a predicate" in str(pm.captured.notes)


def by_groups(x: Tensor) -> Tensor:
    """As transformers repeat them."""
    return x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(x.shape[0], 4, *x.shape[2:])


@pytest.mark.parametrize(
    ("repeat", "heads"),
    [
        (by_groups, 2),
        (lambda x: x.repeat(1, 2, 1, 1), 4),  # heads in another order
        (lambda x: x[:, None].expand(-1, 2, -1, -1, -1).flatten(1, 2), 4),
    ],
)
def test_repeated_heads(repeat: Callable[[Tensor], Tensor], heads: int) -> None:
    assert captured(causal, repeat) == ("causal", heads)


def by_rows(ranks: int) -> tuple[sx.ParallelModule, nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model, x = Attention(causal, by_groups), torch.randn(2, T, 8, dtype=F64)
    hints = sx.Hints(args=(x,), loss=squares, specs={"args.0": "-, cp, -"})
    return sx.parallelize(model, sx.Mesh(cp=ranks), hints, virtual=True), model, (x,)


@pytest.mark.parametrize("ranks", [2, 3, 4])  # of four, one has no row
def test_causal_rows_of_a_rank(ranks: int) -> None:
    """Each rank has its own rows of queries, and all keys: no mask, and no row is computed twice."""
    pm, model, args = by_rows(ranks)
    check_step(pm, model, squares, args)
    assert "box=[0, 0, " in str(pm.rank_program(1)) and (ranks == 4 or not pm.report().warnings)
    assert pm.verify()


@pytest.mark.parametrize("keys", [3, 5, 7])
def test_rows_and_keys_of_other_lengths(keys: int) -> None:
    """Of rows behind all keys, too."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 4, length, 8, dtype=F64) for length in (T, keys, keys))
    whole = torch.ops.shardfx.attention(q, k, v, None, True)
    grad = torch.randn_like(q)
    grads = torch.ops.shardfx.attention_backward(grad, q, k, v, *whole, None, True)
    added = [torch.zeros_like(each) for each in (q, k, v)]
    for first in range(0, T, 2):
        rows, box = slice(first, first + 2), [0, 0, first, 0]
        part = torch.ops.shardfx.attention(q[:, :, rows], k, v, None, True, box=box)
        of_part = torch.ops.shardfx.attention_backward(
            grad[:, :, rows], q[:, :, rows], k, v, *part, None, True, box=box
        )
        assert all(torch.allclose(mine, each[:, :, rows]) for mine, each in zip(part, whole, strict=True))
        added[0][:, :, rows] = of_part[0]
        added[1] += of_part[1]
        added[2] += of_part[2]
    assert all(torch.allclose(mine, each) for mine, each in zip(added, grads[:3], strict=True))


def test_gradients_of_keys_lie_in_memory_as_the_keys() -> None:
    """As on one device: views of them are planned by that."""
    q, k, v = (torch.randn(2, T, 4, 8, dtype=F64).transpose(1, 2) for _ in range(3))
    out = torch.ops.shardfx.attention(q[:, :, 2:4], k, v, None, True, box=[0, 0, 2, 0])
    given = torch.ones_like(out[0]), q[:, :, 2:4], k, v, *out
    grads = torch.ops.shardfx.attention_backward(*given, None, True, box=[0, 0, 2, 0])
    assert [each.stride() for each in grads[1:3]] == [k.stride(), v.stride()]


class RowsRepeated(nn.Module):
    """Attention without a dim of heads, whose rows of keys are repeated."""

    def forward(self, x: Tensor) -> Tensor:
        k = x.repeat_interleave(2, 1)
        return F.scaled_dot_product_attention(x, k, k)


def test_repeated_rows_are_no_heads() -> None:
    x = torch.randn(2, T, 8, dtype=F64)
    pm = sx.parallelize(RowsRepeated(), sx.Mesh(dp=2), sx.Hints(args=(x,), specs={"args.0": "dp, -, -"}), virtual=True)
    assert torch.allclose(pm(x), RowsRepeated()(x))


@pytest.mark.parametrize("box", [[0, 0, 2, 0], [0, 0, 4, 0], []])
def test_rows_that_stand_elsewhere_are_refuted(box: list[int]) -> None:
    pm, _, _ = by_rows(2)
    for forward in (True, False):
        module = pm.rank_module(1)
        ops = "shardfx.attention.default" if forward else "shardfx.attention_backward.default"
        (node,) = (node for node in module.graph.nodes if str(node.target) == ops)
        node.kwargs = {**node.kwargs, "box": box}
        assert pm.verify(modules={1: module}).status == "refuted"
