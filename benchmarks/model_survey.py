"""Loss and gradients of unedited models of a library, tiny and random, in float64 on virtual ranks and on one device.

    python -m benchmarks.model_survey [--library timm] [--mesh dp=2] [--guard] [--verify] [--seconds 240] [names ...]

Libraries: transformers, timm, diffusers; their models are in ``benchmarks/survey/``. Neither timm nor diffusers comes
with shardfx.

One line each: equal (and how much of the arithmetic is not shared), proven, if that was asked for, or UNPROVEN (with
what ``pm.verify()`` says); refused (with the message), WRONG (by how much),
CRASHED (neither), not run (one device does not run it either), or not compared (one device gives something else each
time, or gradients that differ where its inputs are moved by their last digit; or it takes too much memory). Each in a
process of its own, with a limit of time and of memory.
The hints: the batch over ``dp``; over ``tp`` the weight of every Linear, by the larger of its sides; over ``ep`` the
experts' weights.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import logging
import multiprocessing
import re
import resource
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import shardfx as sx
from benchmarks.survey.samples import BATCH, Sample
from shardfx.ir.capture.model_and_loss import leaf_names

LIBRARIES = {library: f"pip install {library}" for library in ("transformers", "timm", "diffusers")}
EQUAL, EQUAL_FLOAT32 = 1e-5, 1e-3
"""Libraries compute norms and rotary tables in float32, whatever the model's dtype."""
FLOOR = 1e-3
MOVED = 45
"""By how many units of the last place weights and inputs are moved to see how well a model is conditioned: 1e-14."""


@dataclass(frozen=True)
class Asked:
    """How each model is surveyed."""

    mesh: dict[str, int]
    guard: bool
    verify: bool
    gigabytes: float


def results(out: Any) -> list[Tensor]:
    """What the loss is of: the results that have gradients."""
    return [x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad]


def loss(out: Any, wanted: Tensor) -> Tensor:
    first, *others = results(out)
    return sum((x.square().mean() for x in others), start=((first - wanted) ** 2).mean())


def specs_of(model: nn.Module, kwargs: dict[str, Any], wanted: Tensor, mesh: sx.Mesh) -> dict[str, str]:
    """The hints on a mesh."""
    specs = {}
    if "dp" in mesh.names:
        tensors = [(name, x) for name, x in leaf_names((), kwargs, (wanted,)) if isinstance(x, Tensor)]
        specs.update(
            {name: ", ".join(["dp"] + ["-"] * (x.dim() - 1)) for name, x in tensors if x.shape[:1] == (BATCH,)}
        )
    for path, module in model.named_modules():
        if "tp" in mesh.names and type(module) is nn.Linear and min(module.weight.shape) >= mesh["tp"].size:
            specs[f"{path}.weight"] = "tp, -" if module.out_features >= module.in_features else "-, tp"
    if "ep" in mesh.names:
        experts = {n: p for n, p in model.named_parameters() if ".experts." in n and p.dim() == 3}
        specs.update(dict.fromkeys(experts, "ep, -, -"))
    return specs


def difference(a: Tensor, b: Tensor) -> float:
    """The largest difference over the largest magnitude."""
    wide = torch.complex128 if a.is_complex() else torch.float64
    return float((a.to(wide) - b.to(wide)).abs().max() / b.to(wide).abs().max().clamp_min(FLOOR)) if b.numel() else 0.0


@dataclass(frozen=True)
class Run:
    """What one device makes of a model."""

    loss: Tensor
    grads: dict[str, Tensor]

    @classmethod
    def of(cls, model: nn.Module, out: Any, wanted: Tensor) -> Run:
        whole = loss(out, wanted)
        whole.backward()
        return cls(whole.detach(), {path: p.grad for path, p in model.named_parameters() if p.grad is not None})

    def far_from(self, loss: Tensor, grads: dict[str, Tensor]) -> tuple[float, str]:
        """By how much others differ at most, and where."""
        worst = [(abs(loss.item() - self.loss.item()) / max(abs(self.loss.item()), FLOOR), "the loss")]
        return max(
            worst + [(difference(grads[path], grad), path) for path, grad in self.grads.items() if path in grads]
        )


