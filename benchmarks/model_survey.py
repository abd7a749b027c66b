"""Unedited models of transformers, tiny and random, in float64 on virtual ranks beside one device: loss and gradients.

    python -m benchmarks.model_survey [--mesh dp=2] [--guard] [--verify] [--seconds 240] [names ...]

One line each: equal (and how much of the arithmetic is not shared), proven, if that was asked for, or UNPROVEN (with
what ``pm.verify()`` says); refused (with the message), WRONG (by how much),
CRASHED (neither), not run (one device does not run it either), or not compared (one device gives something else each
time). Each in a process of its own, with a limit of time.
The hints: the batch over ``dp``; over ``tp`` the weight of every Linear, by the larger of its sides; over ``ep`` the
experts' weights.
"""

from __future__ import annotations

import argparse
import copy
import logging
import multiprocessing
import re
import time
import traceback
import warnings
from collections import Counter
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import shardfx as sx
from benchmarks.survey_models import BATCH, FLOAT32, NAMES, sample

EQUAL, EQUAL_FLOAT32 = 1e-5, 1e-3
"""Transformers computes norms and rotary tables in float32, whatever the model's dtype."""
FLOOR = 1e-3


def first_result(out: Any) -> Tensor:
    """What the loss is of: the first result that has a gradient."""
    return next(x for x in tree_leaves(out) if isinstance(x, Tensor) and x.is_floating_point() and x.requires_grad)


def loss(out: Any, wanted: Tensor) -> Tensor:
    return ((first_result(out) - wanted) ** 2).mean()


def specs_of(model: nn.Module, kwargs: dict[str, Any], wanted: Tensor, mesh: sx.Mesh) -> dict[str, str]:
    """The hints on a mesh."""
    specs = {}
    if "dp" in mesh.names:
        batched = {f"kwargs.{name}": value for name, value in kwargs.items()} | {"targets.0": wanted}
        specs.update(
            {name: ", ".join(["dp"] + ["-"] * (x.dim() - 1)) for name, x in batched.items() if x.shape[:1] == (BATCH,)}
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
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(FLOOR)) if b.numel() else 0.0


def verdict(name: str, mesh: sx.Mesh, guard: bool, verify: bool) -> str:
    """What comes of one architecture: a line that begins with the verdict."""
    try:
        made = sample(name)
        alone = copy.deepcopy(made.model)
        if hasattr(alone, "set_experts_implementation"):
            alone.set_experts_implementation("eager")
        again = copy.deepcopy(alone)
        out = alone(**made.kwargs)
        torch.manual_seed(1)
        wanted = torch.randn_like(first_result(out))
        repeated, whole = loss(again(**made.kwargs), wanted), loss(out, wanted)
        repeated.backward()
        whole.backward()
        if not whole.isfinite():
            return f"not run: the loss on one device is {whole.item()}"
        pairs = zip(alone.parameters(), again.parameters(), strict=True)
        if whole != repeated or any(p.grad is not None and difference(q.grad, p.grad) > EQUAL for p, q in pairs):
            return "not compared: it draws random numbers, in training, that no configuration turns off"
    except Exception as error:
        return f"not run: {first_line(error)}"
    grads = {path: p.grad for path, p in alone.named_parameters() if p.grad is not None}
    specs = specs_of(made.model, dict(made.kwargs), wanted, mesh)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            hints = sx.Hints(kwargs=made.kwargs, loss=loss, targets=(wanted,), specs=specs, guard=guard)
            pm = sx.parallelize(made.model, mesh, hints, virtual=True)
            together = pm(wanted, **made.kwargs)
            together.backward()
            found = pm.full_grads()
        except sx.Error as error:
            return f"refused: {' | '.join(str(error).splitlines())}"
    worst = [(abs(together.item() - whole.item()) / max(abs(whole.item()), FLOOR), "the loss")]
    worst += [(difference(found[path], grad), path) for path, grad in grads.items() if path in found]
    lacking = sorted(grads.keys() ^ found.keys())
    far, where = max(worst)
    notes = [str(each.message) for each in said if issubclass(each.category, sx.ShardfxWarning)]
    lost = "; ".join(f"LOST {text}" if "not shared over" in text else text for text in notes)
    near = EQUAL_FLOAT32 if name in FLOAT32 else EQUAL
    if not far < near or any(grads[path].abs().max() > 0 for path in lacking if path in grads):
        return f"WRONG by {far:.2g} in {where}{f', without {lacking[:3]}' if lacking else ''}; {lost}"
    proof = pm.verify() if verify else None
    if proof is not None and not proof:
        return f"UNPROVEN: {' | '.join(proof.why.splitlines())}"
    return f"{'equal' if proof is None else 'proven'} ({far:.0e}){'; ' + lost if lost else ''}"


def first_line(error: BaseException) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    text = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:200]} ({place.filename.rpartition('/')[2]}:{place.lineno})"


def run_one(name: str, sizes: dict[str, int], guard: bool, verify: bool, answer: Connection) -> None:
    """The verdict, said to the parent."""
    warnings.simplefilter("ignore")
    try:
        said = verdict(name, sx.Mesh(**sizes), guard, verify)
    except Exception as error:
        said = f"CRASHED {first_line(error)}"
    answer.send(said)


def in_a_process(name: str, sizes: dict[str, int], guard: bool, verify: bool, seconds: float) -> str:
    """The verdict, from a process of its own."""
    here, there = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=run_one, args=(name, sizes, guard, verify, there))
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
    parser.add_argument("--mesh", default="dp=2", help="such as dp=2,tp=2")
    parser.add_argument("--guard", action="store_true", help="with Hints(guard=True)")
    parser.add_argument("--verify", action="store_true", help="prove each by pm.verify()")
    parser.add_argument("--seconds", type=float, default=240)
    given = parser.parse_args()
    sizes = {axis: int(size) for axis, _, size in (each.partition("=") for each in given.mesh.split(","))}
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    verdicts: Counter[str] = Counter()
    for name in given.names or NAMES:
        begun = time.perf_counter()
        said = in_a_process(name, sizes, given.guard, given.verify, given.seconds)
        word = re.split(r"[ :(]", said)[0]
        verdicts[word] += 1
        verdicts["with work not shared"] += "LOST" in said
        print(f"{name:28} {time.perf_counter() - begun:4.0f} s  {said}", flush=True)
    print(", ".join(f"{count} {word}" for word, count in verdicts.items()))


if __name__ == "__main__":
    main()
