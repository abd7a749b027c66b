"""Scenes as a data set: each rank reads its tiles of random crops, and nothing more.

All ranks make the draws of all samples from one seed, and each keeps those of its share of every batch. So the ranks
of a tile group crop and flip alike; and a worker of a ``DataLoader``, which is handed a :class:`CropDraw`, draws
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset, Sampler, get_worker_info

from shardfx.ir.errors import Error
from shardfx.module.planned_module import input_value

from .image_files import Window, read_window
from .whole_image import DecodingGroup, WholeImage, decoding_group

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule

WORKERS = 1024
"""The number of DataLoader workers whose bytes are counted separately."""
FLIPS = {"hflip": -1, "vflip": -2, "dflip": -3}
"""The dim that each word flips."""
ROT90 = "rot90"


# ---- draws --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Orientation:
    """One of the eight orientations of the last dims of an array: the last two may be swapped, then some flipped.

    A rotation by 90 degrees is ``swap`` and one flip.
    """

    flips: tuple[bool, ...]
    swap: bool = False

    @staticmethod
    def draw(augment: Sequence[str], space: int, generator: torch.Generator) -> Orientation:
        """One of those that ``augment`` allows: each flip with a probability of a half, ``rot90`` one of four."""
        flips = [False] * space
        for word in augment:
            if word in FLIPS and _below(2, generator):
                flips[FLIPS[word]] ^= True
        quarters = _below(4, generator) if ROT90 in augment else 0
        if quarters in (1, 2):
            flips[-2] ^= True
        if quarters in (2, 3):
            flips[-1] ^= True
        return Orientation(tuple(flips), bool(quarters % 2))

    def source(self, window: Window, sizes: Sequence[int]) -> Window:
        """The window of the original for a window of the result, whose dims have these sizes."""
        found = [
            slice(size - each.stop, size - each.start) if flip else each
            for each, size, flip in zip(window, sizes, self.flips, strict=True)
        ]
        return (*found[:-2], found[-1], found[-2]) if self.swap else tuple(found)

    def apply(self, x: torch.Tensor) -> torch.Tensor:
        """``x`` in this orientation; only the last few dims change."""
        swapped = x.transpose(-1, -2) if self.swap else x
        dims = [i - len(self.flips) for i, flip in enumerate(self.flips) if flip]
        return (swapped.flip(dims) if dims else swapped).contiguous()


def _below(below: int, generator: torch.Generator) -> int:
    """A random integer."""
    return int(torch.randint(below, (), generator=generator))


class CropDraw(NamedTuple):
    """One sample: a crop of a scene that begins ``at`` these rows. ``number`` is unique in a run."""

    scene: int
    at: tuple[int, ...]
    orientation: Orientation
    number: int = -1


class BatchShare(NamedTuple):
    """The samples of one call on all ranks, and the range of them that this process reads."""

    size: int
    start: int
    stop: int


class TileSampler(Sampler[CropDraw]):
    """The sampler that :meth:`TileDataset.sampler` gives to a ``DataLoader``.

    ``set_epoch(epoch)`` before each epoch gives another order, and other crops.
    """

    def __init__(
        self,
        scenes: int,
        batch: BatchShare,
        draw: Callable[[int, int, torch.Generator | None], CropDraw],
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
        self._scenes, self._batch, self._draw, self._begin = scenes, batch, draw, begin
        self._shuffle, self._seed, self._drop_last, self._epoch = shuffle, seed, drop_last, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, which determines order and crops."""
        self._epoch = epoch

    def __len__(self) -> int:
        """The number of samples that this process reads in an epoch."""
        return self._batches * (self._batch.stop - self._batch.start)

    @property
    def _batches(self) -> int:
        full, rest = divmod(self._scenes, self._batch.size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[CropDraw]:
        """The draws of this process.

        Raises:
            Error: the ranks do not draw the same: another seed, epoch, or number of scenes.
        """
        first = self._begin(f"seed {self._seed}, epoch {self._epoch}, {'' if self._shuffle else 'not '}shuffled")
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + self._epoch)
        order = torch.randperm(self._scenes, generator=generator) if self._shuffle else torch.arange(self._scenes)
        for number in range(self._batches * self._batch.size):
            scene = int(order[number % len(order)])
            draw = self._draw(scene, first + number, generator if self._shuffle else None)
            if self._batch.start <= number % self._batch.size < self._batch.stop:
                yield draw


# ---- the data set -------------------------------------------------------------------------------------------


