"""Messages over edges, sets, segments: index_add, scatter, gather, index_put."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .odd_model import MLP, TwoLayers, ids, normal, odd

EDGES = ids(6, 2, 10)


class OfFive(TwoLayers):
    """An up of five, and a down to five."""

    def __init__(self, inner: int = 8, width: int = 5) -> None:
        super().__init__(width, inner, width)


@odd(normal(6, 5), EDGES, targets=(normal(6, 8),), dp={"args.0": "dp, -"}, tp={"lift.weight": "tp, -"})
class EdgeSoftmax(nn.Module):
    """Shares of edges among those that end at one node: a maximum, a sum and a division by scatter (GAT)."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.a = nn.Linear(5, 8, bias=False), nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        (start, end), h = edges, self.lift(x)
        score = F.leaky_relu((h @ self.a[0])[start] + (h @ self.a[1])[end], 0.2)
        most = torch.full((x.shape[0],), -1e9, dtype=x.dtype).scatter_reduce(0, end, score.detach(), "amax")
        score = (score - most[end]).exp()
        whole = torch.zeros(x.shape[0], dtype=x.dtype).scatter_add(0, end, score)
        sent = h[start] * (score / whole[end])[:, None]
        return torch.zeros_like(h).scatter_add(0, end[:, None].expand_as(sent), sent)


@odd(
    normal(9, 5),
    ids(4, 9),
    targets=(normal(4, 5),),
    dp={"args.0": "dp, -", "args.1": "dp"},
    tp=MLP,
    always={"guard": True},
)
class Segments(OfFive):
    """Rows of several sets, whose sums, products with counts and means leave (deep sets)."""

    def forward(self, x: Tensor, of: Tensor) -> Tensor:
        h = self.up(x).tanh()
        sums = torch.zeros(4, h.shape[1], dtype=h.dtype).index_add_(0, of, h)
        count = torch.bincount(of, minlength=4).clamp(min=1).to(h.dtype)
        return self.down(sums / count[:, None].sqrt())


@odd(normal(7, 4), ids(5, 7), targets=(normal(5, 12),), dp={"args.0": "dp, -"})
class ManyAggregates(nn.Module):
    """Mean, maximum and product by scatter_reduce, side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4)

    def forward(self, x: Tensor, to: Tensor) -> Tensor:
        h, at = self.lift(x), to[:, None].expand(-1, 4)
        made = [h.new_ones(5, 4).scatter_reduce(0, at, h, kind) for kind in ("mean", "amax", "prod")]
        return torch.cat(made, 1)


@odd(normal(4, 8), ids(8, 3), targets=(normal(4, 8),), tp={"new.weight": "tp, -"})
class PutIn(nn.Module):
    """Columns are overwritten and added to by index_put, index_copy, index_fill."""

    def __init__(self) -> None:
        super().__init__()
        self.new = nn.Linear(8, 3)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        new, out = self.new(x), x.clone()
        out[:, 1:4] = new
        out = out.index_put((torch.arange(x.shape[0])[:, None], at), new, accumulate=True)
        return out.index_copy(1, torch.tensor([7, 6, 0]), new.sin()).index_fill(1, torch.tensor([5]), 0.5)


@odd(ids(10, 14), targets=(normal(4, 5),), dp={}, tp={"bag.weight": "-, tp"})
class Bags(nn.Module):
    """Bags of several sizes, by offsets in a buffer, with weights for each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.share = nn.EmbeddingBag(10, 5, mode="sum"), nn.Parameter(torch.randn(14))
        self.register_buffer("offsets", torch.tensor([0, 3, 4, 9]))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.bag(tokens, self.offsets, per_sample_weights=self.share)
