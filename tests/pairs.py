"""Features of a whole step, together, against one device: what each of them is, and what must be equal.

>>> beside_one_device("llama", ("zero 3", "recompute"))      # an AssertionError says what is not
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn, optim

import shardfx as sx
from tests.captures import captured_once
from tests.plans import MESHES, specs_of
from tests.reference import rel_err
from tests.stepped import of_two
from tests.zoo import Case, make

STEPS = 5
TWO_AXES = sx.Mesh(a=2, b=2)


@dataclass(frozen=True)
class Feature:
    """Hints, on a mesh of its own; ``same_bits``: they change no number."""

    hints: dict[str, Any] = field(default_factory=dict)
    mesh: sx.Mesh | None = None
    same_bits: bool = False


def stepped_by(factory: Callable[[Any], Any]) -> Feature:
    """The update in the program."""
    return Feature({"optimizer": factory})


def offloaded(*what: str, to: str = "host") -> Feature:
    """Offload of values of every size."""
    return Feature({"offload": tuple(sx.Offload(each, to=to, min_numel=0) for each in what)}, same_bits=True)


FEATURES = {
    "tp": Feature(mesh=MESHES["dp2tp2"]),
    "recompute": Feature({"recompute": "layers.*"}, same_bits=True),
    "keep": Feature({"recompute": sx.Recompute("layers.*", save="aten.*mm", comm=False)}, same_bits=True),
    "memory": Feature({"memory": "PEAK"}, same_bits=True),
    "zero 1": Feature({"zero": 1, "zero_min_numel": 0}),
    "zero 3": Feature({"zero": 3, "zero_min_numel": 0}),
    "zero 3, large": Feature({"zero": 3, "zero_min_numel": 2000}),
    "zero 3, two axes": Feature({"zero": 3, "zero_min_numel": 0, "zero_axis": ("a", "b")}, mesh=TWO_AXES),
    "AdamW": stepped_by(lambda ps: optim.AdamW(ps, lr=1e-3)),
    "momentum": stepped_by(lambda ps: optim.SGD(ps, lr=0.05, momentum=0.9)),
    "Adafactor": stepped_by(lambda ps: optim.Adafactor(ps, lr=1e-2)),
    "two": stepped_by(of_two),
    "clip": Feature({"clip_grad_norm": 0.1}),
    "bfloat16": Feature({"mixed_precision": torch.bfloat16}),
    "activations": offloaded("activations"),
    "parameters": offloaded("parameters"),
    "optimizer": offloaded("optimizer"),
    "disk": offloaded("activations", "parameters", to="disk"),
    "arena": Feature({"arena": True}, same_bits=True),
}
Names = tuple[str, ...]


def model_of(name: str) -> Case:
    """A case of the zoo, or one whose head is its embedding."""
    if name != "tied llama":
        return make(name)
    case = make("llama")
    case.model.head.weight = case.model.tok_emb.weight  # type: ignore[union-attr]
    specs = {key: spec for key, spec in case.megatron_specs.items() if "head" not in key}
    return replace(case, name=name, megatron_specs=specs)


# ---- one device ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trained:
    """Gradients before the first step, the loss of each, and what is there behind them."""

    grads: dict[str, Tensor]
    losses: list[float]
    state: dict[str, Tensor]


def usual(params: Any) -> optim.Optimizer:
    """Of one's own, where there is none in the program: its steps are no larger than gradients are."""
    return optim.SGD(params, lr=0.05, momentum=0.9)


@cache
def on_one_device(model: str, optimizer: str, clip_grad_norm: float | None) -> Trained:
    """The reference."""
    case = model_of(model)
    net = deepcopy(case.model)
    factory = FEATURES[optimizer].hints["optimizer"] if optimizer else usual
    made = factory(list(net.parameters()))
    optimizers = made if isinstance(made, list) else [made]
    grads: dict[str, Tensor] = {}
    losses = []
    for step in range(STEPS + 1):
        net.zero_grad()
        loss = case.loss(net(*case.args, **case.kwargs), *case.targets)
        loss.backward()
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(net.parameters(), clip_grad_norm)
        if not step:
            grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
            continue
        losses.append(float(loss.detach()))
        for each in optimizers:
            each.step()
    return Trained(grads, losses, {name: value.detach().clone() for name, value in net.state_dict().items()})


# ---- a plan ----------------------------------------------------------------------------------------------------------


def hints_of(names: Names) -> tuple[sx.Mesh, dict[str, Any]]:
    """The mesh and the hints of features together."""
    mesh = next((f.mesh for f in map(FEATURES.__getitem__, names) if f.mesh is not None), MESHES["dp2"])
    hints: dict[str, Any] = {}
    for name in names:
        hints |= FEATURES[name].hints
    if any(each.what == "optimizer" for each in hints.get("offload", ())):
        hints.setdefault("optimizer", FEATURES["AdamW"].hints["optimizer"])
    return mesh, hints


