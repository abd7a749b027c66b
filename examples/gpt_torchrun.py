"""The same GPT on real processes: only the command differs. Parameters are DTensors, as torch's tools expect them.

torchrun --nproc-per-node 4 examples/gpt_torchrun.py              # append FOLDER to save a checkpoint there
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from gpt_megatron import make

import shardfx as sx

model, hints = make()
pm = sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)
optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
for step in range(10):
    optimizer.zero_grad()
    loss = pm(*hints.args, *hints.targets)
    loss.backward()
    optimizer.step()
    if not pm._this_rank:
        print(f"step {step}  loss {loss.item():.5f}")
for folder in sys.argv[1:]:
    dcp.save({"model": pm.state_dict()}, checkpoint_id=folder)
if dist.is_initialized():  # not where it was started by python alone, on four virtual ranks
    dist.destroy_process_group()
