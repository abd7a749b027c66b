"""Export of rank programs: one readable Python file per rank, which runs under ``torchrun`` with nothing but torch.

folder/rank0.py     forward(...), as generated, with module paths and source lines
folder/rank0.pt     its shards of parameters and buffers, constants, and the example inputs (weights only)
folder/pack.py, memory_ops.py    what stands around collectives, and destinations: our own files, with torch alone
folder/groups.json  the process groups, in the order in which all ranks make them
folder/run.py       torchrun --nproc-per-node N run.py
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import fx

from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.computing.library import SOURCES
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.rank_module import ATTRIBUTE_OPS
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.distributed.groups import axes_of


def write_rank(folder: Path, rank: int, program: RankProgram, mesh: Mesh, state: Mapping[str, torch.Tensor]) -> None:
    """Write one rank's program, and its shards, constants and example inputs."""
    code = "\n\n\n".join(functions(program.module(), "forward"))
    files = own_files(program.graph)
    for file, source in files.items():
        named = "_".join(Path(source).with_suffix("").parts[-3:]).partition("ops_")[2]
        code = re.sub(rf"\bshardfx_ir_ops_{named}_(\w+)", rf"{file}.\1", code)
    imports = [f"import {file}" for file in files]  # some define ops of torch.ops.shardfx
    places = [f"    {g.name}: {g.value.spec.text(g.value.shape) if g.value.spec else '?'}" for g in program.inputs]
    checks = [(o, o.guard.expected, str(o.guard.where)) for o in program.outputs if o.guard]
    lost = [output for output in program.outputs if output.kind is OutputKind.OVERFLOW]
    checks += [(output, 0, "rows, for which there is no room") for output in lost]
    guards = [f'    "{o.kind}:{o.name}": ({expected!r}, {where!r}),' for o, expected, where in checks]
    header = HEADER.format(
        rank=rank,
        mesh=mesh,
        inputs="\n".join(places),
        imports="\n".join(["", *imports, ""]),
        names=json.dumps([g.name for g in program.inputs], indent=4),
        outputs=json.dumps([f"{o.kind}:{o.name}" for o in program.outputs], indent=4),
        guards="\n".join(["{", *guards, "}"]) if guards else "{}",
    )
    (folder / f"rank{rank}.py").write_text(header + code + "\n", encoding="utf-8")
    torch.save(dict(state), folder / f"rank{rank}.pt")


def functions(module: fx.GraphModule, name: str) -> list[str]:
    """The code of a module as a function, after those of its submodules for iterations and units."""
    code, found = module.graph.python_code("self").src.strip("\n"), []
    for target in dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op in ATTRIBUTE_OPS):
        unit = getattr(module, target, None)
        if isinstance(unit, fx.GraphModule):
            found += functions(unit, f"{name}_{target}")
            code = re.sub(rf"\bself\.{target}\b", f"{name}_{target}", code)
    return [*found, re.sub(r"^def forward\(self(, )?", f"def {name}(", code)]


def write_shared(folder: Path, graph: Graph, program: RankProgram) -> None:
    """Write the files that all ranks share: helpers, process groups and ``run.py``."""
    mesh = graph.mesh
    groups: dict[str, tuple[int, ...]] = {}
    for axes in axes_of(graph):
        for rank in range(mesh.size):
            groups.setdefault(mesh.group_name(rank, axes), mesh.group(rank, axes))
    (folder / "groups.json").write_text(json.dumps([[n, list(r)] for n, r in groups.items()], indent=1) + "\n")
    (folder / "run.py").write_text(RUN.format(size=mesh.size), encoding="utf-8")
    for file, source in own_files(program.graph).items():
        code = RELATIVE.sub(r"from \1 import", Path(source).read_text(encoding="utf-8"))  # the folder is no package
        (folder / f"{file}.py").write_text(code, encoding="utf-8")


RELATIVE = re.compile(r"^from \.+(?:\w+\.)*(\w+) import", re.MULTILINE)


def own_files(graph: fx.Graph) -> dict[str, str]:
    """The source files of shardfx that a program needs, by their names in the export: those that define its callees,
    and their imports."""
    called = {node.target for node in graph.nodes if node.op == "call_function"}
    rows = [row.function for row in map(row_of, called) if row is not None and inspect.isfunction(row.function)]
    found = [pack.__file__, memory_ops.__file__, *(SOURCES[op] for op in called if op in SOURCES)]
    found += [inspect.getfile(function) for function in rows if function.__module__.startswith("shardfx.")]
    for source in found:
        imported = RELATIVE.findall(Path(source).read_text(encoding="utf-8"))
        beside = [str(next(Path(memory_ops.__file__).parent.rglob(f"{name}.py"))) for name in imported]
        found += [each for each in beside if each not in found]
    return {Path(source).stem: source for source in dict.fromkeys(found)}


# ---- templates

HEADER = '''"""Rank {rank} of {mesh}. It takes its own shards of these inputs, and gives its shards of the outputs.

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

rankN.py has the program of rank N: `forward` takes what INPUTS names, which is in rankN.pt, and gives what OUTPUTS
names; where these are in GUARDS, they must equal the value there. Behind each line is the model's line.
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
        group = dist.new_group(ranks, sort_ranks=ranks == sorted(ranks))
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
