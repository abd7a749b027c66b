"""Attention that a model writes out as products around a softmax: what becomes the op, with which arguments, and what
must not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Node
from tests.reference import check_step

F64, B, H, T, E = torch.float64, 2, 4, 7, 6
LOWEST = torch.finfo(F64).min


class Written(nn.Module):
    """Attention of q, k, v [B, H, T, E] by a function, with parameters beside it."""

    def __init__(self, attend: Callable[..., Tensor]) -> None:
        super().__init__()
        self.qkv, self.attend = nn.Linear(E, 3 * H * E, dtype=F64), attend
        self.sinks, self.bias = nn.Parameter(torch.randn(H, dtype=F64)), nn.Parameter(torch.randn(H, T, T, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        q, k, v = (each.unflatten(-1, (H, E)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        return x + self.attend(self, q, k, v).mean(1) + self.sinks.mean() + self.bias.mean()


def hidden() -> Tensor:
    return torch.ones(T, T, dtype=torch.bool).triu(1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(E)


def with_sinks(m: Any, s: Tensor, v: Tensor) -> Tensor:
    """As gpt-oss has it."""
    sinks = m.sinks.reshape(1, -1, 1, 1).expand(s.shape[0], -1, s.shape[-2], -1)
    joined = torch.cat([s, sinks], -1)
    joined = joined - joined.max(dim=-1, keepdim=True).values
    return F.softmax(joined, dim=-1)[..., :-1] @ v


def merged(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads in one dim, as Bloom has it."""
    q, k, v = (each.reshape(B * H, T, E) for each in (q, k, v))
    bias = torch.zeros(B * H, 1, T, dtype=F64)
    s = torch.baddbmm(bias, q, k.transpose(1, 2), beta=1.0, alpha=E**-0.5)
    return torch.bmm(s.softmax(-1), v).view(B, H, T, E)


