"""Attention by FlexAttention, as on CUDA, where no fused kernel has soft caps.

On the CPU torch's reference of its higher-order ops runs in the place of what is compiled there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.ops.context import flex_kernels
from shardfx.ir.ops.fused_attention import attention, attention_backward
from tests.on_gpu import without_synchronisation

B, H, T, WIDTH = 2, 4, 200, 16
IDS = torch.arange(3).repeat_interleave(torch.tensor([90, 30, 80])).expand(B, T)
PADDED = IDS.masked_fill(torch.arange(T) < torch.tensor([[17], [0]]), -1)
BIAS = torch.linspace(-2, 1, H * (2 * T - 1)).view(H, -1)
FLOATS = "relative_bias", "sinks"
STRIPES = [1, B, 0, B, 1, H, 0, H, 2, 2, 0, 2, 150, 50, 100, 1, 300, 0, 300]
"""Rows 50 to 150 and 200 to 300 of 300."""
CASES: dict[str, dict[str, Any]] = {
    "bidirectional": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": [50, 0]},
    "window of both sides": {"window": [30, 7]},
    "packed": {"causal": True, "q_ids": IDS, "k_ids": IDS},
    "packed, padded, in a window": {"causal": True, "window": [50, 0], "q_ids": PADDED, "k_ids": PADDED},
    "bias of distances": {"causal": True, "relative_bias": BIAS},
    "packed, with a bias": {"q_ids": IDS, "k_ids": IDS, "relative_bias": BIAS},
    "sinks": {"causal": True, "sinks": torch.linspace(-1, 1, H)},
    "scaled": {"causal": True, "scale": 0.3},
    "flat": {"causal": True, "q_ids": IDS, "k_ids": IDS, "flat": True, "softcap": 0.0},
    "rows of a rank": {"causal": True, "box": [0, 0, 60, 0]},
    "stripes of a rank": {"causal": True, "box": STRIPES},
}


def tensors(heads: int, keys: int = T) -> list[Tensor]:
    """Queries, keys, values and a gradient."""
    draw = torch.Generator().manual_seed(0)
    sizes = (H, T), (heads, keys), (heads, keys), (H, T)
    return [torch.randn(B, n, t, WIDTH, generator=draw) * 2 for n, t in sizes]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let calls on the CPU go to FlexAttention, by graphs that are traced and not compiled: these graphs."""
    graphs: list[Any] = []

    def compile(graph: Any, fakes: Any, options: Any) -> Any:
        graphs.append(graph)
        return graph

    monkeypatch.setattr(flex_kernels, "LIMITS", flex_kernels.LIMITS._replace(devices=("cpu",)))
    monkeypatch.setattr(flex_kernels, "_compiles", lambda device: True)
    monkeypatch.setattr(flex_kernels, "COMPILED", {})
    monkeypatch.setattr(torch._inductor, "compile", compile)
    return graphs


def arguments(heads: int, how: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Any, dict[str, Any]]:
    """The tensors of a call, rounded to a dtype, and how it is computed."""
    given = [each.to(dtype) for each in tensors(heads, 300 if "box" in how else T)]
    return given, {name: each.to(dtype) if name in FLOATS else each for name, each in how.items()}


def results(given: Any, how: dict[str, Any]) -> list[Tensor]:
    """The result, the logsumexp and the gradients."""
    q, k, v, grad = given
    out, rows = attention(q, k, v, **how)
    return [out, rows, *attention_backward(grad, q, k, v, out, rows, **how)]


@pytest.mark.parametrize(
    "heads", [pytest.param(H, marks=pytest.mark.long, id="own keys"), pytest.param(2, id="grouped")]
)
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_is_that_of_tiles(case: str, heads: int, on_cpu: list[Any], monkeypatch: Any) -> None:
    given = arguments(heads, {"softcap": 3.0, **CASES[case]})
    found = results(*given)
    assert ["flex_attention" in graph.code for graph in on_cpu] == [True, True]
    results(*given)
    assert len(on_cpu) == 2  # the second call is by the same graphs
    monkeypatch.undo()
    for one, other in zip(found, results(*given), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


def test_flex_attention_gives_a_window_the_gradients_of_its_own_rows(on_cpu: list[Any], monkeypatch: Any) -> None:
    how = {"softcap": 3.0, "causal": True, "window": [40, 0], "rows": [60, 100]}
    q, k, v, grad = tensors(2)
    out, rows = attention(q, k, v, softcap=3.0, causal=True, window=[40, 0])
    found = attention_backward(grad, q, k, v, out, rows, **how)
    monkeypatch.undo()
    for one, other in zip(found, attention_backward(grad, q, k, v, out, rows, **how), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("case", ["packed", "window", "bidirectional"])
def test_blocks_are_skipped_and_complete_as_their_pairs_are(case: str) -> None:
    how = {"causal": False, "window": [], "q_ids": None, "k_ids": None, **CASES[case]}
    q, k, _, _ = tensors(H)
    scored = flex_kernels.Scored(how["causal"], None, [], how["window"], (how["q_ids"], how["k_ids"]), 3.0, None, False)
    low, high, at, *ids = scored.tensors(q, k)
    some, each = flex_kernels.seen_blocks(low, high, at, ids)
    seen = ((at >= low[:, None]) & (at <= high[:, None])).expand(B, T, T)
    if ids:
        seen = seen & (ids[0][:, :, None] == ids[1][:, None])
    rows = seen.split(flex_kernels.BLOCK, 1)
    for i, row in enumerate(rows):
        for j, block in enumerate(row.split(flex_kernels.BLOCK, 2)):
            for b in range(B):
                at_b = min(b, len(each) - 1)
                assert bool(each[at_b, 0, i, j]) <= bool(block[b].all())
                assert bool(block[b].any()) <= bool(some[at_b, 0, i, j] | each[at_b, 0, i, j])
    assert each.any() == (case == "bidirectional")


def test_no_call_on_the_cpu_is_compiled() -> None:
    q, k, v, _ = tensors(H)
    assert not flex_kernels.flex_takes(q, k, v, None, 0.0, 3.0, False)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("case", CASES)
def test_compiled_flex_attention_is_that_of_tiles_in_float64(case: str, dtype: torch.dtype) -> None:
    """Compiled at the first call; a second one does not wait for the device."""
    given, how = arguments(2, {"softcap": 3.0, **CASES[case]}, dtype)
    on_cuda = [each.cuda() for each in given], {n: x.cuda() if isinstance(x, Tensor) else x for n, x in how.items()}
    results(*on_cuda)
    known = len(flex_kernels.COMPILED)
    with without_synchronisation():
        found = results(*on_cuda)
    assert len(flex_kernels.COMPILED) == known > 0
    wide = [each.double() for each in given], {n: x.double() if n in FLOATS else x for n, x in how.items()}
    bound = 0.02 if dtype is torch.bfloat16 else 1e-4
    for one, other in zip(found, results(*wide), strict=True):
        assert (one.cpu().double() - other).norm() <= bound * other.norm()
