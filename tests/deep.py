"""Models of as many blocks as a pipeline needs, and one step of each in stages against one device's."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once
from tests.models import GPT, LENGTH, VOCAB, ResBlock
from tests.reference import rel_err
from tests.zoo import Case
from tests.zoo.cases import IGNORED, classify, double, next_token
from tests.zoo.own_models import gpt_fused, resnet

CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "breadth-first": 2, "zb-h1": 1, "zb-h2": 1, "zb-v": 2}
CHUNKS |= {"dualpipev": 2}
"""Stages on a rank, by schedule: all that there are by name."""


def some_tokens(rows: int) -> Tensor:
    return torch.randint(0, VOCAB, (rows, LENGTH))


def some_labels(rows: int) -> Tensor:
    """The first row keeps one token, the later ones more and more."""
    made = some_tokens(rows)
    for row in range(rows):
        made[row, 1 + 2 * row :] = IGNORED
    return made


def _gpt(blocks: int, rows: int) -> Case:
    model = GPT(fused=True, layers=blocks)
    model.head.weight = model.tok_emb.weight
    like = gpt_fused()
    specs = {name: spec for name, spec in like.megatron_specs.items() if name != "head.weight"}
    args, targets = (some_tokens(rows),), (some_labels(rows),)
    return Case("gpt", model, args, {}, next_token, targets, specs, like.sequence_specs)


class DeepResNet(nn.Module):
    """A list of residual blocks, between a stem and a head."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(*(ResBlock(8, 8, 1 + (at == 1)) for at in range(blocks)))
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pool(self.blocks(F.relu(self.bn(self.stem(x))))).flatten(1))


def _resnet(blocks: int, rows: int) -> Case:
    args, targets = (torch.randn(rows, 3, 8, 8),), (torch.randint(0, 16, (rows,)),)
    return Case("resnet", DeepResNet(blocks), args, {}, classify, targets, resnet().megatron_specs)


def _mlp(blocks: int, rows: int) -> Case:
    args, targets = (torch.randn(rows, 8),), (torch.randint(0, 8, (rows,)),)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(blocks)]
    specs = {f"{at}.0.weight": ("tp, -", "-, tp")[at % 2] for at in range(blocks)}
    specs |= {f"{at}.0.bias": "tp" for at in range(0, blocks, 2)}
    return Case("mlp", nn.Sequential(*layers), args, {}, classify, targets, specs)


DEEP: dict[str, Callable[[int, int], Case]] = {
    "mlp": _mlp,
    "gpt": _gpt,
    "resnet": _resnet,
}


def deep(name: str, blocks: int, iterations: int, ranks: int = 1) -> Case:
    """A model of so many blocks, in float64, and a batch for so many iterations of so many ranks: some have more rows
    than others, but where statistics are those of an iteration's rows."""
    rows = 2 * iterations * ranks if name == "resnet" else (iterations + 2) * ranks
    with double():
        return DEEP[name](blocks, rows)


@dataclass(frozen=True)
class Alone:
    """What one device makes of a step."""

    loss: float
    grads: dict[str, Tensor]
    buffers: dict[str, Tensor]


def alone(case: Case, iterations: int = 1) -> Alone:
    """One device's step. ``iterations``: batch norms have the statistics of each iteration's rows, one iteration behind
    the other."""
    model, total = deepcopy(case.model), torch.zeros((), dtype=torch.float64)
    parts = [(case.args, case.kwargs, case.targets)]
    if any(isinstance(each, nn.modules.batchnorm._BatchNorm) for each in model.modules()):
        rows = case.args[0].tensor_split(iterations), case.targets[0].tensor_split(iterations)
        parts = [((x,), {}, (y,)) for x, y in zip(*rows, strict=True)]
    for args, kwargs, targets in parts:
        share = len(targets[0]) / len(case.targets[0])
        total = total + case.loss(model(*args, **kwargs), *targets) * share
    total.backward()
    if len(parts) > 1:
        for name, each in model.named_buffers():
            if name.endswith("num_batches_tracked"):
                each.fill_(1)  # a step counts as one batch, whatever the micro-batches
    grads = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    return Alone(total.item(), grads, dict(model.named_buffers()))


def in_stages(case: Case, mesh: sx.Mesh, **hints: Any) -> sx.ParallelModule:
    """The case in stages: its batch in iterations, and over the axes of data of the mesh."""
    rows = " ".join(axis for axis in ("mb", "dp") if axis in mesh.names)
    named = {f"args.{i}": t for i, t in enumerate(case.args)} | {f"targets.{i}": t for i, t in enumerate(case.targets)}
    named |= {f"kwargs.{key}": t for key, t in case.kwargs.items()}
    specs = {key: ", ".join([rows] + ["-"] * (t.dim() - 1)) for key, t in named.items()}
    if "tp" in mesh.names:
        specs |= case.megatron_specs
    if case.name == "resnet":
        hints = {"batch_stats": "microbatch", **hints}
    given = sx.Hints(case.args, case.kwargs, loss=case.loss, targets=case.targets, specs=specs, **hints)
    sizes = [len(list(case.model.parameters())), len(case.targets[0])]
    with captured_once(f"deep {case.name} {sizes}"):
        return sx.parallelize(case.model, mesh, given)


def worst(pm: sx.ParallelModule, case: Case, found: Alone) -> float:
    """How far a step is from one device's: loss, all gradients, buffers."""
    loss = pm(*case.args, *case.targets, **case.kwargs)
    loss.backward()
    grads, state = pm.full_grads(), pm.full_state_dict()
    assert set(grads) == set(found.grads)
    errors = [rel_err(loss.detach(), torch.tensor(found.loss, dtype=torch.float64))]
    errors += [rel_err(grads[name], each) for name, each in found.grads.items()]
    errors += [rel_err(state[name], each) for name, each in found.buffers.items() if name in state]
    return max(errors)
