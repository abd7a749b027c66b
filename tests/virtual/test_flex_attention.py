"""FlexAttention in a model: its functions of scores and places are read as arguments of the attention op; compared with
attention that is written out, for torch differentiates it on CUDA alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as flex

import shardfx as sx
from shardfx.ir.graph import Node
from shardfx.ir.rules.template import argument
from tests.reference import check_step
from tests.virtual.test_attention_windows import largest

F64 = torch.float64
HEADS, GROUPS, HEAD, DIM = 4, 2, 6, 14
Mod = Callable[..., Tensor]


class Flexible(nn.Module):
    """Self-attention of four query heads with two key heads, by FlexAttention or written out."""

    uses_flex = True

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.q, self.out = nn.Linear(DIM, HEADS * HEAD, dtype=F64), nn.Linear(HEADS * HEAD, DIM, dtype=F64)
        self.k, self.v = (nn.Linear(DIM, GROUPS * HEAD, dtype=F64) for _ in range(2))
        self.table = nn.Parameter(torch.randn(HEADS, 5, dtype=F64))
        self.register_buffer("slopes", torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=F64))

    def forward(self, x: Tensor, docs: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        batch, length = docs.shape
        score_mod, mask_mod = MODS[self.name](self, docs)
        if self.uses_flex:
            mask = None
            if mask_mod is not None:
                mask = flex.create_block_mask(mask_mod, batch, None, length, length, device="cpu")
            out = flex.flex_attention(q, k, v, score_mod, mask, scale=0.3, enable_gqa=True)
        else:
            out = written(q, k, v, score_mod, mask_mod)
        return x + self.out(out.transpose(1, 2).flatten(2))


def written(q: Tensor, k: Tensor, v: Tensor, score_mod: Mod | None, mask_mod: Mod | None) -> Tensor:
    """Score by score."""
    k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
    scores = q @ k.mT * 0.3
    batch, heads, rows, keys = scores.shape
    places = [torch.tensor(each) for each in range(max(batch, heads, rows))]
    made = []
    for b in places[:batch]:
        for h in places[:heads]:
            for i in places[:rows]:
                for j in places[:keys]:
                    score = scores[b, h, i, j]
                    score = score if score_mod is None else score_mod(score, b, h, i, j)
                    seen = mask_mod is None or bool(mask_mod(b, h, i, j))
                    made.append(score if seen else torch.full_like(score, -math.inf))
    return torch.ops.aten._safe_softmax(torch.stack(made).view_as(scores), -1) @ v


def causal(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return i >= j


def alibi(m: Any, docs: Tensor) -> tuple[Mod | None, Mod | None]:
    slopes = m.slopes
    return lambda score, b, h, i, j: score + slopes[h] * (j - i), causal


def table(m: Any, docs: Tensor) -> tuple[Mod | None, Mod | None]:
    numbers = m.table
    return lambda score, b, h, i, j: score + numbers[h, torch.clamp(i - j, 0, 4)], causal


def documents(m: Any, docs: Tensor) -> tuple[Mod | None, Mod | None]:
    return None, lambda b, h, i, j: (i >= j) & (docs[b, i] == docs[b, j])


def by_rows_of_a_table(m: Any, docs: Tensor) -> tuple[Mod | None, Mod | None]:
    numbers = m.table
    return lambda score, b, h, i, j: score + numbers[h].sum() * (i + j), None


MODS: dict[str, Callable[[Any, Tensor], tuple[Mod | None, Mod | None]]] = {
    "causal": lambda m, docs: (None, causal),
    "full": lambda m, docs: (None, None),
    "window": lambda m, docs: (None, lambda b, h, i, j: (i >= j) & (i - j < 4)),
    "documents": documents,
    "soft cap": lambda m, docs: (lambda score, b, h, i, j: 2.0 * torch.tanh(score / 2.0), causal),
    "alibi": alibi,
    "table": table,
    "causal by scores": lambda m, docs: (lambda score, b, h, i, j: torch.where(i >= j, score, -math.inf), None),
    "before": lambda m, docs: (None, lambda b, h, i, j: i > j),
}
SAID = {
    "causal": "causal",
    "full": "",
    "window": "causal window=[3, 0]",
    "documents": "causal ids",
    "soft cap": "causal softcap=2.0",
    "alibi": "causal relative_bias",
    "table": "causal relative_bias",
    "causal by scores": "causal",
    "before": "window=[7, -1]",
}
CASES: dict[str, tuple[sx.Mesh, dict[str, Any]]] = {
    "dp": (sx.Mesh(dp=2), {"args.0": "dp, -, -", "args.1": "dp, -"}),
    "tp": (sx.Mesh(tp=2), {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "out.weight": "-, tp"}),
    "ring": (sx.Mesh(cp=2), {"args.0": "-, cp, -", "args.1": "-, cp", "": sx.Context("cp", "ring")}),
    "all-to-all": (sx.Mesh(cp=2), {"args.0": "-, cp, -", "args.1": "-, cp", "": sx.Context("cp", "all-to-all")}),
}


def squares(out: Tensor) -> Tensor:
    return out.square().mean()


def said(node: Node) -> str:
    """The arguments of an attention."""
    words = ["causal"] * argument(node, "causal") + ["mask"] * (argument(node, "mask") is not None)
    words += [f"{name}={node.kwargs[name]}" for name in ("window", "softcap") if name in node.kwargs]
    words += ["ids"] * ("q_ids" in node.kwargs) + ["relative_bias"] * ("relative_bias" in node.kwargs)
    return " ".join(words)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", MODS)
@pytest.mark.parametrize("case", CASES)
def test_flex_attention_matches_written_attention(case: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)  # which refuses to differentiate on the CPU
    mesh, specs = CASES[case]
    torch.manual_seed(0)
    model, x, docs = Flexible(name), torch.randn(2, 8, DIM, dtype=F64), torch.randint(0, 2, (2, 8)).sort(1).values
    alone = deepcopy(model)
    alone.uses_flex = False
    pm = sx.parallelize(model, mesh, sx.Hints(args=(x, docs), loss=squares, specs=specs), virtual=True)
    check_step(pm, alone, squares, (x, docs), bound=1e-12)
    assert [said(node) for node in pm.captured.nodes if str(node.op) == "shardfx.attention.default"] == [SAID[name]]
    assert largest(pm.captured, 8) == largest(pm.planned, 8) == 0


class WithLogsumexp(Flexible):
    """Beside the result, the logsumexp."""

    def forward(self, x: Tensor, docs: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.uses_flex:
            mask = flex.create_block_mask(causal, None, None, 8, 8, device="cpu")
            out, logsumexp = flex.flex_attention(q, k, v, None, mask, enable_gqa=True, return_lse=True)
        else:
            k, v = (each.repeat_interleave(HEADS // GROUPS, 1) for each in (k, v))
            scores = (q @ k.mT / HEAD**0.5).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -math.inf)
            out, logsumexp = scores.softmax(-1) @ v, scores.logsumexp(-1)
        return out + logsumexp[..., None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_the_logsumexp_of_flex_attention_is_that_of_its_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    model, x, docs = WithLogsumexp("causal"), torch.randn(2, 8, DIM, dtype=F64), torch.zeros(2, 8, dtype=torch.int64)
    alone = deepcopy(model)
    alone.uses_flex = False
    specs = {"args.0": "dp, -, -"}
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x, docs), loss=squares, specs=specs), virtual=True)
    check_step(pm, alone, squares, (x, docs), bound=1e-12)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
def test_a_function_that_is_not_elementwise_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setitem(MODS, "by rows of a table", by_rows_of_a_table)
    x, docs = torch.randn(2, 8, DIM, dtype=F64), torch.zeros(2, 8, dtype=torch.int64)
    hints = sx.Hints(args=(x, docs), loss=squares)
    with pytest.raises(sx.Error, match="elementwise"):
        sx.parallelize(Flexible("by rows of a table"), sx.Mesh(dp=2), hints, virtual=True)
