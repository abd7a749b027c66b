"""A plain GPT with Megatron's cuts: heads and hidden units over tp, the batch over dp, tokens over tp between the blocks.

python examples/gpt_megatron.py                                 # four virtual ranks in this process
torchrun --nproc-per-node 4 examples/gpt_megatron.py            # four processes, the same losses
shardfx plan examples/gpt_megatron.py:make --mesh dp=2,tp=2     # what the plan costs
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx

BATCH, LENGTH, VOCAB, DIM, HEADS, LAYERS = 8, 32, 256, 64, 4, 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.fc1, self.fc2 = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(DIM, -1))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Parameter(torch.randn(LENGTH, DIM) / 10)
        self.layers, self.ln = nn.ModuleList(Block() for _ in range(LAYERS)), nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok(tokens) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.ln(x))


WEIGHTS = {f"layers.*.{fc}.weight": "tp, -" for fc in ("qkv", "fc1")} | {"tok.weight": "tp, -", "head.weight": "tp, -"}
WEIGHTS |= {f"layers.*.{fc}.bias": "tp" for fc in ("qkv", "fc1")} | {f"layers.*.{fc}.weight": "-, tp" for fc in ("proj", "fc2")}
TOKENS = {"layers.*.ln1": "dp, tp, -", "layers.*.ln2": "dp, tp, -", "ln": "dp, tp, -"}


def make() -> tuple[nn.Module, sx.Hints]:
    torch.manual_seed(0)
    x, y = torch.randint(0, VOCAB, (2, BATCH, LENGTH))
    hints = {"args.0": "dp, -", "targets.0": "dp, -", **WEIGHTS, **TOKENS}
    return GPT(), sx.Hints(
        args=(x,), targets=(y,), specs=hints, loss=lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())
    )


if __name__ == "__main__":
    model, hints = make()
    pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)
    optimizer = torch.optim.AdamW(pm.parameters(), lr=3e-3)
    for step in range(1, 21):
        loss = pm(*hints.args, *hints.targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 5 == 0 and (not dist.is_initialized() or dist.get_rank() == 0):
            print(f"step {step:2}  loss {loss.item():.6f}", flush=True)
