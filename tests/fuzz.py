"""Random small models, meshes and hints: the result equals one device's, or a ``shardfx.Error`` is raised.

    python -m tests.fuzz --cases 200 --seed 0       prints the seed of every case that fails
    python -m tests.fuzz --only 1234                runs one, and prints it as a program

A model is a chain of layers over ``[batch, time, dim]`` that keep that rank, drawn by :func:`layer`; sizes are
small and mostly do not divide.
"""

from __future__ import annotations

import argparse
import random
import sys
import traceback
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

Rng = random.Random


class Lambda(nn.Module):
    """A function with a name, and parameters of its own."""

    def __init__(self, text: str, function: Callable[..., Tensor], **parameters: Tensor) -> None:
        super().__init__()
        self.text, self.function = text, function
        for name, value in parameters.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, **dict(self.named_parameters()))

    def extra_repr(self) -> str:
        return self.text


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv: int, causal: bool, fused: bool) -> None:
        super().__init__()
        self.heads, self.kv, self.causal, self.fused = heads, kv, causal, fused
        width = dim // heads
        if fused:
            self.qkv = nn.Linear(dim, 3 * dim)
            self.kv = heads
        else:
            self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, kv * width), nn.Linear(dim, kv * width)
        self.o = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(x).split(d, -1) if self.fused else (self.q(x), self.k(x), self.v(x))
        q = q.view(b, t, self.heads, -1).transpose(1, 2)
        k, v = (y.view(b, t, self.kv, -1).transpose(1, 2).repeat_interleave(self.heads // self.kv, 1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(out.transpose(1, 2).reshape(b, t, d))


class OverTime(nn.Module):
    """A module for ``[batch, dim, time]``, between two transposes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2)


class Image(nn.Module):
    """A module for ``[batch, channels, height, width]``: dim is channels, time is height times width."""

    def __init__(self, inner: nn.Module, height: int) -> None:
        super().__init__()
        self.inner, self.height = inner, height

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        y = self.inner(x.transpose(1, 2).reshape(b, d, self.height, t // self.height))
        return y.flatten(2).transpose(1, 2)


def split_cat(n: int) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.cat([p * (i + 1) for i, p in enumerate(reversed(x.chunk(n, -1)))], -1)


def layer(rng: Rng, time: int, dim: int) -> tuple[nn.Module, int, int]:
    """A random layer for ``[batch, time, dim]``, with the time and dim that it leaves."""
    heads = rng.choice([h for h in (1, 2, 3, 4) if dim % h == 0])
    kv = rng.choice([k for k in (1, 2, 4) if heads % k == 0])
    out = rng.choice([4, 6, 8, 12])
    n = rng.choice([k for k in (1, 2, 3, 4) if dim % k == 0])
    groups = rng.choice([g for g in (1, 2, dim) if dim % g == 0])
    height = rng.choice([h for h in (1, 2, 3, 4) if time % h == 0])
    shift = rng.randrange(1, time)
    options: list[Callable[[], tuple[nn.Module, int, int]]] = [
        lambda: (nn.Linear(dim, out, bias=rng.random() < 0.6), time, out),
        lambda: (
            nn.Sequential(
                nn.Linear(dim, 2 * out),
                rng.choice([nn.ReLU(), nn.GELU(), nn.SiLU(), nn.Tanh()]),
                nn.Linear(2 * out, dim),
            ),
            time,
            dim,
        ),
        lambda: (nn.LayerNorm(dim), time, dim),
        lambda: (
            Lambda("rms", lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-3) * w, w=torch.rand(dim)),
            time,
            dim,
        ),
        lambda: (
            Residual(nn.LayerNorm(dim), Attention(dim, heads, kv, rng.random() < 0.5, rng.random() < 0.4)),
            time,
            dim,
        ),
        lambda: (Residual(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)), time, dim),
        lambda: (Lambda("bias d", lambda x, b: x + b, b=torch.randn(dim)), time, dim),
        lambda: (Lambda("bias t 1", lambda x, b: x * b, b=torch.randn(time, 1)), time, dim),
        lambda: (Lambda("bias 1 1 d", lambda x, b: torch.sigmoid(x) - b, b=torch.randn(1, 1, dim)), time, dim),
        lambda: (
            Lambda("merge b t", lambda x, w: (x.reshape(-1, dim) @ w).reshape(x.shape), w=torch.randn(dim, dim) / 3),
            time,
            dim,
        ),
        lambda: (
            Lambda("mix t", lambda x, w: torch.einsum("btd,ts->bsd", x, w), w=torch.randn(time, time) / 3),
            time,
            dim,
        ),
        lambda: (Lambda(f"split cat {n}", split_cat(n)), time, dim),
        lambda: (Lambda("halves", lambda x: torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)), time, dim),
        lambda: (Lambda("softmax d", lambda x: x.softmax(-1)), time, dim),
        lambda: (Lambda("softmax t", lambda x: x.log_softmax(1)), time, dim),
        lambda: (Lambda("centre", lambda x: x - x.mean(1, keepdim=True)), time, dim),
        lambda: (Lambda("max", lambda x: x - x.amax(-1, keepdim=True)), time, dim),
        lambda: (Lambda("var", lambda x: x / (1 + x.var((0, 1), keepdim=True))), time, dim),
        lambda: (Lambda("cumsum", lambda x: x.cumsum(1) / time), time, dim),
        lambda: (Lambda("roll flip", lambda x: x.roll(shift, 1).flip(-1)), time, dim),
        lambda: (Lambda("cut t", lambda x: x[:, shift:]), time - shift, dim),
        lambda: (Lambda("pad", lambda x: F.pad(x, (0, 0, 1, 0))), time + 1, dim),
        lambda: (
            Lambda("mask", lambda x: x.masked_fill(torch.ones(time, dim, dtype=torch.bool).tril(), 0.5)),
            time,
            dim,
        ),
        lambda: (Lambda("where", lambda x: torch.where(x > 0, x, 0.1 * x)), time, dim),
        lambda: (
            Lambda(
                "heads", lambda x: x.view(x.shape[0], time, heads, -1).transpose(1, 2).tanh().transpose(1, 2).flatten(2)
            ),
            time,
            dim,
        ),
        lambda: (Lambda("index", lambda x: x[:, torch.arange(time - 1, -1, -1)]), time, dim),
        lambda: (OverTime(nn.Conv1d(dim, dim, 3, padding=1, groups=groups)), time, dim),
        lambda: (OverTime(nn.BatchNorm1d(dim)), time, dim),
        lambda: (OverTime(nn.GroupNorm(groups if groups != dim else 1, dim)), time, dim),
        lambda: (Image(nn.Conv2d(dim, out, 3, padding=1, bias=rng.random() < 0.5), height), time, out),
        lambda: (Image(nn.Sequential(nn.Upsample(scale_factor=2, mode="nearest"), nn.MaxPool2d(2)), height), time, dim),
    ]
    return rng.choice(options)()


class Model(nn.Module):
    """Ids or floats in, scores out; perhaps with a tied head."""

    def __init__(self, rng: Rng, time: int) -> None:
        super().__init__()
        self.vocabulary = rng.choice([5, 8, 12]) if rng.random() < 0.5 else 0
        dim = start = rng.choice([4, 6, 8, 12])
        if self.vocabulary:
            self.embed = nn.Embedding(self.vocabulary, dim)
        chain: list[nn.Module] = []
        for _ in range(rng.randint(1, 4)):
            if time < 2:
                break
            module, time, dim = layer(rng, time, dim)
            chain.append(module)
        self.layers = nn.ModuleList(chain)
        self.out_time, self.classes = time, rng.choice([3, 4, 8])
        self.head = nn.Linear(dim, self.classes, bias=rng.random() < 0.5)
        if self.vocabulary and dim == start and rng.random() < 0.5:
            self.head = nn.Linear(dim, self.vocabulary, bias=False)
            self.head.weight = self.embed.weight
            self.classes = self.vocabulary
        self.start = start

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x) if self.vocabulary else x
        for layer in self.layers:
            y = layer(y)
        return self.head(y)


def cross_entropy(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def squares(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out.sum(-1), y.to(out.dtype))


@dataclass
class Example:
    """One random case."""

    seed: int
    model: Model
    x: Tensor
    y: Tensor
    loss: Callable[..., Tensor]
    mesh: sx.Mesh
    specs: dict[str, str]
    fuse_mb: float

    def __str__(self) -> str:
        return (
            f"# python -m tests.fuzz --only {self.seed}\n{self.model}\n"
            f"x {tuple(self.x.shape)} {self.x.dtype}, y {tuple(self.y.shape)}, loss {self.loss.__name__}\n"
            f"{self.mesh}\nspecs = {self.specs}\nfuse_mb = {self.fuse_mb}"
        )


def draw(seed: int) -> Example:
    """The case of a seed, always the same."""
    rng = Rng(seed)
    torch.manual_seed(seed)
    batch, time = rng.choice([2, 3, 4, 8]), rng.choice([4, 5, 6, 8])
    model = Model(rng, time).double()
    x = (
        torch.randint(0, model.vocabulary, (batch, time))
        if model.vocabulary
        else torch.randn(batch, time, model.start).double()
    )
    y = torch.randint(0, model.classes, (batch, model.out_time))
    y[0, : model.out_time // 2] = -100 if (loss := rng.choice([cross_entropy, squares])) is cross_entropy else 1
    mesh = sx.Mesh(
        **rng.choice([{"a": 2}, {"a": 3}, {"a": 4}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}])
    )
    specs: dict[str, str] = {}
    names = [("args.0", x), *((n, p) for n, p in model.named_parameters())]
    names += [(f"layers.{i}", None) for i in range(len(model.layers))]  # type: ignore[list-item]
    for name, tensor in names:
        if rng.random() < (0.8 if name == "args.0" else 0.4 if tensor is not None else 0.15):
            specs[name] = spec(rng, mesh, 3 if tensor is None else tensor.dim())
    return Example(seed, model, x, y, loss, mesh, specs, rng.choice([0, 25]))


def spec(rng: Rng, mesh: sx.Mesh, ndim: int) -> str:
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.sample(mesh.names, rng.randint(1, len(mesh.names))):
        rng.choice(dims).append(axis)
    return ", ".join(" ".join(axes) or "-" for axes in dims)


def check(example: Example) -> str:
    """``"equal"``, or ``"refused"`` with a shardfx.Error; anything else is an AssertionError."""
    alone = deepcopy(example.model)
    loss = example.loss(alone(example.x), example.y)
    loss.backward()
    hints = sx.Hints(
        args=(example.x,), loss=example.loss, targets=(example.y,), specs=example.specs, fuse_mb=example.fuse_mb
    )
    try:
        pm = sx.parallelize(example.model, example.mesh, hints)
    except sx.Error as error:
        if type(error) is not sx.Error or "verif" in str(error) or "graph is wrong" in str(error):
            raise
        return f"refused: {error.what}"
    ours = pm(example.x, example.y)
    ours.backward()
    assert rel_err(ours, loss) < 1e-9, f"loss {ours} instead of {loss}"
    grads = pm.full_grads()
    for name, parameter in alone.named_parameters():
        if parameter.grad is not None:
            error = rel_err(grads[name], parameter.grad)
            assert error < 1e-9, f"gradient of {name} is off by {error}"
    state = pm.full_state_dict()
    for name, buffer in alone.named_buffers():
        assert rel_err(state[name], buffer) < 1e-9, f"buffer {name} differs"
    return "equal"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    seeds = [options.only] if options.only is not None else range(options.seed, options.seed + options.cases)
    failed, results = [], {}
    for seed in seeds:
        example = draw(seed)
        try:
            result = check(example)
        except Exception as error:
            failed.append(seed)
            result = "FAILED"
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:400]}", flush=True)
            if options.only is not None:
                traceback.print_exc()
        results[result] = results.get(result, 0) + 1
    if options.only is not None:
        print(draw(options.only))
    print(f"{len(results) and sum(results.values())} cases: {results}; failed seeds: {failed}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
