"""Source locations of nodes in the user's own code: module path, file and line."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import torch

from shardfx.ir.graph import Graph, Phase, Where

PREFIX, LOSS = "model.", "loss"
TORCH = str(Path(torch.__file__).parent)
ROOT = str(Path(__file__).parents[2])
OWN = tuple(
    f"{ROOT}/{name}"
    for name in (
        "ir/",
        "passes/",
        "runtime/",
        "visualize/",
        *(f"{at}{n}" for at in ("", "shardfx/") for n in ("module/", "api.py", "compile.py")),
    )
)
"""The paths of shardfx's own code, as installed and in a checkout."""
TYPED = "<model>"
"""The file of a forward that was typed in, of which torch has no line."""
CAPTURE = str(Path(__file__).with_name("model_and_loss.py"))


def inherit_sources(graph: Graph, loss: Where | None) -> None:
    """Assign nodes outside of modules to the loss, and sums of gradients to the module of the operand made at their
    line."""
    for node in graph.nodes:
        if node.where.file == CAPTURE and loss is not None:
            node.where = loss
        elif not node.where.module and (node.phase is Phase.BACKWARD or not node.where.file):
            near = [v.node.where for v in node.operands if v.node is not None]
            of_line = [w for w in near if w.module and (w.file, w.line) == (node.where.file, node.where.line)]
            node.where = next(iter(of_line or (near if not node.where.file else [])), node.where)


def source_of(node: torch.fx.Node) -> Where:
    """The module and the line of the user's code that a traced node comes from; "" and 0 where torch does not say."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    path = next(reversed(stack.values()))[0] if stack else ""
    module = path.removeprefix(PREFIX) if path.startswith(PREFIX) else "" if path == "model" else path
    return _source(module, node.meta.get("stack_trace") or "", path.startswith("model"))


def is_user_file(file: str) -> bool:
    """Whether a file is neither torch's nor ours."""
    return not file.startswith((TORCH, "<", *OWN))


@lru_cache(maxsize=65536)
def _source(module: str, trace: str, of_model: bool) -> Where:
    """The innermost frame of the user's own code; where a model is all torch's, the innermost one of torch."""
    lines = trace.splitlines()
    frames = []
    for i, text in enumerate(lines):
        if text.strip().startswith('File "'):
            name, _, rest = text.strip()[6:].partition('", line ')
            code = lines[i + 1].strip() if i + 1 < len(lines) else ""
            frames.append(Where(module, name, int(rest.split(",")[0] or 0), code))
    users = [f for f in frames if is_user_file(f.file)]
    torchs = [f for f in frames if f.file.startswith(TORCH)]
    if users:
        return users[-1]
    if of_model and torchs:
        return torchs[-1]
    if of_model and frames:
        return Where(module, "" if module else TYPED)
    return Where(module, CAPTURE if frames and not module else "")


def describe(where: Where) -> str:
    """A source location with its line of code."""
    return "  ".join(part for part in (str(where), where.code) if part)
