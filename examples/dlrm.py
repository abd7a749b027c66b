"""A recommendation model (DLRM): embedding tables sharded over the ranks of the batch.

python examples/dlrm.py                                   # train on four virtual ranks, in this process
shardfx plan examples/dlrm.py:make --mesh dp=4            # the cost of the plan, without running it

Dense features go through an MLP, each categorical one through an embedding table; the products of all pairs of the
resulting vectors, and the dense one, go through another MLP (Naumov et al., DLRM, 2019). The batch is sharded over dp,
and so are the tables, the first by rows, the others by columns: ids and rows travel, never a table.
"""

from itertools import combinations, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

ROWS, DIM, DENSE, BATCH = (6000, 2000, 9000), 16, 13, 64
MESH = sx.Mesh(dp=4)
SPECS = {"args.*": "dp, -", "targets.0": "dp"}
SPECS |= {"tables.0.weight": "dp, -", "tables.1.weight": "-, dp", "tables.2.weight": "-, dp"}


class DLRM(nn.Module):
    """Tables of ``rows``, an MLP below and one above their interaction."""

    def __init__(self, rows: tuple[int, ...] = ROWS, dim: int = DIM, dense: int = DENSE, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, dim, sparse=sparse) for count in rows)
        self.bottom = mlp(dense, 32, dim)
        vectors = len(rows) + 1
        self.top = mlp(dim + vectors * (vectors - 1) // 2, 32, 1)
        self.first, self.second = ([pair[i] for pair in combinations(range(vectors), 2)] for i in (0, 1))

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.first, self.second]], dim=1)).squeeze(1)


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def batch(rows: tuple[int, ...] = ROWS, size: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Dense features, an id of each table, and labels."""
    made = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, count, (size,), generator=made) for count in rows], dim=1)
    return torch.randn(size, DENSE, generator=made), ids, torch.randint(0, 2, (size,), generator=made).float()


def make() -> tuple[nn.Module, sx.Hints]:
    torch.manual_seed(0)
    dense, ids, labels = batch()
    hints = sx.Hints(
        args=(dense, ids),
        loss=F.binary_cross_entropy_with_logits,
        targets=(labels,),
        specs=SPECS,
        optimizer=lambda params: torch.optim.Adagrad(params, lr=0.01),
    )
    return DLRM(), hints


if __name__ == "__main__":
    model, hints = make()
    pm = sx.parallelize(model, MESH, hints, virtual=True)
    for number in range(3):
        dense, ids, labels = batch(seed=number)
        print(f"step {number}: loss {pm.step(dense, ids, labels).item():.4f}")
    print(pm.verify())
    print(pm.report())
