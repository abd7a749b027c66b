"""Which samples this process reads, in which order, cropped and turned how: one draw, the same on all ranks.

All ranks make the draws of all samples from one seed, and each keeps those of its share of every batch. So the ranks
of a tile group cut and turn the same crop; and a worker of a ``DataLoader``, which is handed a :class:`Draw`, draws
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.utils.data import Sampler

from shardfx.ir.errors import Error

from .turn import Turn


class Draw(NamedTuple):
    """One sample: a crop of a scene that begins ``at`` these rows, turned. ``number`` is its own in the whole run."""

    scene: int
    at: tuple[int, ...]
    turn: Turn
    number: int = -1


class Batch(NamedTuple):
    """The samples of one call on all ranks, and from where to where they are this process's."""

    size: int
    start: int
    stop: int


Drawn = Callable[[int, int, torch.Generator | None], Draw]
"""``drawn(scene, number, generator)``: a crop; without a generator the one in the middle, as it lies."""


class TileSampler(Sampler[Draw]):
    """What :meth:`TileDataset.sampler <shardfx.scenes.tile_dataset.TileDataset.sampler>` gives to a ``DataLoader``.

    ``set_epoch(epoch)`` before each epoch gives another order, and other crops.
    """

    def __init__(
        self,
        scenes: int,
        batch: Batch,
        drawn: Drawn,
        begin: Callable[[str], int],
        shuffle: bool,
        seed: int,
        drop_last: bool,
    ) -> None:
        if scenes < batch.size and drop_last:
            raise Error(
                "there are fewer samples than one batch has",
                where="TileDataset.sampler(drop_last=True)",
                expected=f"{batch.size} at least",
                got=scenes,
                remedy="name scenes several times, [(image, mask)] * 64: each is cropped anew",
            )
        self._scenes, self._batch, self._drawn, self._begin = scenes, batch, drawn, begin
        self._shuffle, self._seed, self._drop_last, self._epoch = shuffle, seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Order and crops of this epoch: the same again for the same number."""
        self._epoch = epoch

    def __len__(self) -> int:
        """How many samples this process reads in an epoch."""
        return self._batches * (self._batch.stop - self._batch.start)

    @property
    def _batches(self) -> int:
        full, rest = divmod(self._scenes, self._batch.size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Draw]:
        """The draws of this process.

        Raises:
            Error: the ranks do not draw the same: another seed, epoch, or number of scenes.
        """
        first = self._begin(f"seed {self._seed}, epoch {self._epoch}, {'' if self._shuffle else 'not '}shuffled")
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._scenes, generator=generator) if self._shuffle else torch.arange(self._scenes)
        for number in range(self._batches * self._batch.size):
            scene = int(order[number % len(order)])
            draw = self._drawn(scene, first + number, generator if self._shuffle else None)
            if self._batch.start <= number % self._batch.size < self._batch.stop:
                yield draw
