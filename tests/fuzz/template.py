"""The fixed text of a case's script."""

from __future__ import annotations

HEADER = '''"""One random case (seed {seed}): the parallel program beside one device."""

import copy
import warnings
from dataclasses import dataclass
from typing import ClassVar

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
    ours, theirs = ours.detach().double(), theirs.detach().double()
    alike = (ours == theirs) | (ours.isnan() & theirs.isnan())
    ours, theirs = (t.masked_fill(alike & ~theirs.isfinite(), 0) for t in (ours, theirs))
    if not theirs.numel():
        return 0.0
    least = 1e-2 if "compute" in OPTIONS else 1e-3  # less is rounding
    error = (ours - theirs).abs().max() / theirs.abs().max().clamp_min(least)
    return float(error.nan_to_num(nan=float("inf")))


OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9, dampening=0.5),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


CLOSE = 1e-3 if "compute" in OPTIONS else 1e-9
"""How far apart what is compared may be, of its largest number: sums are in another order."""


def cast(tree):
    """The floating tensors of a nest as the hints say that is computed."""
    asked = OPTIONS.get("compute")
    dtype = asked.dtype if isinstance(asked, sx.Compute) else asked
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
    if "clip" in OPTIONS:
        torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIONS["clip"])


def parallel(model, args, kwargs, targets, **other):
    given = dict(loss=None if MODE == "inference" else loss, targets=() if MODE == "inference" else targets)
    specs = {k: v for k, v in SPECS.items() if MODE != "inference" or not k.startswith("targets")}
    options = {**OPTIONS, "optimizer": OPTIMIZERS.get(OPTIONS.get("optimizer")), **other}
    hints = sx.Hints(args=args, kwargs=kwargs, specs=specs, **given, **options)
    return sx.parallelize(model.train(MODE in ("train", "both")), MESH, hints)


def differences(model, pm, args, kwargs, targets):
    """What is compared -> how far apart it is."""
    alone = copy.deepcopy(model).train(MODE in ("train", "both"))
    found = {}
    if MODE == "inference":
        with torch.no_grad():
            ours, theirs = pm(*args, **kwargs), run(alone, args, kwargs)
        for i, (a, b) in enumerate(zip(tensors(ours), tensors(theirs), strict=True)):
            found[f"result {i}"] = apart(a, b)
        return found
    ours, theirs = pm(*args, *targets, **kwargs), loss(run(alone, args, kwargs), *targets)
    ours.backward(), theirs.backward()
    clipped(alone)
    found["loss"] = apart(ours, theirs)
    grads = pm.full_grads()
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = apart(grads[name], parameter.grad)
    if "offload" in OPTIONS:  # which changes no number, but the last bits of what a kernel rounds by where it writes
        here = parallel(model, args, kwargs, targets, offload=())
        held = here(*args, *targets, **kwargs)
        held.backward()
        near = {"loss": apart(held, ours), **{n: apart(g, grads[n]) for n, g in here.full_grads().items()}}
        found |= {f"{name} without offload": 0.0 if far < CLOSE / 1e6 else float("inf") for name, far in near.items()}
    state = pm.full_state_dict()
    for name, buffer in alone.named_buffers():
        found[f"buffer {name}"] = apart(state[name], buffer)
    if "optimizer" in OPTIONS:
        optimizer = OPTIMIZERS[OPTIONS["optimizer"]](alone.parameters())
        sure = {name: torch.ones(p.shape, dtype=torch.bool) for name, p in alone.named_parameters()}
        for i in range(2):
            optimizer.zero_grad()
            ours, theirs = pm.step(*args, *targets, **kwargs), loss(run(alone, args, kwargs), *targets)
            theirs.backward(), clipped(alone)
            grads = {name: p.grad.abs() for name, p in alone.named_parameters() if p.grad is not None}
            most = max([0.0, *(grad.max().item() for grad in grads.values() if grad.numel())])
            for name, grad in grads.items():
                known = grad > 10 * CLOSE * most  # a gradient that is rounding is divided by rounding
                sure[name] &= known
                if OPTIONS["optimizer"] == "Adafactor" and grad[~known].any():
                    sure[name][...] = False  # each element is divided by the norm of them all
            optimizer.step()
            found[f"loss of step {i}"] = apart(ours, theirs)
        state = pm.full_state_dict()
        found |= {f"stepped {n}": apart(state[n][sure[n]], p[sure[n]]) for n, p in alone.named_parameters()}
        alone.load_state_dict(state)
    if MODE == "both":
        pm.eval(), alone.eval()
        with torch.no_grad():
            ours, theirs = pm(*args, **kwargs), run(alone, args, kwargs)
        for i, (a, b) in enumerate(zip(tensors(ours), tensors(theirs), strict=True)):
            found[f"result {i} in evaluation"] = apart(a, b)
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
