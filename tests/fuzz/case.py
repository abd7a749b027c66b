"""A random case as data, and as a script that runs alone.

Everything is drawn into frozen data (:class:`Case`), from which :meth:`Case.script` writes a program that imports torch
and shardfx only. The fuzzer runs that same text, so that what it says of a case, the script says.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from tests import whole_tensor

from .grammar import FIRST, KINDS, LATER
from .shards import NUMBERS, Pick, Shard
from .staged import Staged, deep_layers, deep_skips, in_blocks, is_deep, staged
from .template import FOOTER, HEADER, LOSSES, MODEL, PLUGINS, RESULTS, SECOND

WHOLE_TENSOR = inspect.getsource(whole_tensor).partition("import torch\n")[2]
LOOKING = ("RowNorm", "Centralized", "TrustRatio", "FanIn", "AdaptiveClipping")
SHARE = 8
"""So many consecutive seeds share a model, which is captured once."""

Layer = tuple[str, tuple[int, ...]]
AXES = "abc"
MESHES = [sizes for count in (1, 2, 3) for sizes in product((2, 3, 4), repeat=count) if prod(sizes) <= 8]


@dataclass(frozen=True)
class Net:
    """A model, its inputs and its loss."""

    seed: int
    batch: int
    time: int
    start: int
    vocabulary: int
    layers: tuple[Layer, ...]
    second: str
    results: str
    loss: str
    tied: bool
    mode: str
    skips: tuple[tuple[int, int], ...] = ()
    """Between layers of one shape, of a model that is a chain of blocks."""
    blocks: bool = False
    """Each layer is a module of a list, so that a pipeline can shard the model."""

    def shards(self) -> Iterator[tuple[str, Shard]]:
        time, dim, there = self.time, self.start, 0
        for i, (kind, numbers) in enumerate(self.layers):
            if time < 2 and kind not in ("linear", "mlp"):
                continue
            shard = KINDS[kind](Pick(numbers), time, dim)
            time, dim = shard.time, shard.dim
            yield f"blocks.{there}.layer" if self.blocks else f"l{i}", shard
            there += 1

    def source(self) -> str:
        """The model's class, ``make()``, the inputs and the loss, as text."""
        classes_before, members, lines, time, dim = self._chain()
        tied = self.tied and bool(self.vocabulary) and dim == self.start
        classes = self.vocabulary if tied else 5
        members.append(f"self.head = nn.Linear({dim}, {classes}, bias={not tied})")
        members += ["self.head.weight = self.embed.weight"] if tied else []
        returned, picked, also = RESULTS[self.results]
        second, _, args, kwargs = SECOND[self.second]
        sizes = {"b": self.batch, "t": self.time, "d": self.start}
        ids = f"torch.randint({self.vocabulary}, ({self.batch}, {self.time}))"
        x = ids if self.vocabulary else "torch.randn({b}, {t}, {d})".format(**sizes)
        ignored = [f"t[0, : {max(time // 2, 1)}] = -100"] if self.loss == "cross_entropy" and time > 1 else []
        make = [
            "torch.set_default_dtype(torch.float64)",
            f"torch.manual_seed({self.seed})",
            "model = Model()",
            f"args, kwargs = ({x},{args.format(**sizes)}), {{{kwargs.format(**sizes)}}}",
            f"t = torch.randint({classes}, ({self.batch}, {time}))",
            *ignored,
            "return model, args, kwargs, (t,)",
        ]
        return classes_before + MODEL.format(
            members=indented(members, 8),
            second=second,
            lines=indented([*lines, "out = self.head(y)", f"return {returned}"], 8),
            loss=LOSSES[self.loss].format(picked) + also,
            make=indented(make, 4),
        )

    def _chain(self) -> tuple[str, list[str], list[str], int, int]:
        """Classes of blocks, members and statements of embedding and layers, and the time and dim that they leave."""
        members = [f"self.embed = nn.Embedding({self.vocabulary}, {self.start})"] if self.vocabulary else []
        lines = ["y = self.embed(x)" if self.vocabulary else "y = x", *SECOND[self.second][1]]
        time, dim = self.time, self.start
        for name, shard in self.shards():
            if not self.blocks:
                members += [f"self.{name}{suffix} = {value}" for suffix, value in shard.members]
                lines += [line.replace("{n}", name) for line in shard.statements]
            time, dim = shard.time, shard.dim
        if not self.blocks:
            return "", members, lines, time, dim
        classes, member, calls = in_blocks([shard for _, shard in self.shards()], self.skips)
        return classes, [*members, member], [*lines, *calls], time, dim


def indented(lines: Sequence[str], by: int) -> str:
    return "\n".join(" " * by + line for line in lines)