class InputTiles(NamedTuple):
    """An input of a plan: its full shape, without the batch, its dtype, the tile of each rank of the group that shares
    a sample, by rank, and the samples of a batch that are the group's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tiles: dict[int, Window]
    batch: BatchShare


class TileDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Scenes of which each rank reads its own tiles::

        data = sx.images.TileDataset([(image, mask)] * 64, pm, crop=(1024, 1024), augment=("hflip", "rot90"))
        sampler = data.sampler(shuffle=True, seed=0)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, data.batch_size, sampler=sampler, num_workers=2):
                loss = pm(x, y)

    A scene is a tuple of arrays without a batch dim (C, H, W or C, D, H, W; a mask H, W; a label has no such dims), one
    for each of ``names``. An array is anything with ``shape`` and slicing: numpy, a memmap, zarr, h5py,
    :class:`shardfx.images.GeoTiff`, :class:`shardfx.images.Nifti`; or a :class:`shardfx.images.WholeImage`, which can
    only decode all of itself.

    On virtual ranks a sample is the full crop; under ``torchrun`` it is this rank's tile of it, which ``pm(...)``
    takes as well, and ``batch_size`` is this rank's share of the batch: so the loop above is the same. ``data[3]`` is
    the centre crop of scene 3, without augmentation.

    The last dims of an input are spatial where they are the crop's; others, such as those of a label, are neither
    cropped nor augmented.

    Args:
        scenes: the scenes. One that is named several times is cropped anew each time.
        pm: the plan, whose inputs have the size of a crop.
        names: the inputs that the arrays of a scene are.
        crop: sizes of the last dims; None: scenes have the size of the inputs.
        augment: ``hflip``, ``vflip``, ``dflip`` flip the last, the last but one and the third last dim, ``rot90``
            rotates by a multiple of 90 degrees, at random and for all ranks alike: each rank reads the source of its
            tile then.
        rank: whose tiles they are; by default this process's.
        scaled: names of inputs of another scale (a mask at a quarter), which are cropped at the same place.
        labels: names of inputs without a position on the image, though their last dims look like it.

    Raises:
        Error: scenes that are smaller than a crop, or of other sizes where there is no crop; arrays that do not fit the
            inputs; crops of another size than the plan's.
    """

    def __init__(
        self,
        scenes: Sequence[Sequence[Any]],
        pm: ParallelModule,
        names: Sequence[str] = ("args.0", "targets.0"),
        crop: Sequence[int] | None = None,
        augment: Sequence[str] = (),
        rank: int | None = None,
        scaled: Sequence[str] = (),
        labels: Sequence[str] = (),
    ) -> None:
        self._scenes, self._augment, self._pm = [tuple(scene) for scene in scenes], tuple(augment), pm
        self._rank = pm._this_rank if rank is None else rank
        self._names, self._inputs = tuple(names), _input_tiles(pm, names, self._rank)
        self._batch, shape = self._inputs[0].batch, self._inputs[0].shape
        self._crop = shape[1:]
        asked = crop is not None or bool(augment)
        self._scales = [
            () if name in labels else scales(each.shape, self._crop, name, name in scaled, asked)
            for name, each in zip(names, self._inputs, strict=True)
        ]
        self._grid = [lcm(*(each[i].denominator for each in self._scales if each)) for i in range(len(self._crop))]
        self._passes = 0
        self._bytes = torch.zeros(WORKERS, dtype=torch.int64).share_memory_()
        self._check_words(crop)
        for i in range(len(self._scenes)):
            self._check_scene(i, crop is not None)
        full = any(isinstance(part, WholeImage) for scene in self._scenes for part in scene)
        shares = full and rank is None and self._rank is not None
        self._decoding: DecodingGroup | None = decoding_group(self._inputs[0].tiles) if shares else None

    @property
    def batch_size(self) -> int:
        """The number of samples of each batch that this process reads: all of it on virtual ranks."""
        return self._batch.stop - self._batch.start

    def sampler(self, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> TileSampler:
        """The order of samples, for ``DataLoader(data, data.batch_size, sampler=...)``: the same on all ranks, of which
        each gets its share.

        Args:
            shuffle: scenes in a random order, with random crops and augmentation. False: in order, centre crops
                without augmentation, to evaluate.
            seed: of order, crops and augmentation; the same on all ranks.
            drop_last: leave out the last samples where they do not fill a batch; otherwise the first ones fill it up.
        """
        return TileSampler(len(self), self._batch, self._draw, self._begin, shuffle, seed, drop_last)

    @property
    def bytes_read(self) -> int:
        """The bytes that this process and its workers asked arrays for, so far."""
        return int(self._bytes.sum())

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, which: int | CropDraw) -> tuple[torch.Tensor, ...]:
        """One sample, or this rank's tile of it.

        Raises:
            Error: a number where ranks share the batch, which a sampler knows; a file that is truncated.
        """
        if not isinstance(which, CropDraw):
            if not -len(self) <= which < len(self):
                raise IndexError(which)
            if self._rank is not None and self.batch_size != self._batch.size:
                raise Error(
                    "ranks share the batch, so that a number does not say whose sample it is",
                    where=f"data[{which}]",
                    expected="DataLoader(data, data.batch_size, sampler=data.sampler())",
                    got="a DataLoader without it",
                    remedy="data.sampler(shuffle=False) reads scenes in order",
                )
            which = self._draw(which % len(self), -1, None)
        return tuple(self._read(which, i) for i in range(len(self._inputs)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pm": None, "_decoding": self._decoding and self._decoding.of_worker()}

    def _read(self, draw: CropDraw, part: int) -> torch.Tensor:
        wanted, array = self._inputs[part], self._scenes[draw.scene][part]
        name = f"array {part} of scene {draw.scene}"
        windows = {rank: self._source(draw, part, tile) for rank, tile in wanted.tiles.items()}
        own = windows[self._rank or 0]
        if not isinstance(array, WholeImage):
            found = read_window(array, own, name) if hasattr(array, "shape") else torch.as_tensor(array)
            nbytes = found.nbytes
        elif self._decoding is None or draw.number < 0:
            found, nbytes = array.read(own, name)
        else:
            found, nbytes = self._decoding.read(array, windows, f"{draw.number}/{part}", name)
        worker = get_worker_info()
        self._bytes[0 if worker is None else worker.id % (WORKERS - 1) + 1] += nbytes
        if self._scales[part]:
            found = draw.orientation.apply(found)
        return found.to(wanted.dtype)

    def _source(self, draw: CropDraw, part: int, tile: Window) -> Window:
        """The window of an array for a tile of a crop."""
        by = self._scales[part]
        if not by:
            return tile
        sizes = [int(size * scale) for size, scale in zip(self._crop, by, strict=True)]
        lead = len(tile) - len(sizes)
        inside = draw.orientation.source(tile[lead:], sizes)
        first = [int(at * scale) for at, scale in zip(draw.at, by, strict=True)]
        moved = (slice(at + each.start, at + each.stop) for at, each in zip(first, inside, strict=True))
        return (*tile[:lead], *moved)

    def _draw(self, scene: int, number: int, generator: torch.Generator | None) -> CropDraw:
        """A random crop; without a generator the centre crop."""
        sizes = self._scenes[scene][0].shape[-len(self._crop) :]
        at = []
        for size, crop, grid in zip(sizes, self._crop, self._grid, strict=True):
            room = (size - crop) // grid
            at.append(grid * (room // 2 if generator is None else _below(room + 1, generator)))
        orientation = Orientation((False,) * len(at))
        if generator is not None:
            orientation = Orientation.draw(self._augment, len(at), generator)
        return CropDraw(scene, tuple(at), orientation, number)

    def _begin(self, said: str) -> int:
        """The number of the first sample of an epoch that begins; the ranks agree on it."""
        if self._pm is not None and self._rank == self._pm._this_rank:
            shapes = [tuple(getattr(part, "shape", ())) for scene in self._scenes for part in scene]
            told = {"samples": said, "scenes": f"{len(self)} of shapes {shapes}", "augment": ", ".join(self._augment)}
            with self._pm._together("reading the tiles of an epoch", told):
                pass
        self._passes += 1
        return self._passes << 32

    def _check_words(self, crop: Sequence[int] | None) -> None:
        known, square = (*FLIPS, ROT90), self._crop[-1:] == self._crop[-2:-1]
        for word in self._augment:
            if word not in known or -FLIPS.get(word, -2) > len(self._crop) or (word == ROT90 and not square):
                raise Error(
                    f"a crop does not allow {word!r}" if word in known else f"there is no augmentation {word!r}",
                    where="TileDataset(augment=...)",
                    expected=f"of {', '.join(known)}, those that a crop of {self._crop} allows; rot90 needs a square",
                    got=word,
                    remedy="leave it out, or crop squares",
                )
        if crop is not None and (isinstance(crop, int) or tuple(crop) != self._crop):
            raise Error(
                "crops are of another size than the model was planned for",
                where="TileDataset(crop=...)",
                expected=f"{self._crop}, as {self._names[0]} has it",
                got=crop if isinstance(crop, int) else tuple(crop),
                remedy="give example inputs of the crop's size to Hints(args=..., targets=...)",
            )

    def _check_scene(self, number: int, cropped: bool) -> None:
        scene = self._scenes[number]
        if len(scene) != len(self._inputs):
            raise Error(
                f"scene {number} has other arrays than there are names",
                where="TileDataset(scenes, names=...)",
                expected=", ".join(self._names),
                got=f"{len(scene)} arrays",
                remedy="give each scene as a tuple, (image, mask), or name its inputs: names=('args.0',)",
            )
        full = tuple(getattr(scene[0], "shape", ()))[1:]
        for part, (array, wanted, by) in enumerate(zip(scene, self._inputs, self._scales, strict=True)):
            shape, name = tuple(getattr(array, "shape", ())), self._names[part]
            lead = len(wanted.shape) - len(by)
            rest = tuple(size * scale for size, scale in zip(full, by, strict=False)) if by else ()
            fits = len(shape) == len(wanted.shape) and shape[:lead] == wanted.shape[:lead] and shape[lead:] == rest
            sizes = zip(shape[lead:], wanted.shape[lead:], strict=True) if fits else ()
            if fits and all(a >= b if cropped else a == b for a, b in sizes):
                continue
            smaller = fits and cropped
            raise Error(
                f"scene {number} is smaller than a crop" if smaller else f"scene {number} does not fit {name}",
                where=f"TileDataset(...), array {part} of scene {number}",
                expected=f"{'at least ' if cropped else ''}{wanted.shape}, as {name} without the batch"
                + (f", and {'x'.join(map(str, rest))} like array 0" if cropped and not smaller else ""),
                got=shape if hasattr(array, "shape") or not lead else type(array).__name__,
                remedy="leave it out, or plan for smaller crops" if cropped else "crop=(rows, columns) of each scene",
            )


def scales(shape: tuple[int, ...], crop: tuple[int, ...], name: str, scaled: bool, asked: bool) -> tuple[Fraction, ...]:
    """The scale of the last dims of an input, relative to a crop; () where they are not spatial (a label).

    Raises:
        Error: they may be either, and what is cropped or augmented depends on it.
    """
    space = shape[-len(crop) :]
    found = [Fraction(a, b) for a, b in zip(space, crop, strict=True)] if len(space) == len(crop) else []
    regular = len(set(found)) == 1 and 1 in (found[0].numerator, found[0].denominator)
    if scaled or (asked and regular and found[0] != 1):
        if not (scaled and regular):
            raise Error(
                f"is {name} an image of another scale?" if not scaled else f"{name} is of no scale of the image",
                where="TileDataset(scaled=..., labels=...)",
                expected=f"the last {len(crop)} dims {crop}, or all by one factor smaller or larger",
                got=shape,
                remedy=f"scaled=({name!r},) if it is one, labels=({name!r},) if it is not",
            )
        return tuple(found)
    return tuple(found) if regular and found[0] == 1 else ()


def _input_tiles(pm: ParallelModule, names: Sequence[str], rank: int | None) -> list[InputTiles]:
    """The inputs of a plan, with the tiles of the ranks that share samples with ``rank``.

    Raises:
        Error: there is no such input; a rank's samples are others of one input than of another.
    """
    values = [input_value(pm.planned, name, "TileDataset(names=...)") for name in names]
    tiles = {0: [tuple(slice(0, size) for size in value.shape) for value in values]}
    if rank is not None:
        tiles = {each: [pm.tile(name, each) for name in names] for each in range(pm.mesh.size)}
    mine = tiles[rank or 0][0][0]
    for name, (first, *_) in zip(names, tiles[rank] if rank is not None else (), strict=False):
        if first != mine:
            raise Error(
                f"a rank takes other samples of {name} than of {names[0]}",
                where=f"TileDataset(names=...), rank {rank}",
                expected=f"samples {mine.start} to {mine.stop} of both",
                got=f"samples {first.start} to {first.stop} of {name}",
                remedy=f"shard both alike: Hints(specs={{{name!r}: ...}})",
            )
    batch = BatchShare(values[0].shape[0], mine.start, mine.stop)
    if batch.start == batch.stop:
        raise Error(
            f"rank {rank} has no sample of a batch",
            where=f"TileDataset(...), {names[0]}",
            expected="a batch of at least one sample for each rank over which it is sharded",
            got=f"{batch.size} samples",
            remedy="a larger batch in Hints(args=...), or fewer ranks on that axis",
        )
    group = [each for each, own in tiles.items() if own[0][0] == mine]
    return [
        InputTiles(value.shape[1:], value.type.dtype, {each: tiles[each][i][1:] for each in group}, batch)
        for i, value in enumerate(values)
    ]
