"""Attention in its odder forms."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import flags, ids, normal, odd

QKV = {"q.weight": "tp, -", "k.weight": "tp, -", "v.weight": "tp, -", "o.weight": "-, tp"}
ALIKE = (normal(4, 6, 8),)


class Projected(nn.Module):
    """Queries, keys, values and an output, for two heads of four."""

    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=bias) for _ in range(4))

    def heads(self, x: Tensor) -> list[Tensor]:
        return [each(x).unflatten(-1, (2, 4)).transpose(1, 2) for each in (self.q, self.k, self.v)]

    def joined(self, x: Tensor) -> Tensor:
        return self.o(x.transpose(1, 2).flatten(2))


@odd(*ALIKE, targets=ALIKE, tp=QKV)
class LocalWindows(Projected):
    """Each query sees three keys, taken by unfold."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        k, v = (F.pad(each, (0, 0, 1, 1)).unfold(2, 3, 1) for each in (k, v))
        scores = torch.einsum("bhtd,bhtdw->bhtw", q, k).softmax(-1)
        return self.joined(torch.einsum("bhtw,bhtdw->bhtd", scores, v))


@odd(*ALIKE, targets=ALIKE, tp=QKV, more={"recompute": "o"})
class LinearCausal(Projected):
    """Sums of outer products up to each place, instead of scores."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        outer = torch.einsum("bhtd,bhte->bhtde", k, v).cumsum(2)
        weight = (q * k.cumsum(2)).sum(-1, keepdim=True)
        return self.joined(torch.einsum("bhtd,bhtde->bhte", q, outer) / weight)


@odd(normal(4, 10, 8), targets=(ids(5, 4),), loss=F.cross_entropy, tp={"up.weight": "tp, -", "down.weight": "-, tp"})
class Perceiver(nn.Module):
    """A few latents look at the input, and at themselves, with the same weights twice."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.across = nn.Parameter(torch.randn(3, 8)), nn.MultiheadAttention(8, 2, batch_first=True)
        self.up, self.down, self.head = nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        z = self.latents.expand(x.shape[0], -1, -1)
        for _ in range(2):
            z = z + self.across(z, x, x, need_weights=False)[0]
            z = z + self.down(F.gelu(self.up(z)))
        return self.head(z.mean(1))


@odd(normal(4, 6, 8), targets=(ids(6, 4, 3),), loss=lambda out, y: F.nll_loss(out.flatten(0, 1), y.flatten()))
class Pointer(nn.Module):
    """Three steps of a decoder whose outputs point at inputs, and at none twice."""

    def __init__(self) -> None:
        super().__init__()
        self.keys, self.step, self.score = nn.Linear(8, 8), nn.GRUCell(8, 8), nn.Linear(8, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h, given, taken, out = x.mean(1), x[:, 0], torch.zeros(x.shape[:2], dtype=torch.bool), []
        for _ in range(3):
            h = self.step(given, h)
            logits = self.score(torch.tanh(self.keys(x) + h[:, None])).squeeze(-1).masked_fill(taken, -1e3)
            out.append(logits.log_softmax(-1))
            at = logits.argmax(-1)
            taken = taken | F.one_hot(at, x.shape[1]).bool()
            given = x.gather(1, at[:, None, None].expand(-1, 1, 8)).squeeze(1)
        return torch.stack(out, 1)


@odd(*ALIKE, targets=ALIKE, tp={**QKV, "table.weight": "-, tp"})
class RelativeTable(Projected):
    """A table of biases by distance, of which two are one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        at = torch.arange(x.shape[1])
        bias = self.table((at[:, None] - at[None, :]).clamp(-3, 3) + 3).permute(2, 0, 1)
        return self.joined((q @ k.mT + bias).softmax(-1) @ v)


@odd(*ALIKE, targets=ALIKE, tp={"q.weight": "tp, -", "o.weight": "-, tp"})
class MultiQuery(nn.Module):
    """One key and value for all heads, a dim of one between."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)
        k, v = self.kv(x).unsqueeze(1).chunk(2, -1)
        out = (q @ k.mT * 0.5).softmax(-1) @ v
        return self.o(out.transpose(1, 2).flatten(2))


@odd(normal(4, 3, 5, 8), targets=(normal(4, 3, 5, 8),), tp=QKV)
class Axial(Projected):
    """Rows attend, then columns, by one set of weights."""

    def along(self, x: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (2, 4)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        return self.o(((q @ k.mT).softmax(-1) @ v).transpose(-2, -3).flatten(-2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.along(x)
        return x + self.along(x.transpose(1, 2)).transpose(1, 2)


@odd(normal(4, 6, 8), flags(4, 6), targets=(normal(4, 8),), tp=QKV)
class MaskedPool(Projected):
    """Keys that are not there, a pooled query, means over what is there."""

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        scores = (q @ k.mT).where(there[:, None, None], torch.finfo(x.dtype).min)
        out = self.joined(scores.softmax(-1) @ v) * there[..., None]
        return out.sum(1) / there.sum(1, keepdim=True)


@odd(*ALIKE, targets=ALIKE, tp=QKV)
class TopKeys(Projected):
    """Each query keeps its three best keys."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        best, at = (q @ k.mT).topk(3, -1)
        shares = torch.zeros(*q.shape[:3], x.shape[1], dtype=x.dtype).scatter(-1, at, best.softmax(-1))
        return self.joined(shares @ v)
