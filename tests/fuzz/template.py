"""The fixed text of a case's script."""

from __future__ import annotations

HEADER = '''"""One random case (seed {seed}): the parallel program against one device."""

import copy
import math
import warnings
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx


'''

PLUGINS = {
    "identity": (
        "Identity()",
        """@dataclass(frozen=True)
class Identity(sx.Pass):
    name: ClassVar[str] = "identity"

    def run(self, graph, context):
        return False


""",
    )
}
"""Passes of plugins: what is put among the hints, and the text of the class."""

MODEL = """class Model(nn.Module):
    def __init__(self):
        super().__init__()
{members}

    def forward(self, x{second}):
{lines}


def loss(out, t):
    return {loss}


def make():
{make}
"""

SECOND: dict[str, tuple[str, tuple[str, ...], str, str]] = {
    "": ("", (), "", ""),
    "mask": (", z", ("y = y * z[:, :, None]",), " torch.rand({b}, {t})", ""),
    "vector": (", z", ("y = y + z",), " torch.randn({d})", ""),
    "bias": (", *, z", ("y = y + z",), "", "'z': torch.randn({b}, 1, {d})"),
}
"""A second input: its parameter, what is done with it, and its example as an argument or a keyword."""

RESULTS = {
    "one": ("out", "out", ""),
    "pair": ("out, y.mean(1)", "out[0]", " + out[1].pow(2).mean()"),
    "dict": ("{'out': out, 'y': y}", "out['out']", " + out['y'].pow(2).sum(-1).mean()"),
}
"""What the model returns, where the scores are among that, and what the loss adds for the rest."""

LOSSES = {
    "cross_entropy": "F.cross_entropy({0}.flatten(0, 1), t.flatten())",
    "squares": "F.mse_loss({0}.sum(-1), t.to({0}.dtype))",
    "sum": "({0} * t[..., None]).sum() / 7",
}

