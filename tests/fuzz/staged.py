"""Cases in stages: models that are chains of blocks, and how a pipeline runs them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise

from .grammar import FIRST, KINDS
from .shards import NUMBERS, Pick, Shard

Layer = tuple[str, tuple[int, ...]]
EVERY = 5
"""Of so many models one is a chain of blocks, and its cases are in stages."""
MIXING = ("BatchNorm", "(0, 1)", "(0, 2)", "y.sum()", ".detach()", "Dropout", "Identity")
"""Words of layers that have statistics of the batch, which iterations cannot have, or that are none."""
SCHEDULES = {
    1: ("gpipe", "1f1b", "1f1b", "breadth-first", "zb-h1", "zb-h2", "auto"),
    2: ("interleaved", "interleaved", "breadth-first", "zb-v", "dualpipev", "auto"),
}
"""By stages on a rank."""
NONE = (("", "None"),)
"""The members of a block that has none."""
BLOCK = """class {name}(nn.Module):
    def __init__(self):
        super().__init__()
{members}

    def forward(self, y):
{lines}
        return y


"""


@dataclass(frozen=True)
class Staged:
    """A pipeline: ``Mesh(pp=ranks, mb=sx.Loop(iterations))``, with the axes of the case between them or outside."""

    ranks: int
    iterations: int
    schedule: str = "1f1b"
    chunks: int = 1
    stages: tuple[int, ...] | tuple[str, ...] | None = None
    inner: bool = False
    """The axis of stages is the innermost."""
    chunk: int = 0
    """So many parts of what the head makes, over a loop axis of its own; 0: whole."""

    def mesh(self, others: str) -> str:
        """The mesh's axes, with those beside."""
        axes = [f"pp={self.ranks}", *([others] if others else [])]
        times = [f"mb=sx.Loop({self.iterations})", *([f"chunk=sx.Loop({self.chunk})"] if self.chunk else [])]
        return ", ".join([*(reversed(axes) if self.inner else axes), *times])

    def option(self) -> str:
        """What the hints say."""
        return (
            f", pipeline=sx.Pipeline(schedule={self.schedule!r}, stages_per_rank={self.chunks}, stages={self.stages!r})"
        )


def is_deep(net_seed: int) -> bool:
    """Whether the model of this seed is a chain of blocks."""
    return net_seed % EVERY == 3


def deep_layers(rng: random.Random) -> tuple[Layer, ...]:
    """Four to eight layers, in which one to three repeat, the first of them with parameters."""
    period: list[Layer] = []
    for _ in range(rng.randint(1, 3)):
        drawn = ((rng.choice(FIRST), tuple(rng.randrange(60) for _ in range(NUMBERS))) for _ in count())
        period.append(next(layer for layer in drawn if not mixes(layer, bool(period))))
    return tuple(period[i % len(period)] for i in range(rng.randint(4, 8)))


def mixes(layer: Layer, may_be_bare: bool) -> bool:
    """Whether a layer has statistics of the batch, or is none; or has no parameters, which the first must have."""
    kind, numbers = layer
    shard = KINDS[kind](Pick(numbers), 6, 12)
    texts = (*shard.statements, *(value for _, value in shard.members))
    return not (may_be_bare or shard.members) or any(word in text for word in MIXING for text in texts)


def deep_skips(rng: random.Random, layers: int) -> tuple[tuple[int, int], ...]:
    """From one layer to a later one, in every third model or so."""
    pairs = [(i, j) for j in range(layers) for i in range(j)]
    return tuple(rng.sample(pairs, rng.choice((0, 0, 1, 2))))


def staged(seed: int, blocks: int, batch: int) -> Staged:
    """How the case of this seed is in stages, of a model of so many blocks."""
    rng = random.Random(f"staged {seed}")
    ranks = rng.choice([n for n in (2, 2, 3, 4) if n <= blocks] or [2])
    chunks = rng.choice((1, 1, 2)) if 2 * ranks <= blocks else 1
    iterations, many = rng.choice([n for n in (1, 2, 3, 4, 4, 5, 8) if n <= batch]), ranks * chunks
    stages: tuple[int, ...] | None = None
    if rng.random() < 0.4 and many <= blocks:
        firsts = [0, *sorted(rng.sample(range(1, blocks), many - 1)), blocks]
        stages = tuple(end - start for start, end in pairwise(firsts))
    schedule, inner = rng.choice(SCHEDULES[chunks]), rng.random() < 0.3
    in_parts = random.Random(f"chunk {seed}").random() < 0.15
    return Staged(ranks, iterations, schedule, chunks, stages, inner, 2 * in_parts)


def in_blocks(shards: Sequence[Shard], skips: Sequence[tuple[int, int]]) -> tuple[str, str, list[str]]:
    """The classes of blocks, the list that has them, and the statements of the model that call them.

    Args:
        shards: what each block does.
        skips: what comes out of one is added to what comes out of another, where both have one shape.
    """
    names = {shard: f"Block{number}" for number, shard in enumerate(dict.fromkeys(shards))}
    text = "".join(
        BLOCK.format(
            name=name,
            members="\n".join(f"        self.layer{suffix} = {value}" for suffix, value in (shard.members or NONE)),
            lines="\n".join(f"        {line.replace('{n}', 'layer')}" for line in shard.statements),
        )
        for shard, name in names.items()
    )
    shapes = [(shard.time, shard.dim) for shard in shards]
    lines = []
    for at, _ in enumerate(shards):
        lines.append(f"y = self.blocks[{at}](y)")
        lines += [f"y = y + kept{source}" for source, to in skips if to == at and shapes[source] == shapes[at]]
        lines += [f"kept{at} = y"] if any(source == at for source, _ in skips) else []
    return text, f"self.blocks = nn.ModuleList([{', '.join(f'{names[shard]}()' for shard in shards)}])", lines