def half_merged(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores with batch and heads apart, as Bloom has them."""
    q, k, v = (each.reshape(B * H, T, E) for each in (q, k, v))
    bias = (m.sinks[None, :, None] * torch.arange(T)).expand(B, H, T).reshape(B * H, 1, T)
    s = torch.baddbmm(bias, q, k.transpose(1, 2), beta=0.5, alpha=0.3).view(B, H, T, T)
    weights = (s + torch.zeros((), dtype=F64).where(~hidden(), LOWEST)).softmax(-1)
    return torch.bmm(weights.view(B * H, T, T), v).view(B, H, T, E)


def by_einsum(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(0.3).masked_fill(hidden(), -math.inf).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v).transpose(1, 2)


def tanh(s: Tensor, cap: float) -> Tensor:
    return torch.tanh(s / cap) * cap


WRITTEN: dict[str, tuple[Callable[..., Tensor], str]] = {
    "plain": (lambda m, q, k, v: F.softmax(scores(q, k), -1) @ v, "full"),
    "scaled queries": (lambda m, q, k, v: torch.matmul(q * E**-0.5, k.transpose(-2, -1)).softmax(-1) @ v, "full 1.0"),
    "another scale": (lambda m, q, k, v: (q @ k.mT * 0.3).softmax(3) @ v, "full 0.3"),
    "keys that lie transposed": (lambda m, q, k, v: (q @ (k * 2).mT.contiguous() * 0.3).softmax(3) @ v, "full 0.3"),
    "keys that are permuted": (lambda m, q, k, v: (q @ k.permute(0, 1, -1, 2) * 0.3).softmax(3) @ v, "full 0.3"),
    "causal, filled": (lambda m, q, k, v: scores(q, k).masked_fill(hidden(), -math.inf).softmax(-1) @ v, "causal"),
    "causal, tril": (
        lambda m, q, k, v: scores(q, k).masked_fill(torch.tril(torch.ones(T, T)) == 0, -math.inf).softmax(-1) @ v,
        "causal",
    ),
    "causal, where": (lambda m, q, k, v: torch.where(~hidden(), scores(q, k), LOWEST).softmax(-1) @ v, "causal"),
    "causal, added": (
        lambda m, q, k, v: (torch.full((T, T), -math.inf, dtype=F64).triu(1) + scores(q, k)).softmax(-1) @ v,
        "causal",
    ),
    "a window in two masks": (
        lambda m, q, k, v: (
            (
                scores(q, k).masked_fill(hidden(), -math.inf)
                + torch.zeros(T, T, dtype=F64).masked_fill(torch.ones(T, T, dtype=torch.bool).tril(-3), LOWEST)
            ).softmax(-1)
            @ v
        ),
        "causal 2 0",
    ),
    "a bias and a causal mask": (
        lambda m, q, k, v: (scores(q, k) + m.bias).masked_fill(hidden(), LOWEST).softmax(-1) @ v,
        "causal dense [1, 4, 7, 7]",
    ),
    "a bias and a window": (
        lambda m, q, k, v: (
            (scores(q, k) + m.bias)
            .masked_fill(hidden(), LOWEST)
            .masked_fill(torch.ones(T, T, dtype=torch.bool).tril(-3), LOWEST)
            .softmax(-1)
            @ v
        ),
        "causal 2 0 dense [1, 4, 7, 7]",
    ),
    "a soft cap": (lambda m, q, k, v: tanh(scores(q, k), 2.0).softmax(-1) @ v, "full softcap=2.0"),
    "a soft cap of one": (lambda m, q, k, v: torch.tanh(q @ k.mT).softmax(-1) @ v, "full 1.0 softcap=1.0"),
    "a soft cap, causal": (
        lambda m, q, k, v: (tanh(scores(q, k), 2.0).masked_fill(hidden(), -math.inf)).softmax(-1) @ v,
        "causal softcap=2.0",
    ),
    "a soft cap and a bias": (
        lambda m, q, k, v: (tanh(scores(q, k), 2.0) + m.bias).softmax(-1) @ v,
        "full dense [1, 4, 7, 7] softcap=2.0",
    ),
    "sinks": (lambda m, q, k, v: with_sinks(m, scores(q, k), v), "full sinks=[4]"),
    "sinks, causal": (
        lambda m, q, k, v: with_sinks(m, scores(q, k) + hidden() * torch.finfo(torch.float32).min, v),
        "causal sinks=[4]",
    ),
    "in three dims": (merged, "full"),
    "in three dims and four": (half_merged, "causal dense [2, 4, 1, 7] 0.3"),
    "einsum": (by_einsum, "causal 0.3"),
    "weights of 32 bits": (
        lambda m, q, k, v: F.softmax(scores(q, k), -1, dtype=torch.float32).to(q.dtype) @ v,
        "full",
    ),
}


def attentions(pm: sx.ParallelModule) -> list[Node]:
    return [node for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"]


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def said(node: Node) -> str:
    """The arguments of an attention."""
    mask, causal, scale = (*node.args[3:6], *(None, False, None)[len(node.args[3:6]) :])
    words = ["causal" if causal else "full", *map(str, node.kwargs.get("window", ()))]
    words += [f"dense {[*mask.shape]}"] if mask is not None else []
    words += [str(scale)] if scale is not None else []
    words += [f"softcap={node.kwargs['softcap']}"] if "softcap" in node.kwargs else []
    words += [f"sinks={[*node.kwargs['sinks'].shape]}"] if "sinks" in node.kwargs else []
    return " ".join(words)


def parallel(attend: Callable[..., Tensor]) -> tuple[sx.ParallelModule, nn.Module, Tensor]:
    torch.manual_seed(0)
    model, x = Written(attend), torch.randn(B, T, E, dtype=F64)
    hints = sx.Hints(args=(x,), loss=squares, specs={"args.0": "dp, -, -"})
    return sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True), model, x


@pytest.mark.parametrize("name", WRITTEN)
def test_written_attention_becomes_the_op(name: str) -> None:
    attend, expected = WRITTEN[name]
    pm, model, x = parallel(attend)
    assert [said(node) for node in attentions(pm)] == [expected]
    check_step(pm, model, squares, (x,), bound=1e-7 if "32" in name else 1e-12)


def kept(m: Any) -> Tensor:
    """Of which keys are kept, the first ones of the first sample not."""
    return m.x.sum(-1)[:, None, None, :] > 0


def lowest(seen: Tensor) -> Tensor:
    return torch.zeros((), dtype=F64).where(seen, LOWEST)


def near() -> Tensor:
    apart = torch.arange(T)[:, None] - torch.arange(T)
    return (apart >= 0) & (apart < 2)


ALONE: dict[str, tuple[Callable[..., Tensor], list[str]]] = {
    "added, causal": (
        lambda m, q, k, v: (scores(q, k) + lowest(~hidden() & kept(m))).softmax(-1) @ v,
        ["causal ids", "full ids flat"],
    ),
    "added, a window and a soft cap": (
        lambda m, q, k, v: (tanh(scores(q, k), 2.0) + lowest(near() & kept(m))).softmax(-1) @ v,
        ["causal 1 0 softcap=2.0 ids", "full softcap=2.0 ids flat"],
    ),
    "added, of keys alone": (
        lambda m, q, k, v: (scores(q, k) + lowest(kept(m).expand(B, 1, T, T))).softmax(-1) @ v,
        ["full dense [2, 1, 1, 7]", "full ids flat"],
    ),
    "added, by place": (
        lambda m, q, k, v: (scores(q, k) + lowest(torch.ones(T, T, dtype=torch.bool).tril(-1))).softmax(-1) @ v,
        ["full 6 -1", "full ids flat"],
    ),
    "filled, causal": (
        lambda m, q, k, v: torch.where(~hidden() & kept(m), scores(q, k), LOWEST).softmax(-1) @ v,
        ["causal ids"],
    ),
    "filled, behind a bias": (
        lambda m, q, k, v: (scores(q, k) + m.bias).masked_fill(~(near() & kept(m)), LOWEST).softmax(-1) @ v,
        ["causal 1 0 dense [1, 4, 7, 7] ids"],
    ),
    "added in front of a bias": (
        lambda m, q, k, v: (scores(q, k) + lowest(~hidden() & kept(m)) + m.bias).softmax(-1) @ v,
        [],
    ),
    "by two numbers": (
        lambda m, q, k, v: (scores(q, k) + lowest(~hidden()) / 4 + lowest(kept(m)) / 4).softmax(-1) @ v,
        [],
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_a_query_that_sees_no_key_gets_the_mean_of_all_values(name: str) -> None:
    attend, expected = ALONE[name]
    torch.manual_seed(0)
    model, x = Written(attend), torch.randn(B, T, E, dtype=F64)
    x[0, :3] -= 9
    hints = sx.Hints(args=(x,), loss=squares, specs={"args.0": "-, cp, -"})
    pm = sx.parallelize(model, sx.Mesh(cp=2), hints, virtual=True)
    made = [
        f"{said(node)}{' ids' * ('q_ids' in node.kwargs)}{' flat' * ('flat' in node.kwargs)}" for node in attentions(pm)
    ]
    assert sorted(made) == sorted(expected)
    check_step(pm, model, squares, (x,), bound=1e-12)


def twice(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = scores(q, k).softmax(-1)
    return weights @ v + weights.mean()


def of_columns(m: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scores(q, k).softmax(-2) @ v


OTHERS: dict[str, Callable[..., Tensor]] = {
    "weights used twice": twice,
    "over columns": of_columns,
    "scaled after a mask": lambda m, q, k, v: ((scores(q, k) + m.bias) * 0.5).softmax(-1) @ v,
    "filled by a small number": lambda m, q, k, v: scores(q, k).masked_fill(hidden(), -5.0).softmax(-1) @ v,
    "a scale of each head": lambda m, q, k, v: (q @ k.mT * m.sinks[:, None, None]).softmax(-1) @ v,
    "a sigmoid": lambda m, q, k, v: scores(q, k).sigmoid() @ v,
    "two sinks": lambda m, q, k, v: (
        torch.cat([scores(q, k), m.sinks[:, None, None].expand(B, -1, T, 2)], -1).softmax(-1)[..., :-2] @ v
    ),
    "a sink that counts": lambda m, q, k, v: (
        torch.cat([scores(q, k), m.sinks[:, None, None].expand(B, -1, T, 1)], -1).softmax(-1)[..., 1:] @ v
    ),
    "dropout": lambda m, q, k, v: F.dropout(scores(q, k).softmax(-1), 0.5, training=True) @ v,
    "matrices": lambda m, q, k, v: (q.mean((0, 1)) @ k.mean((0, 1)).mT).softmax(-1) @ v.mean((0, 1)) + v * 0,
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_is_no_attention_stays(name: str) -> None:
    pm, model, x = parallel(OTHERS[name])
    assert not attentions(pm)
    if name != "dropout":
        check_step(pm, model, squares, (x,), bound=1e-12)