@dataclass(frozen=True)
class Case:
    """A model with a mesh, hints and passes."""

    seed: int
    net: Net
    mesh: tuple[int, ...]
    specs: tuple[tuple[str, str], ...]
    bucket_mb: float
    passes: tuple[str, ...]
    strict: bool
    memory: tuple[tuple[str, object], ...] = ()
    """Hints on memory and on the step: ``zero``, ``recompute``, ``optimizer`` by name, ``clip_grad_norm``,
    ``offload``, ``mixed_precision``, ``grad_accumulation``, ``arena``."""
    staged: Staged | None = None
    """Its pipeline."""
    by_user: str | None = None
    """An optimizer that looks at full tensors, which steps the parameters after all else."""

    def script(self) -> str:
        """The case as a program: it prints how its result differs from one device's."""
        mesh = ", ".join(f"{name}={size}" for name, size in zip(AXES, self.mesh, strict=False))
        mesh = self.staged.mesh(mesh) if self.staged else mesh
        specs = "".join(f"    {name!r}: {text!r},\n" for name, text in self.specs)
        passes = ", ".join(PLUGINS[each][0] if each in PLUGINS else repr(each) for each in self.passes)
        memory = "".join(f", {name}={value!r}" for name, value in self.memory)
        memory += self.staged.option() if self.staged else ""
        plugins = "".join(PLUGINS[each][1] for each in self.passes if each in PLUGINS)
        return (
            HEADER.format(seed=self.seed)
            + plugins
            + self.net.source()
            + f"\n\nMESH = sx.Mesh({mesh})\nSPECS = {{\n{specs}}}\n"
            + f"OPTIONS = dict(bucket_mb={self.bucket_mb}, passes=[{passes}], strict={self.strict}{memory})\n"
            + f"MODE = {self.net.mode!r}\nBY_USER = {self.by_user!r}\n"
            + (WHOLE_TENSOR if self.by_user else "")
            + FOOTER
        )


