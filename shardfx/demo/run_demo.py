"""``shardfx demo``: a small decoder, trained on four virtual ranks beside the same training on one device.

What it shows is what it checks: both losses step by step, all gradients of one step in float64, what the plan costs,
why a weight is sharded as it is, and the pictures.
"""

from __future__ import annotations

import copy
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.panel import Panel
from rich.rule import Rule
from rich.text import Text

from shardfx.api import parallelize
from shardfx.ir.mesh import Mesh
from shardfx.module.parallel_module import ParallelModule
from shardfx.report.console import seconds_text, table

from . import demo_model
from .demo_model import SPECS, Decoder, batches, make

FLOAT32 = 1e-3
"""How far the losses may part over the steps in float32: rounding, grown by the training itself."""
FLOAT64 = 1e-12
"""The largest relative error of a gradient after one step in float64."""
SHOWN = 8


def demo(out: Console, folder: Path, steps: int = 40) -> int:
    """Run the demo; gives the exit code: 0 if the ranks computed what one device computes."""
    torch.manual_seed(0)
    mesh = Mesh(dp=2, tp=2)
    model = Decoder()
    intro = Text.assemble(
        ("A Llama-like decoder on 4 ranks", "bold"),
        f", dp 2 x tp 2, with sequence parallelism: {sum(p.numel() for p in model.parameters()):,} parameters,\n",
        f"{len(SPECS)} hints, and not a line of the model changed. The ranks are virtual: all in this process.",
    )
    out.print(Panel(intro, title="shardfx demo", title_align="left", border_style="cyan", expand=False))
    started = time.perf_counter()
    with out.status("capturing and planning"):
        pm = parallelize(model, mesh, make()[1], virtual=True)
    _check(out, True, f"planned in {seconds_text(time.perf_counter() - started)}: {len(pm.planned.nodes)} ops per rank")
    good = train(out, pm, copy.deepcopy(model), steps)
    with out.status("one step in float64"):
        error, worst = double_step(model, mesh)
    good &= _check(out, error <= FLOAT64, f"one step in float64: no gradient is off by more than {error:.1e} ({worst})")
    out.print()
    out.print(Rule("What the plan costs", align="left", style="dim"))
    out.print(pm.report())
    out.print(Rule("Why it is so", align="left", style="dim"))
    out.print(str(pm.explain("layers.0.wo.weight")), markup=False)
    out.print()
    out.print(Rule("To look at", align="left", style="dim"))
    with out.status("drawing"):
        paths = pm.draw(folder)
    paths.append(pm.plan.save(folder / "plan.json"))
    for path in paths:
        out.print(f"  {path}", soft_wrap=True, style="cyan")
    return 0 if good else 1


def train(out: Console, pm: ParallelModule, model: Decoder, steps: int) -> bool:
    """Train both on the same batches; says whether their losses agree."""
    optimizers = [torch.optim.AdamW(m.parameters(), lr=3e-3, foreach=False) for m in (pm, model)]
    losses: list[tuple[float, float]] = []
    with out.status("training") as status:
        for _, (x, y) in zip(range(steps), batches(), strict=False):
            for optimizer in optimizers:
                optimizer.zero_grad()
            four = pm(x, y)
            four.backward()
            one = demo_model.loss(model(x), y)
            one.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append((four.item(), one.item()))
            status.update(f"training: step {len(losses)} of {steps}, loss {four.item():.4f}")
    made = table("Loss of the global batch, float32", "step", "4 ranks", "1 device", "difference", right=range(4))
    every = max(steps // SHOWN, 1)
    for step, (a, b) in enumerate(losses, 1):
        if step in (1, steps) or step % every == 0:
            made.add_row(str(step), f"{a:.6f}", f"{b:.6f}", Text(f"{abs(a - b):.1e}", "dim"))
    out.print()
    out.print(made)
    out.print()
    off = max((abs(a - b) / abs(b) for a, b in losses), default=0.0)
    return _check(out, off <= FLOAT32, f"{steps} steps in float32: the losses part by at most {off:.1e} of their size")


def double_step(model: Decoder, mesh: Mesh) -> tuple[float, str]:
    """The largest relative error over all gradients of one step in float64, and whose it is."""
    model = copy.deepcopy(model).double()
    pm = parallelize(model, mesh, make()[1], virtual=True)
    x, y = next(batches())
    pm(x, y).backward()
    demo_model.loss(model(x), y).backward()
    grads = pm.full_grads()
    errors = {
        name: float((grads[name] - p.grad).abs().max() / p.grad.abs().max())
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    worst = max(errors, key=errors.__getitem__)
    return errors[worst], worst


def _check(out: Console, good: bool, text: str) -> bool:
    out.print(Text.assemble(("  ✓ ", "bold green") if good else ("  ✗ ", "bold red"), text))
    return good
