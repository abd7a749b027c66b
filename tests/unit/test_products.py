"""Matrix products by the library that is faster: the same sums for every layout, and who does which."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardfx.ir.ops.computing import products
from shardfx.ir.ops.time import turns

aten = torch.ops.aten


def layouts(rows: int, columns: int) -> Iterator[Tensor]:
    """Matrices that lie in memory otherwise."""
    yield torch.randn(rows, columns)
    yield torch.randn(columns, rows).t()
    yield torch.randn(rows, columns + 5)[:, 2 : 2 + columns]
    yield torch.randn(columns, rows + 5).t()[3 : 3 + rows]
    yield torch.randn(rows, 2 * columns)[:, ::2]
    yield torch.randn(2 * rows, columns)[::2]
    yield torch.randn(1, columns).expand(rows, columns)
    yield torch.randn(rows, 1).expand(rows, columns)
    yield torch.randn(rows + columns).as_strided((rows, columns), (1, 1))


@pytest.fixture
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, too, in several stretches."""
    monkeypatch.setattr(products, "LARGE", 1)
    monkeypatch.setattr(products, "WORKSPACE", 1 << 13)
    monkeypatch.setattr(products, "FEW", 2)


def close(made: Tensor, a: Tensor, b: Tensor, more: Tensor | float = 0.0) -> None:
    torch.testing.assert_close(made, (a.double() @ b.double() + more).float(), atol=2e-4, rtol=1e-5)


SIZES = [(64, 48, 80), (1, 64, 64), (64, 1, 64), (64, 64, 1), (33, 17, 129), (4, 0, 5), (0, 5, 4)]


@pytest.mark.parametrize("sizes", SIZES)
def test_products_are_the_same_for_every_layout(sizes: tuple[int, int, int], all_sizes: None) -> None:
    rows, inner, columns = sizes
    for a, b in itertools.product(layouts(rows, inner), layouts(inner, columns)):
        bias, total = torch.randn(columns), torch.randn(rows, columns)
        close(products.mm(a, b), a, b)
        close(products.addmm(bias, a, b), a, b, bias)
        close(products.addmm(total, a, b, beta=0.5), a, b, 0.5 * total)
        close(products.mm(a, b, out=torch.empty(rows, columns)), a, b)
        close(products.add_product(total.clone(), a, b), a, b, total)


def test_other_dtypes_are_left_to_torch(all_sizes: None) -> None:
    a, b = torch.randn(8, 6).double(), torch.randn(6, 4).double()
    assert torch.equal(products.mm(a, b), a @ b)
    pieces = torch.zeros(2, 4, 4)
    added = products.add_product(pieces, a.float(), b.float())
    assert torch.equal(added, turns.add_product(torch.zeros(2, 4, 4), a.float(), b.float()))


def test_large_products_go_to_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    linear: Callable[..., Tensor] = products._linear

    def watched(a: Tensor, *more: object) -> Tensor:
        seen.append(tuple(a.shape))
        return linear(a, *more)

    monkeypatch.setattr(products, "_linear", watched)
    products.mm(torch.ones(128, 128), torch.ones(128, 128))
    assert seen == [(128, 128)]
    products.mm(torch.ones(128, 127), torch.ones(127, 128))
    products.mm(torch.ones(128, 256)[:, ::2], torch.ones(128, 128))
    assert len(seen) == 1, "too small, and rows with gaps"


@pytest.mark.parametrize(("maker", "pays"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_the_processor_says_which_is_faster(
    maker: str, pays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(products, "CPUS", tmp_path / "cpuinfo")
    if maker:
        products.CPUS.write_text(f"processor : 0\nvendor_id : {maker}\n" * 2, encoding="utf-8")
    products.pays.cache_clear()
    assert products.pays() is pays and set(products.instead()) == (set(products.FORMS) if pays else set())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    products.pays.cache_clear()
    assert not products.pays()
    products.pays.cache_clear()