def planned(model: str, names: Names) -> sx.ParallelModule:
    """The model with these features."""
    case, (mesh, hints) = model_of(model), hints_of(names)
    if "mixed_precision" in hints and "llama" in model:
        for table in ("cos", "sin"):  # in the dtype in which they would be used, as on one device
            case.model._buffers[table] = case.model._buffers[table].bfloat16()
    if hints.get("memory") == "PEAK":
        hints["memory"] = planned(model, tuple(each for each in names if each != "memory")).memory().peak
    specs = specs_of(case, mesh if "a" not in mesh.names else MESHES["dp2"])
    if "a" in mesh.names:
        specs = {name: text.replace("dp", "a b") for name, text in specs.items()}
    given = sx.Hints(case.args, case.kwargs, case.loss, case.targets, specs, **hints)
    with captured_once(model):
        return sx.parallelize(case.model, mesh, given)


def trained(model: str, pm: sx.ParallelModule) -> Trained:
    """As :func:`on_one_device`."""
    case = model_of(model)
    in_program = pm._compiled.hints.optimizer is not None
    optimizer = None if in_program else usual(pm.parameters())
    pm(*case.args, *case.targets, **case.kwargs).backward()
    grads, losses = pm.full_grads(), []
    for _ in range(STEPS):
        pm.zero_grad()
        if optimizer is None:
            loss = pm.step(*case.args, *case.targets, **case.kwargs)
        else:
            loss = pm(*case.args, *case.targets, **case.kwargs)
            loss.backward()
            optimizer.step()
        losses.append(float(loss.detach()))
    return Trained(grads, losses, pm.full_state_dict())


@cache
def once(model: str, names: Names) -> Trained:
    """Of a plan that others are compared with."""
    return trained(model, planned(model, names))


def beside_one_device(model: str, names: Names) -> sx.ParallelModule:
    """Train the model with these features: like one device, to the bit as without those that change no number, and
    proven. Gives the plan."""
    mesh, hints = hints_of(names)
    pm = planned(model, names)
    mine = trained(model, pm)
    factory = hints.get("optimizer")
    optimizer = next((each for each in FEATURES if factory and FEATURES[each].hints.get("optimizer") is factory), "")
    theirs = on_one_device(model, optimizer, hints.get("clip_grad_norm"))
    case = model_of(model)
    few_bits = "mixed_precision" in hints
    loose = max(1e-9, *([case.tolerance, case.trained_tolerance] if "tp" in mesh.names else [0.0]))
    compare(mine, theirs, 0.05 if few_bits else loose, few_bits)
    if few_bits and names != ("bfloat16",) and "clip_grad_norm" not in hints and not optimizer:
        base = ("bfloat16", *(each for each in names if FEATURES[each].mesh is not None))
        compare(mine, once(model, base), 1e-2)
    same = tuple(each for each in names if not FEATURES[each].same_bits)
    if "optimizer" in names and optimizer not in names:
        same = (*same, optimizer)
    if same != names:
        to_the_bit(mine, once(model, same))
    verdict = pm.verify()
    assert verdict, verdict.why
    return pm


def compare(mine: Trained, theirs: Trained, bound: float, losses_alone: bool = False) -> None:
    """Both trainings, each number; without those that are rounding alone, which some optimizers make large."""
    assert mine.grads.keys() == theirs.grads.keys()
    worst = {f"loss {i}": rel_err(a, b) for i, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True))}
    if not losses_alone:
        worst |= {f"grad {name}": rel_err(mine.grads[name], value) for name, value in theirs.grads.items()}
        for name, value in theirs.state.items():
            if name in mine.state:
                noise = is_rounding(theirs.grads.get(name))
                kept = (t if noise is None else t.masked_fill(noise, 0) for t in (mine.state[name], value))
                worst[name] = rel_err(*kept)
    off = {name: error for name, error in worst.items() if not error < bound}
    assert not off, off


def is_rounding(grad: Tensor | None) -> Tensor | None:
    """Where a gradient would be zero in exact numbers."""
    return None if grad is None else (grad != 0) & (grad.abs() < 1e-14)


def to_the_bit(mine: Trained, theirs: Trained) -> None:
    """Nothing differs."""
    assert mine.losses == theirs.losses
    for ours, other in ((mine.grads, theirs.grads), (mine.state, theirs.state)):
        off = [name for name, value in other.items() if not torch.equal(ours[name], value)]
        assert not off, off
