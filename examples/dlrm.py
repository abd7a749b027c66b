"""A recommendation model (DLRM, Naumov et al., 2019): embedding tables sharded over the ranks of the batch.

python examples/dlrm.py                                   # train on four virtual ranks, in this process
shardfx plan examples/dlrm.py:make --mesh dp=4            # the cost of the plan, without running it

The first table is sharded by rows, the others by columns: ids and rows travel, never a table.
"""

from itertools import combinations, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

ROWS, DIM, DENSE, BATCH = (6000, 2000, 9000), 16, 13, 64
SPECS = {"args.*": "dp, -", "targets.0": "dp", "tables.0.weight": "dp, -"}
SPECS |= {"tables.1.weight": "-, dp", "tables.2.weight": "-, dp"}


class DLRM(nn.Module):
    def __init__(self, rows: tuple[int, ...] = ROWS, dim: int = DIM, sparse: bool = False) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(count, dim, sparse=sparse) for count in rows)
        self.first, self.second = ([pair[i] for pair in combinations(range(len(rows) + 1), 2)] for i in (0, 1))
        self.bottom, self.top = mlp(DENSE, 32, dim), mlp(dim + len(self.first), 32, 1)

    def forward(self, dense: Tensor, ids: Tensor) -> Tensor:
        x = self.bottom(dense)
        vectors = torch.stack([x, *(table(ids[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.first, self.second]], dim=1)).squeeze(1)


def mlp(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*[layer for pair in pairwise(sizes) for layer in (nn.Linear(*pair), nn.ReLU())][:-1])


def batch(rows: tuple[int, ...] = ROWS, size: int = BATCH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    ids = torch.stack([torch.randint(0, count, (size,), generator=made) for count in rows], dim=1)
    return torch.randn(size, DENSE, generator=made), ids, torch.randint(0, 2, (size,), generator=made).float()


def make() -> tuple[nn.Module, sx.Hints]:
    torch.manual_seed(0)
    (*args, labels), loss = batch(), F.binary_cross_entropy_with_logits
    step = {"optimizer": lambda params: torch.optim.Adagrad(params, lr=0.01)}
    return DLRM(), sx.Hints(args=tuple(args), loss=loss, targets=(labels,), specs=SPECS, **step)


if __name__ == "__main__":
    model, hints = make()
    pm = sx.parallelize(model, sx.Mesh(dp=4), hints, virtual=True)
    for number in range(10):
        print(f"step {number}  loss {pm.step(*batch(seed=number)).item():.5f}")
    print(pm.verify(), pm.report(), sep="\n")