def draw(seed: int) -> Case:
    """The case of a seed, always the same."""
    net = draw_net(seed // SHARE)
    rng = random.Random(f"case {seed}")
    mesh = rng.choice(MESHES + [sizes for sizes in MESHES if prod(sizes) <= 4] * 3)
    pipeline = staged(seed, len(list(net.shards())), net.batch) if net.blocks else None
    if pipeline is not None:
        mesh = rng.choice([(), *(sizes for sizes in MESHES if prod(sizes) * pipeline.ranks <= 8)])
    axes = AXES[: len(mesh)]
    specs: dict[str, str] = {}
    for name, ndim, often in named(net) if axes else ():
        if rng.random() < often:
            specs[name] = spec(rng, axes, ndim)
    if pipeline is not None and pipeline.chunk:
        specs["head"] = f"{specs.get('head', '-, -, -').partition(',')[0]}, chunk, -"
    passes = rng.choice(((), (), (), ("identity",), ("bucket-comm{mb=0.0001}",), ("identity", "bucket-comm{mb=1}")))
    fuse = rng.choice((0, 1e-5, 25))
    strict = rng.random() < 0.1
    held = {k: v for k, v in memory(seed, net, axes).items() if pipeline is None or k != "grad_accumulation"}
    user = by_user(seed) if "optimizer" not in held and net.mode != "inference" else None
    return Case(seed, net, mesh, tuple(specs.items()), fuse, passes, strict, tuple(held.items()), pipeline, user)


def by_user(seed: int) -> str | None:
    """An optimizer that looks at full tensors, in every fifth case."""
    rng = random.Random(f"by user {seed}")
    return rng.choice(LOOKING) if rng.random() < 0.2 else None


def memory(seed: int, net: Net, axes: str) -> dict[str, object]:
    """Hints on what a rank holds, and does in a step, of about half of the cases."""
    rng, found = random.Random(f"memory {seed}"), dict[str, object]()
    if rng.random() < 0.2 and axes:
        level, count = rng.choice((1, 2, 3)), rng.choice((1, 1, len(axes)))
        found = {"zero": level, "zero_axis": tuple(rng.sample(axes, count)), "zero_min_numel": rng.choice((0, 12))}
    modules = sorted({name.rpartition(".")[0] for name, ndim, _ in named(net) if name.endswith(".weight") and ndim > 1})
    if rng.random() < 0.2 and modules and net.mode != "inference":
        found["recompute"] = tuple(rng.sample(modules, rng.randint(1, len(modules))))
    found |= step(seed, net)
    return found | offloaded(seed, net, "optimizer" in found) | precision(seed) | iterations(seed) | arena(seed)


def step(seed: int, net: Net) -> dict[str, object]:
    """An optimizer in the program of every fourth case that trains, and clipping of every tenth."""
    rng, found = random.Random(f"step {seed}"), dict[str, object]()
    if rng.random() < 0.25 and net.mode != "inference":
        found["optimizer"] = rng.choice(("AdamW", "SGD", "Adafactor"))
    if rng.random() < 0.1 and net.mode != "inference":
        found["clip_grad_norm"] = rng.choice((0.01, 100.0))
    return found


def iterations(seed: int) -> dict[str, object]:
    """Micro-batches in every sixth case."""
    rng = random.Random(f"iterations {seed}")
    if rng.random() >= 0.17:
        return {}
    return {"grad_accumulation": rng.choice((2, 2, 3, 5)), "reduce": rng.choice(("auto", "last", "each"))}


class Text(str):
    """A value as a script has it."""

    __repr__ = str.__str__


def offloaded(seed: int, net: Net, stepped: bool) -> dict[str, object]:
    """What lies in another pool in every tenth case that trains."""
    rng = random.Random(f"offloaded {seed}")
    if rng.random() >= 0.1 or net.mode == "inference":
        return {}
    known = ["activations", "parameters", *(["optimizer"] if stepped else [])]
    what = tuple(rng.sample(known, rng.randint(1, len(known))))
    to, prefetch, least = rng.choice(("host", "host", "disk")), rng.choice((0, 1, 8)), rng.choice((1, 12))
    how = f"to={to!r}, prefetch={prefetch}, min_numel={least}"
    return {"offload": Text(f"(sx.Offload({what!r}, {how}),)")}


def arena(seed: int) -> dict[str, object]:
    """Buckets and temporaries in one memory in every eighth case."""
    return {"arena": True} if random.Random(f"arena {seed}").random() < 0.12 else {}


def precision(seed: int) -> dict[str, object]:
    """The dtype in which every tenth case computes."""
    rng = random.Random(f"precision {seed}")
    if rng.random() >= 0.1:
        return {}
    sums = rng.choice(("", "", ", reduce_dtype=torch.float64"))
    return {"mixed_precision": Text(f"sx.MixedPrecision(torch.float32{sums})" if sums else "torch.float32")}


def draw_net(seed: int) -> Net:
    rng = random.Random(f"model {seed}")
    layers = tuple(
        (rng.choice(FIRST), tuple(rng.randrange(60) for _ in range(NUMBERS))) for _ in range(rng.randint(1, 4))
    )
    more = random.Random(f"deep {seed}")
    layers = deep_layers(more) if is_deep(seed) else with_later_kinds(seed, layers)
    return Net(
        seed,
        rng.choice((2, 3, 4, 8)) if not is_deep(seed) else more.choice((8, 12)),
        rng.choice((4, 5, 6, 8)),
        rng.choice((4, 6, 8, 12)),
        rng.choice((0, 5, 8, 12)),
        layers,
        rng.choice(("", "", "", "mask", "vector", "bias")),
        rng.choice(("one", "one", "one", "pair", "dict")),
        rng.choice(("cross_entropy", "cross_entropy", "squares", "sum")),
        rng.random() < 0.5,
        rng.choice(("train", "train", "train", "train", "eval", "inference", "both")),
        deep_skips(more, len(layers)) if is_deep(seed) else (),
        is_deep(seed),
    )


def with_later_kinds(seed: int, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    """One layer more in every tenth model, of each of the kinds that came later."""
    for kind in LATER:
        rng = random.Random(f"{kind} of {seed}")
        if rng.random() < 0.1:
            at = rng.randint(0, len(layers))
            layers = (*layers[:at], (kind, tuple(rng.randrange(60) for _ in range(NUMBERS))), *layers[at:])
    return layers


def named(net: Net) -> Iterator[tuple[str, int, float]]:
    """What a hint may name: with its number of dims, and how often it is hinted."""
    yield "args.0", 2 if net.vocabulary else 3, 0.8
    yield from {"mask": [("args.1", 2, 0.3)], "vector": [("args.1", 1, 0.3)], "bias": [("kwargs.z", 3, 0.3)]}.get(
        net.second, []
    )
    yield "targets.0", 2, 0.2
    scope: dict[str, object] = {}
    exec(compile(HEADER.format(seed=0) + net.source(), "<names>", "exec"), scope)
    model = scope["Model"]()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        if parameter.dim():
            yield name, parameter.dim(), 0.35
    for name, buffer in model.named_buffers():
        if buffer.dim():
            yield name, buffer.dim(), 0.1
    for name, shard in net.shards():
        if shard.ndim:
            yield name, shard.ndim, 0.25
    yield "head", 3, 0.2


def spec(rng: random.Random, axes: str, ndim: int) -> str:
    """A placement: some axes, each on some dim, several on one too."""
    dims: list[list[str]] = [[] for _ in range(ndim)]
    for axis in rng.sample(axes, rng.randint(1, len(axes))):
        rng.choice(dims).append(axis)
    return ", ".join(" ".join(held) or "-" for held in dims)
