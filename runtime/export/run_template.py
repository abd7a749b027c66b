"""The texts of exported programs."""

from __future__ import annotations

HEADER = '''"""Rank {rank} of {mesh}. It takes its own pieces of these inputs, and gives its pieces of the outputs.

{inputs}
"""

from math import inf, nan

import torch
from torch import device
{imports}
INPUTS = {names}
OUTPUTS = {outputs}
GUARDS = {guards}


'''

RUN = '''"""Run the programs of this folder once, each rank its own.

    torchrun --nproc-per-node {size} run.py            # prints each rank's loss, or norms of its results
    torchrun --nproc-per-node {size} run.py --save     # and writes all that rank N returns as results{{N}}.pt
"""

import importlib
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group

FOLDER = Path(__file__).parent
RANK = int(os.environ["RANK"])


def main() -> None:
    device = torch.device("cpu")
    if torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    assert dist.get_world_size() == {size}, "start {size} processes"
    for name, ranks in json.loads((FOLDER / "groups.json").read_text()):
        group = dist.new_group(ranks) if ranks == sorted(ranks) else dist.new_group(ranks, sort_ranks=False)
        if RANK in ranks:
            _register_process_group(name, group)
    sys.path.insert(0, str(FOLDER))
    program = importlib.import_module(f"rank{{RANK}}")
    state = torch.load(FOLDER / f"rank{{RANK}}.pt", weights_only=True, map_location=device)
    missing = [name for name in program.INPUTS if name not in state]
    assert not missing, f"rank{{RANK}}.pt has no {{missing}}: put them there"
    with torch.no_grad():
        results = program.forward(*[state[name] for name in program.INPUTS])
    named = dict(zip(program.OUTPUTS, results, strict=True))
    for name, (expected, where) in program.GUARDS.items():  # what the model did for the example
        torch.testing.assert_close(
            named[name].cpu(),
            torch.tensor(expected, dtype=named[name].dtype).reshape(named[name].shape),
            msg=lambda text: f"these data lead the model elsewhere than the example did, at {{where}}: {{text}}",
        )
    if "--save" in sys.argv:
        torch.save(named, FOLDER / f"results{{RANK}}.pt")
    first = next(iter(named))
    value = named[first]
    print(f"rank {{RANK}}: {{first}} {{value.item() if value.numel() == 1 else value.norm().item():.6g}}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
'''

README = """# Programs of {mesh}

One file per rank, written by shardfx. They need torch and nothing else:

    torchrun --nproc-per-node {size} run.py

- `rankN.py`: the program of rank N. `forward` takes the rank's own pieces of what `INPUTS` names, and gives its pieces
  of what `OUTPUTS` names; where these are in `GUARDS`, they must be what stands there. Behind each line stands the
  module and the source line that it comes from.
- `rankN.pt`: those pieces, by name (`torch.load(..., weights_only=True)`). Put your own there, or call `forward`
  yourself.
- `groups.json`: the names of the process groups, and the ranks in each; `run.py` shows how they are made.
- `pack.py`, `memory_ops.py`{own}: what the programs call besides torch's own operators.
"""
