"""Programs as files: one readable Python file per rank, which runs under ``torchrun`` with nothing but torch.

folder/rank0.py     forward(...), as generated, with module paths and source lines
folder/rank0.pt     its pieces of parameters and buffers, constants, and the example inputs (weights only)
folder/layout.py    what stands before and after a collective: our own file, which needs torch only
folder/groups.json  the process groups, in the order in which all ranks make them
folder/run.py       torchrun --nproc-per-node N run.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from shardfx.ir import random
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh

from . import layout
from .codegen import Program
from .groups import axes_of

HEADER = '''"""Rank {rank} of {mesh}. It takes its own pieces of these inputs, and gives its pieces of the outputs.

{inputs}
"""

from math import inf, nan

import torch
from torch import device
{imports}
INPUTS = {names}
OUTPUTS = {outputs}


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
  of what `OUTPUTS` names. Behind each line stands the module and the source line that it comes from.
- `rankN.pt`: those pieces, by name (`torch.load(..., weights_only=True)`). Put your own there, or call `forward`
  yourself.
- `groups.json`: the names of the process groups, and the ranks in each; `run.py` shows how they are made.
- `layout.py`{random}: what the programs call besides torch's own operators.
"""


def write_rank(folder: Path, rank: int, program: Program, mesh: Mesh, state: Mapping[str, torch.Tensor]) -> None:
    """Write one rank's program, and what it starts from."""
    code = program.module.graph.python_code("self").src.strip("\n")
    code = re.sub(r"\bshardfx_runtime_layout_(\w+)", r"layout.\1", code)
    code = code.replace("def forward(self, ", "def forward(").replace("def forward(self)", "def forward()")
    imports = ["import layout"] if "layout." in code else []
    imports += ["import random_ops  # defines torch.ops.shardfx"] if uses_random(program) else []
    places = [f"    {g.name}: {g.value.spec.text(g.value.shape) if g.value.spec else '?'}" for g in program.inputs]
    header = HEADER.format(
        rank=rank,
        mesh=mesh,
        inputs="\n".join(places),
        imports="\n".join(["", *imports, ""]) if imports else "",
        names=json.dumps([g.name for g in program.inputs], indent=4),
        outputs=json.dumps([f"{o.kind}:{o.name}" for o in program.outputs], indent=4),
    )
    (folder / f"rank{rank}.py").write_text(header + code + "\n", encoding="utf-8")
    torch.save(dict(state), folder / f"rank{rank}.pt")


def write_shared(folder: Path, graph: Graph, program: Program) -> None:
    """Write what all ranks share."""
    mesh = graph.mesh
    groups: dict[str, tuple[int, ...]] = {}
    for axes in axes_of(graph):
        for rank in range(mesh.size):
            groups.setdefault(mesh.group_name(rank, axes), mesh.group(rank, axes))
    (folder / "groups.json").write_text(json.dumps([[n, list(r)] for n, r in groups.items()], indent=1) + "\n")
    (folder / "run.py").write_text(RUN.format(size=mesh.size), encoding="utf-8")
    used = uses_random(program)
    text = README.format(mesh=mesh, size=mesh.size, random=" and `random_ops.py`" if used else "")
    (folder / "README.md").write_text(text, encoding="utf-8")
    copy(layout.__file__, folder / "layout.py")
    if used:
        copy(random.__file__, folder / "random_ops.py")


def uses_random(program: Program) -> bool:
    """Whether the program calls our own random ops."""
    return any(getattr(node.target, "namespace", "") == "shardfx" for node in program.module.graph.nodes)


def copy(source: str | None, target: Path) -> None:
    assert source is not None
    target.write_text(Path(source).read_text(encoding="utf-8"), encoding="utf-8")
