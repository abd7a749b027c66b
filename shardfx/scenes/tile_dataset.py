"""Scenes as a data set: each rank reads its tiles of crops, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils.data import Dataset, get_worker_info

from shardfx.ir.errors import Error
from shardfx.module.held.input_tile import input_value

from .reading import read_window
from .tile_sampler import Batch, Draw, TileSampler
from .turn import AUGMENT, ROT90, Turn, Window, drawn, number_below, scales
from .whole_image import Sharing, WholeImage, shared

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule

WORKERS = 1024
"""For how many workers of a DataLoader bytes are counted apart."""


class Wanted(NamedTuple):
    """What a plan takes as one input: its whole shape, without the batch, its dtype, and the tile of each rank of the
    group that shares a sample, by rank; and the samples of a batch that are the group's."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tiles: dict[int, Window]
    batch: Batch


class TileDataset(Dataset[tuple[torch.Tensor, ...]]):
    """Scenes of which each rank reads its own tiles::

        data = sx.TileDataset([(image, mask)] * 64, pm, crop=(1024, 1024), augment=("hflip", "rot90"))
        sampler = data.sampler(shuffle=True, seed=0)
        for epoch in range(10):
            sampler.set_epoch(epoch)
            for x, y in DataLoader(data, data.batch_size, sampler=sampler, num_workers=2):
                loss = pm(x, y)

    A scene is a tuple of arrays without a batch dim (C, H, W or C, D, H, W; a mask H, W; a label has no such dims), one
    for each of ``names``. An array is anything with ``shape`` and slicing: numpy, a memmap, zarr, h5py,
    :class:`shardfx.GeoTiff`, :class:`shardfx.Nifti`; or a :class:`shardfx.WholeImage`, which only decodes all of
    itself.

    On virtual ranks a sample is the whole crop; under ``torchrun`` it is this rank's tile of it, which ``pm(...)``
    takes as well, and ``batch_size`` is this rank's share of the batch: so the loop above is the same. ``data[3]`` is
    scene 3, cropped in the middle and as it lies.

    The last dims of an input are space where they are the crop's; others, such as those of a label, are neither cropped
    nor turned.

    Args:
        scenes: what there is. A scene that is named several times is cropped anew each time.
        pm: the plan, whose inputs have the size of a crop.
        names: the inputs that the arrays of a scene are.
        crop: rows of the last dims; None: scenes have the size of the inputs.
        augment: ``hflip``, ``vflip``, ``dflip`` mirror the last, the last but one and the third last dim, ``rot90``
            turns by a multiple of 90 degrees, at random and for all ranks alike: a rank reads what its tile is made of
            then.
        rank: whose tiles they are; by default this process's.
        scaled: names of inputs of another scale (a mask at a quarter), which are cropped at the same place.
        labels: names of inputs that lie nowhere on the image, though their last dims look like it.

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
        self._rank = pm.this_rank if rank is None else rank
        self._names, self._wanted = tuple(names), wanted(pm, names, self._rank)
        self._batch, shape = self._wanted[0].batch, self._wanted[0].shape
        self._crop = shape[1:]
        asked = crop is not None or bool(augment)
        self._scales = [
            () if name in labels else scales(each.shape, self._crop, name, name in scaled, asked)
            for name, each in zip(names, self._wanted, strict=True)
        ]
        self._grid = [lcm(*(each[i].denominator for each in self._scales if each)) for i in range(len(self._crop))]
        self._passes = 0
        self._bytes = torch.zeros(WORKERS, dtype=torch.int64).share_memory_()
        self._check_words(crop)
        for i in range(len(self._scenes)):
            self._check_scene(i, crop is not None)
        whole = any(isinstance(part, WholeImage) for scene in self._scenes for part in scene)
        group = self._wanted[0].tiles
        self._sharing: Sharing | None = shared(group) if whole and rank is None and self._rank is not None else None

    # ---- what a DataLoader asks for -------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """How many samples of each batch this process reads: all of it on virtual ranks."""
        return self._batch.stop - self._batch.start

    def sampler(self, shuffle: bool = True, seed: int = 0, drop_last: bool = False) -> TileSampler:
        """The order of samples, for ``DataLoader(data, data.batch_size, sampler=...)``: the same on all ranks, of which
        each gets its share.

        Args:
            shuffle: scenes in a random order, cropped and turned at random. False: in order, cropped in the middle and
                as they lie, to evaluate.
            seed: of order, crops and turns; the same on all ranks.
            drop_last: leave out the last samples where they do not fill a batch; otherwise the first ones fill it up.
        """
        return TileSampler(len(self), self._batch, self._drawn, self._begin, shuffle, seed, drop_last)

    @property
    def bytes_read(self) -> int:
        """The bytes that this process and its workers asked arrays for, so far."""
        return int(self._bytes.sum())

    def __len__(self) -> int:
        return len(self._scenes)

    def __getitem__(self, which: int | Draw) -> tuple[torch.Tensor, ...]:
        """One sample, or this rank's tile of it.

        Raises:
            Error: a number where ranks share the batch, which a sampler knows; a file that is cut short.
        """
        if not isinstance(which, Draw):
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
            which = self._drawn(which % len(self), -1, None)
        return tuple(self._read(which, i) for i in range(len(self._wanted)))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pm": None, "_sharing": self._sharing and self._sharing.of_worker()}

    # ---- reading --------------------------------------------------------------------------------------------

    def _read(self, draw: Draw, part: int) -> torch.Tensor:
        wanted, array = self._wanted[part], self._scenes[draw.scene][part]
        name = f"array {part} of scene {draw.scene}"
        windows = {rank: self._source(draw, part, tile) for rank, tile in wanted.tiles.items()}
        own = windows[self._rank or 0]
        if not isinstance(array, WholeImage):
            found = read_window(array, own, name) if hasattr(array, "shape") else torch.as_tensor(array)
            self._count(found.nbytes)
        elif self._sharing is None or draw.number < 0:
            found, nbytes = array.read(own, name)
            self._count(nbytes)
        else:
            found, nbytes = self._sharing.read(array, windows, f"{draw.number}/{part}", name)
            self._count(nbytes)
        if self._scales[part]:
            found = draw.turn.apply(found)
        return found.to(wanted.dtype)

    def _count(self, nbytes: int) -> None:
        worker = get_worker_info()
        self._bytes[0 if worker is None else worker.id % (WORKERS - 1) + 1] += nbytes

    def _source(self, draw: Draw, part: int, tile: Window) -> Window:
        """What of an array a tile of a drawn crop is made of."""
        by = self._scales[part]
        if not by:
            return tile
        sizes = [int(size * scale) for size, scale in zip(self._crop, by, strict=True)]
        lead = len(tile) - len(sizes)
        inside = draw.turn.source(tile[lead:], sizes)
        first = [int(at * scale) for at, scale in zip(draw.at, by, strict=True)]
        moved = (slice(at + each.start, at + each.stop) for at, each in zip(first, inside, strict=True))
        return (*tile[:lead], *moved)

    def _drawn(self, scene: int, number: int, generator: torch.Generator | None) -> Draw:
        sizes = self._scenes[scene][0].shape[-len(self._crop) :]
        at = []
        for size, crop, grid in zip(sizes, self._crop, self._grid, strict=True):
            room = (size - crop) // grid
            at.append(grid * (room // 2 if generator is None else number_below(room + 1, generator)))
        still = Turn((False,) * len(at))
        return Draw(scene, tuple(at), still if generator is None else drawn(self._augment, len(at), generator), number)

    def _begin(self, said: str) -> int:
        """The number of the first sample of an epoch that begins; all ranks say the same of it."""
        if self._pm is not None and self._rank == self._pm.this_rank:
            shapes = [tuple(getattr(part, "shape", ())) for scene in self._scenes for part in scene]
            told = {"samples": said, "scenes": f"{len(self)} of shapes {shapes}", "augment": ", ".join(self._augment)}
            self._pm.agree_on("reading the tiles of an epoch", told)
        self._passes += 1
        return self._passes << 32

    # ---- what is wrong with it ------------------------------------------------------------------------------

    def _check_words(self, crop: Sequence[int] | None) -> None:
        known, square = (*AUGMENT, ROT90), self._crop[-1:] == self._crop[-2:-1]
        for word in self._augment:
            space = len(self._crop)
            if word not in known or -AUGMENT.get(word, -2) > space or (word == ROT90 and not square):
                raise Error(
                    f"no crop can be turned by {word!r}" if word in known else f"there is no augmentation {word!r}",
                    where="TileDataset(augment=...)",
                    expected=f"of {', '.join(known)}, what a crop of {self._crop} can stand; rot90 needs a square",
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
        if len(scene) != len(self._wanted):
            raise Error(
                f"scene {number} has other arrays than there are names",
                where="TileDataset(scenes, names=...)",
                expected=", ".join(self._names),
                got=f"{len(scene)} arrays",
                remedy="give each scene as a tuple, (image, mask), or name its inputs: names=('args.0',)",
            )
        whole = tuple(getattr(scene[0], "shape", ()))[1:]
        for part, (array, wanted, by) in enumerate(zip(scene, self._wanted, self._scales, strict=True)):
            shape, name = tuple(getattr(array, "shape", ())), self._names[part]
            lead = len(wanted.shape) - len(by)
            rest = tuple(size * scale for size, scale in zip(whole, by, strict=False)) if by else ()
            fits = len(shape) == len(wanted.shape) and shape[:lead] == wanted.shape[:lead] and shape[lead:] == rest
            sizes = zip(shape[lead:], wanted.shape[lead:], strict=True) if fits else ()
            if fits and all(a >= b if cropped else a == b for a, b in sizes):
                continue
            smaller = fits and cropped
            raise Error(
                f"scene {number} is smaller than a crop" if smaller else f"scene {number} does not fit {name}",
                where=f"TileDataset(...), array {part} of scene {number}",
                expected=f"{'at least ' if cropped else ''}{wanted.shape}, as {name} without the batch"
                + (f", and {'x'.join(map(str, rest))} beside array 0" if cropped and not smaller else ""),
                got=shape if hasattr(array, "shape") or not lead else type(array).__name__,
                remedy="leave it out, or plan for smaller crops" if cropped else "crop=(rows, columns) of each scene",
            )


def wanted(pm: ParallelModule, names: Sequence[str], rank: int | None) -> list[Wanted]:
    """What a plan takes as inputs, and which parts of them the ranks take that share samples with ``rank``.

    Raises:
        Error: there is no such input; a rank's samples are others of one input than of another.
    """
    values = [input_value(pm.after, name, "TileDataset(names=...)") for name in names]
    if rank is None:
        sizes = [Batch(value.shape[0], 0, value.shape[0]) for value in values]
        whole = [tuple(slice(0, size) for size in value.shape[1:]) for value in values]
        return [Wanted(v.shape[1:], v.type.dtype, {0: w}, b) for v, w, b in zip(values, whole, sizes, strict=True)]
    mine = pm.tile(names[0], rank)[0]
    group = [r for r in range(pm.mesh.size) if pm.tile(names[0], r)[0] == mine]
    for name in names:
        if (first := pm.tile(name, rank)[0]) != mine:
            raise Error(
                f"a rank takes other samples of {name} than of {names[0]}",
                where=f"TileDataset(names=...), rank {rank}",
                expected=f"samples {mine.start} to {mine.stop} of both",
                got=f"samples {first.start} to {first.stop} of {name}",
                remedy=f"cut both alike: Hints(specs={{{name!r}: ...}})",
            )
    batch = Batch(values[0].shape[0], mine.start, mine.stop)
    if batch.start == batch.stop:
        raise Error(
            f"rank {rank} has no sample of a batch",
            where=f"TileDataset(...), {names[0]}",
            expected="a batch of a sample for each rank that it is cut over, at least",
            got=f"{batch.size} samples",
            remedy="a larger batch in Hints(args=...), or fewer ranks on that axis",
        )
    return [
        Wanted(value.shape[1:], value.type.dtype, {r: pm.tile(name, r)[1:] for r in group}, batch)
        for name, value in zip(names, values, strict=True)
    ]