FOOTER = '''

def tensors(tree):
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def apart(ours, theirs):
    """The largest difference over the largest number; where one device gives no number, this must be none likewise."""
    if ours.shape != theirs.shape:
        return float("inf")
    parts = lambda t: torch.view_as_real(t.resolve_conj()) if t.is_complex() else t
    ours, theirs = parts(ours.detach()).double(), parts(theirs.detach()).double()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    ours, theirs = (t.masked_fill(alike & ~theirs.isfinite(), 0) for t in (ours, theirs))
    if not theirs.numel():
        return 0.0
    least = 1e-2 if "mixed_precision" in OPTIONS else 1e-3  # less is rounding
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(least)
    return float(error.nan_to_num(nan=float("inf")))


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


CLOSE = 1e-3 if "mixed_precision" in OPTIONS else 1e-9
"""How far apart what is compared may be, of its largest number: sums are in another order."""


def cast(tree):
    """The floating tensors of a nest as the hints say that is computed."""
    asked = OPTIONS.get("mixed_precision")
    dtype = asked.dtype if isinstance(asked, sx.MixedPrecision) else asked
    floating = lambda x: dtype is not None and isinstance(x, torch.Tensor) and x.dtype.is_floating_point
    return torch.utils._pytree.tree_map(lambda x: x.to(dtype) if floating(x) else x, tree)


def run(model, args, kwargs):
    """One device's results, in the dtype of the hints; what has statistics computes as it is."""
    as_they_are = [m for m in model.modules() if getattr(m, "track_running_stats", False)]
    for norm in as_they_are:
        norm.forward = lambda x, norm=norm: cast(type(norm).forward(norm, x.double()))
    kept = {id(p) for norm in as_they_are for p in norm.parameters()}
    weights = {name: p if id(p) in kept else cast(p) for name, p in model.named_parameters()}
    return torch.func.functional_call(model, weights, cast(args), cast(kwargs), tie_weights=True)


def clipped(model):
    if "clip_grad_norm" in OPTIONS:
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["clip_grad_norm"])


def parallel(model, args, kwargs, targets, **other):
    given = dict(loss=None if MODE == "inference" else loss, targets=() if MODE == "inference" else targets)
    specs = {k: v for k, v in SPECS.items() if MODE != "inference" or not k.startswith("targets")}
    options = {**OPTIONS, "optimizer": OPTIMIZERS.get(OPTIONS.get("optimizer")), **other}
    hints = sx.Hints(args=args, kwargs=kwargs, specs=specs, **given, **options)
    return sx.parallelize(model.train(MODE in ("train", "both")), MESH, hints)


def on_ranks(pm, args, kwargs, targets):
    """What is compared -> its number."""
    if MODE == "inference":
        with torch.no_grad():
            return {f"result {i}": r for i, r in enumerate(tensors(pm(*args, **kwargs)))}
    found = {"loss": pm(*args, *targets, **kwargs)}
    found["loss"].backward()
    found |= {f"gradient of {name}": grad.clone() for name, grad in pm.full_grads().items()}
    found |= {f"buffer {name}": held.clone() for name, held in pm.full_state_dict().items()}
    for i in range(2 * ("optimizer" in OPTIONS)):
        found[f"loss of step {i}"] = pm.step(*args, *targets, **kwargs)
    if "optimizer" in OPTIONS:
        found |= {f"stepped {name}": p for name, p in pm.full_state_dict().items()}
    if MODE == "both":
        with torch.no_grad():
            results = tensors(pm.eval()(*args, **kwargs))
        found |= {f"result {i} in evaluation": r for i, r in enumerate(results)}
    try:
        return found | stepped_by_user(pm, pm.full_state_dict)
    except sx.Error as error:
        if "is sharded here" not in error.what:
            raise
        return found


def stepped_by_user(model, state):
    """The weights after a step of an optimizer that looks at full tensors."""
    if BY_USER is None:
        return {}
    globals()[BY_USER](model.parameters(), lr=0.01).step()
    return {f"by user {name}": p for name, p in state().items()}


def on_one_device(model, args, kwargs, targets):
    """The same of the model itself."""
    model = copy.deepcopy(model).train(MODE in ("train", "both"))
    if MODE == "inference":
        with torch.no_grad():
            return {f"result {i}": r for i, r in enumerate(tensors(run(model, args, kwargs)))}

    def backward():
        model.zero_grad()
        found = loss(run(model, args, kwargs), *targets)
        found.backward(), clipped(model)
        return found

    found = {"loss": backward()}
    found |= {f"gradient of {name}": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    found |= {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    if "optimizer" in OPTIONS:
        optimizer = OPTIMIZERS[OPTIONS["optimizer"]](model.parameters())
        for i in range(2):
            found[f"loss of step {i}"] = backward()
            optimizer.step()
        found |= {f"stepped {name}": p for name, p in model.state_dict().items()}
    if MODE == "both":
        with torch.no_grad():
            results = tensors(run(model.eval(), args, kwargs))
        found |= {f"result {i} in evaluation": r for i, r in enumerate(results)}
    return found | stepped_by_user(model, model.state_dict)


def moved(tree):
    """The floating tensors of a nest, each number moved by a rounding of the dtype that is computed in."""
    least = torch.finfo(torch.float32 if "mixed_precision" in OPTIONS else torch.float64).eps
    floating = lambda x: isinstance(x, torch.Tensor) and (x.dtype.is_floating_point or x.dtype.is_complex)
    move = lambda x: x * (1 + least * torch.empty_like(x.real).uniform_(-1, 1)) if floating(x) else x
    return torch.utils._pytree.tree_map(move, tree)


def by_rounding(theirs, model, args, kwargs, targets):
    """What is compared -> how far one device gets from itself if what it is given is moved by a rounding: of what
    divides rounding by rounding (a gradient that is zero, by its own size) no more is known."""
    found = dict.fromkeys(theirs, 0.0)
    for _ in range(4):
        near = copy.deepcopy(model)
        near.load_state_dict(moved(near.state_dict()))
        for what, number in on_one_device(near, moved(args), moved(kwargs), targets).items():
            found[what] = max(found[what], apart(number, theirs[what]))
    return found


def differences(model, pm, args, kwargs, targets):
    """What is compared -> how far apart it is, beyond what rounding is sure to do."""
    given = args, kwargs, targets
    alone = copy.deepcopy(model)
    ours, theirs = on_ranks(pm, *given), on_one_device(alone, *given)
    theirs = {what: number for what, number in theirs.items() if what in ours or not what.startswith("by user")}
    found = {what: apart(ours[what], number) for what, number in theirs.items()}
    found |= {what: float("inf") for what in ours if "result" in what and what not in theirs}
    if not max(found.values()) < CLOSE:
        known = by_rounding(theirs, alone, *given)
        found = {what: max(error - 30 * known.get(what, 0.0), 0.0) for what, error in found.items()}
    if "offload" in OPTIONS and MODE != "inference":  # changes the last bits alone: what a kernel rounds by its place
        here = on_ranks(parallel(alone, *given, offload=()), *given)
        near = {what: apart(here[what], ours[what]) for what in theirs if what == "loss" or "gradient" in what}
        found |= {f"{name} without offload": 0.0 if far < CLOSE / 1e6 else float("inf") for name, far in near.items()}
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    given = make()
    pm = parallel(*given)
    found = differences(given[0], pm, *given[1:])
    for name, error in found.items():
        print(f"{error:8.1e}  {name}")
    equal = max(found.values()) < CLOSE
    print("equal" if equal else "DIFFERENT")
    raise SystemExit(not equal)
'''