def moved(x: Any) -> Any:
    """A value whose numbers differ by some units of their last place; what is no floating-point number stays."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x * (1 + MOVED * torch.finfo(x.dtype).eps * torch.randn_like(x))


def for_one_device(model: nn.Module) -> nn.Module:
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model


def moves_by(made: Sample, wanted: Tensor, whole: Run) -> float:
    """How far one device's own gradients move with the last digits of inputs and weights."""
    model = for_one_device(made.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(moved(parameter))
    other = Run.of(model, model(**tree_map(moved, dict(made.kwargs))), wanted)
    return whole.far_from(other.loss, other.grads)[0]


def verdict(make: Callable[[], Sample], asked: Asked) -> str:
    """What comes of one model: a line that begins with the verdict."""
    try:
        made, alone, again = make(), for_one_device(make().model), for_one_device(make().model)
        out = alone(**made.kwargs)
        torch.manual_seed(1)
        wanted = torch.randn_like(results(out)[0])
        whole, repeated = Run.of(alone, out, wanted), Run.of(again, again(**made.kwargs), wanted)
        if not whole.loss.isfinite():
            return f"not run: the loss on one device is {whole.loss.item()}"
        if whole.loss != repeated.loss or whole.far_from(repeated.loss, repeated.grads)[0] > EQUAL:
            return "not compared: it draws random numbers, in training, that no configuration turns off"
    except Exception as error:
        return f"not run: {first_line(error)}"
    mesh = sx.Mesh(**asked.mesh)
    specs = specs_of(made.model, dict(made.kwargs), wanted, mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            hints = sx.Hints(kwargs=made.kwargs, loss=loss, targets=(wanted,), specs=specs, guard=asked.guard)
            pm = sx.parallelize(made.model, mesh, hints, virtual=True)
            together = pm(wanted, **made.kwargs)
            together.backward()
            found = pm.full_grads()
        except sx.Error as error:
            return f"refused: {' | '.join(str(error).splitlines())}"
    lacking = sorted(whole.grads.keys() ^ found.keys())
    far, where = whole.far_from(together, found)
    notes = [str(each.message) for each in said if issubclass(each.category, sx.ShardfxWarning)]
    lost = "; ".join(f"LOST {text}" if "redundant compute over" in text else text for text in notes)
    near = EQUAL if wanted.dtype == torch.float64 else EQUAL_FLOAT32
    if not far < near or any(whole.grads[path].abs().max() > 0 for path in lacking if path in whole.grads):
        own = moves_by(make(), wanted, whole)
        if own > near:
            return f"not compared: ill-conditioned: last digits move its own gradients by {own:.2g}, we by {far:.2g}"
        return f"WRONG by {far:.2g} in {where}{f', without {lacking[:3]}' if lacking else ''}; {lost}"
    proof = pm.verify() if asked.verify else None
    if proof is not None and not proof:
        return f"UNPROVEN: {' | '.join(proof.why.splitlines())}"
    return f"{'equal' if proof is None else 'proven'} ({far:.0e}){'; ' + lost if lost else ''}"


def first_line(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def run_one(make: Callable[[str], Sample], name: str, asked: Asked, answer: Connection) -> None:
    """The verdict, said to the parent."""
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (int(asked.gigabytes * 1e9), resource.getrlimit(resource.RLIMIT_AS)[1]))
    try:
        said = verdict(partial(make, name), asked)
    except Exception as error:
        large = isinstance(error, MemoryError) or "allocate memory" in str(error)
        said = f"not compared: more than {asked.gigabytes:g} GB" if large else f"CRASHED {first_line(error)}"
    answer.send(said)


def in_a_process(make: Callable[[str], Sample], name: str, asked: Asked, seconds: float) -> str:
    """The verdict, from a process of its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run_one, args=(make, name, asked, there))
    child.start()
    there.close()
    try:
        return str(here.recv()) if here.poll(seconds) else f"CRASHED after {seconds:g} s"
    except EOFError:
        child.join()
        return f"CRASHED with exit code {child.exitcode}"
    finally:
        child.kill()
        child.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="architectures; all by default")
    parser.add_argument("--library", choices=LIBRARIES, default="transformers")
    parser.add_argument("--mesh", default="dp=2", help="such as dp=2,tp=2")
    parser.add_argument("--guard", action="store_true", help="with Hints(guard=True)")
    parser.add_argument("--verify", action="store_true", help="prove each by pm.verify()")
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--gigabytes", type=float, default=8, help="of address space, for each")
    given = parser.parse_args()
    if importlib.util.find_spec(given.library) is None:
        parser.error(f"{given.library} is not installed: {LIBRARIES[given.library]}")
    library = importlib.import_module(f"benchmarks.survey.of_{given.library}")
    sizes = {axis: int(size) for axis, _, size in (each.partition("=") for each in given.mesh.split(","))}
    asked = Asked(sizes, given.guard, given.verify, given.gigabytes)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    verdicts: Counter[str] = Counter()
    for name in given.names or library.NAMES:
        begun = time.perf_counter()
        said = in_a_process(library.sample, name, asked, given.seconds)
        verdicts[re.match(r"not \w+|\w+", said)[0]] += 1
        verdicts["with work not shared"] += "LOST" in said
        print(f"{name:28} {time.perf_counter() - begun:4.0f} s  {said}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in verdicts.items()))


if __name__ == "__main__":
    main()
