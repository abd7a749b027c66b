"""Optimizers of pytorch_optimizer stepped on virtual shards, compared with one device in float64.

    python -m benchmarks.optimizer_survey [--steps 12] [names ...]

The library does not come with shardfx: ``pip install --no-deps pytorch_optimizer``.

One line for each optimizer, one entry for each sharding of the model: right (and how far apart the weights are,
relative to what the steps changed), refused (a ``shardfx.Error``), or WRONG. An optimizer that one device does not run,
or that gives other weights when it is run twice, is not compared. The exit status is 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import sys
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

import shardfx as sx

LIBRARY = "pytorch_optimizer"
CLOSE = 1e-6
"""Relative to the change of each parameter: some states are float32."""
CLOSURES = ("AliG", "BSAM")
"""Optimizers that want a closure, and say so when they step."""
PLANS: dict[str, tuple[sx.Mesh, dict[str, Any]]] = {
    "rows": (sx.Mesh(tp=2), {"specs": {"conv.weight": "tp, -, -, -", "first.weight": "tp, -", "norm.*": "tp"}}),
    "columns": (sx.Mesh(tp=2), {"specs": {"conv.weight": "-, -, tp, -", "first.weight": "-, tp"}}),
    "zero=3": (sx.Mesh(dp=4), {"specs": {"args.0": "dp, -, -, -"}, "zero": 3, "zero_min_numel": 1}),
}
Make = Callable[[nn.Module], torch.optim.Optimizer]


class Net(nn.Module):
    """Parameters of one, two and four dims."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.LayerNorm(128)
        self.first = nn.Linear(128, 16)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(self.norm(self.conv(x).flatten(1))).tanh())  # type: ignore[no-any-return]


def squares(out: Tensor) -> Tensor:
    """The loss."""
    return out.square().sum()


def model() -> Net:
    """The model with its first weights."""
    torch.manual_seed(0)
    return Net().double()


def example() -> Tensor:
    """A batch."""
    return torch.randn(8, 3, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@cache
def planned(plan: str) -> sx.ParallelModule:
    """The model under a plan."""
    mesh, hints = PLANS[plan]
    return sx.parallelize(model(), mesh, sx.Hints(args=(example(),), loss=squares, **hints))


def makers(kind: type[torch.optim.Optimizer]) -> list[Make]:
    """How the optimizer may be made, the simplest first."""
    takes = inspect.signature(kind).parameters
    given: dict[str, Any] = {"lr": 1e-2} if "lr" in takes else {}
    given |= {name: 100 for name in ("num_iterations", "num_data") if name in takes}

    def groups(module: nn.Module) -> list[dict[str, Any]]:
        named = list(module.parameters())
        flat = [p for p in named if p.dim() != 2]
        return [{"params": [p for p in named if p.dim() == 2], "use_muon": True}, {"params": flat, "use_muon": False}]

    return [
        lambda module: kind(module.parameters(), **given),
        lambda module: kind(groups(module), **given),
        lambda module: kind([p for p in module.parameters() if p.dim() == 2], **given),  # type: ignore[arg-type]
        lambda module: kind(module, **given),  # type: ignore[arg-type]
    ]


def trained(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, Tensor]:
    """The weights after some steps."""
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    needed = type(optimizer).__name__ in CLOSURES or (closure is not None and closure.default is closure.empty)
    x = example()

    @torch.enable_grad()
    def loss() -> Tensor:
        optimizer.zero_grad()
        made: Tensor = module(x) if isinstance(module, sx.ParallelModule) else squares(module(x))
        made.backward()
        return made

    for number in range(steps):
        x = example() * (1 + number % 3)
        if needed:
            optimizer.step(loss)  # type: ignore[arg-type]
        else:
            loss()
            optimizer.step()
    whole = module.full_state_dict() if isinstance(module, sx.ParallelModule) else module.state_dict()
    return {name: tensor.detach().clone() for name, tensor in whole.items()}


def reference(makes: list[Make], steps: int) -> tuple[Make, dict[str, Tensor]]:
    """One device's weights, and how the optimizer is made.

    Raises:
        Exception: that of the optimizer's simplest form, where it runs in none.
    """
    first: Exception | None = None
    for make in makes:
        module = model()
        try:
            return make, trained(module, make(module), steps)
        except Exception as error:  # of the library's, which has many forms
            first = first or error
    assert first is not None
    raise first


def apart(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference, relative to the change of its parameter."""
    start, worst = model().state_dict(), 0.0
    for name, whole in theirs.items():
        change = max(float((whole - start[name]).abs().max()), 1e-12)
        worst = max(worst, float((ours[name] - whole).abs().nan_to_num(torch.inf).max()) / change)
    return worst


def survey(name: str, steps: int) -> dict[str, str]:
    """What each plan does with an optimizer: right, refused or WRONG and why; or under "" why it is not compared."""
    kind = importlib.import_module(LIBRARY).load_optimizer(name)
    try:
        make, whole = reference(makers(kind), steps)
        again = model()
        if apart(trained(again, make(again), steps), whole) > CLOSE:
            return {"": "not compared: other weights each time"}
    except Exception as error:
        return {"": f"not run: {type(error).__name__}: {error}".splitlines()[0][:100]}
    if not all(bool(tensor.isfinite().all()) for tensor in whole.values()):
        return {"": "not compared: no finite weights"}
    found = {}
    for plan in PLANS:
        pm = planned(plan)
        pm.load_full_state_dict(model().state_dict())
        try:
            far = apart(trained(pm, make(pm), steps), whole)
            found[plan] = f"{'right' if far < CLOSE else 'WRONG'} ({far:.0e})"
        except sx.Error as refusal:
            found[plan] = f"refused ({refusal.got})"
        except Exception as failure:
            found[plan] = f"CRASHED ({type(failure).__name__}: {failure})".splitlines()[0][:100]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description="Optimizers of pytorch_optimizer on virtual shards.")
    parser.add_argument("names", nargs="*", help="of optimizers; all where none is named")
    parser.add_argument("--steps", type=int, default=12)
    asked = parser.parse_args()
    if importlib.util.find_spec(LIBRARY) is None:
        print(f"{LIBRARY} is not installed: pip install --no-deps {LIBRARY}")
        return 2
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for name in asked.names or importlib.import_module(LIBRARY).get_supported_optimizers():
        found = survey(name, asked.steps)
        words = {each.partition(" ")[0].rstrip(":") for each in found.values()}
        word = next((each for each in ("WRONG", "CRASHED", "not", "refused") if each in words), "right")
        counts["right in some plans, refused in others" if word == "refused" and "right" in words else word] += 1
        print(
            f"{name:20} " + "; ".join(f"{plan}: {text}" if plan else text for plan, text in found.items()), flush=True
        )
    print("\n" + ", ".join(f"{count} {word}" for word, count in counts.most_common()))
    return int(bool(counts["WRONG"] or counts["CRASHED"]))


if __name__ == "__main__":
    sys.exit(main())
