"""A plain GPT sharded as by Megatron: heads and hidden units over tp, the batch over dp, tokens between blocks over tp.

python examples/gpt_megatron.py                                   # train on four virtual ranks, in this process
shardfx plan examples/gpt_megatron.py:make --mesh dp=2,tp=2       # the cost of the plan, without running it
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

BATCH, LENGTH, VOCAB, DIM, HEADS = 8, 32, 256, 64, 4
SPECS = {"args.0": "dp, -", "targets.0": "dp, -", "tok.weight": "tp, -", "head.weight": "tp, -"}
SPECS |= {"layers.*.qkv.weight": "tp, -", "layers.*.proj.weight": "-, tp"}
SPECS |= {"layers.*.fc1.weight": "tp, -", "layers.*.fc2.weight": "-, tp"}
SPECS |= {"layers.*.ln1": "dp, tp, -", "layers.*.ln2": "dp, tp, -", "ln": "dp, tp, -"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.qkv, self.proj = nn.LayerNorm(DIM), nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.ln2, self.fc1, self.fc2 = nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = [t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(DIM, -1)]
        x = x + self.proj(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.zeros(LENGTH, DIM))
        self.layers = nn.Sequential(Block(), Block())
        self.ln, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.ln(self.layers(self.tok(tokens) + self.pos)))


def make() -> tuple[nn.Module, sx.Hints]:
    torch.manual_seed(0)
    x, y = torch.randint(0, VOCAB, (2, BATCH, LENGTH))
    return GPT(), sx.Hints(args=(x,), loss=lambda out, y: F.cross_entropy(out.mT, y), targets=(y,), specs=SPECS)


if __name__ == "__main__":
    model, hints = make()
    pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    for step in range(10):
        optimizer.zero_grad()
        loss = pm(*hints.args, *hints.targets)
        loss.backward()
        optimizer.step()
        print(f"step {step}  loss {loss.item():.5f}")
    print(pm.verify(), pm.report(), *pm.draw("out/gpt_megatron"), sep="\n")
