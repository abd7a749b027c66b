"""Inference on a scene that no rank can hold: it is computed window by window, and the result is that of the full
scene."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.utils._pytree as pytree

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind, OutputKind
from shardfx.runtime.store import checksum

from .image_files import ArrayLike, read_window
from .receptive_field import Locality, SceneRows, follow, not_local

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule

IMAGE = "args.0"


def predict_scene(
    pm: ParallelModule,
    scene: ArrayLike,
    out: Any,
    *,
    window: Sequence[int] | None = None,
    result: str | None = None,
    state: str | Path | None = None,
    progress: bool = True,
) -> None:
    """Run a model over a scene that is larger than the memory of all ranks, window by window::

        pm.eval()
        out = np.lib.format.open_memmap("classes.npy", "w+", np.float32, shape=(5, 40_000, 30_000))
        sx.images.predict_scene(pm, sx.images.GeoTiff("scene.tif"), out)

    The result is that of the full scene, to rounding: the receptive field (the margin) is derived from the model's
    graph, and windows overlap by it, begin where strides fall as in the full scene, and are padded at the border of the
    scene alone. As many windows are computed at a time as the plan's batch has samples. Under ``torchrun`` all ranks
    call it.

    Args:
        pm: a plan whose model takes one image; the mode that it is in counts (``pm.eval()``).
        scene: anything with ``shape`` (C, H, W; or C, D, H, W) and slicing.
        out: where the result is written: an array of its shape. None on a process that is to write nothing.
        window: sizes of the last dims; by default those that the plan is for. Other sizes, and the remainder at the
            end of a scene, are planned when they come.
        result: which of the model's results, where it gives several: ``"results.0"``.
        state: a file that records which windows are done: called again, with ``out`` as it was, it resumes from there.
        progress: show a bar.

    Raises:
        Error: the model is not local: the op that needs the full image (a global pool, attention, a norm by statistics
            of the batch), and where it stands; a window that is smaller than the margin; shapes that do not fit; a
            ``state`` of another run.
    """
    image = pm.planned.input(IMAGE).value
    sizes = _sizes(pm, scene, window)
    place, locality = _followed(pm, scene, sizes, result)
    parts, rows = locality.dims, {part.axis: part for part in locality.dims if isinstance(part, SceneRows)}
    if parts[0].size != image.shape[0] or (image.shape[0] > 1 and 0 not in rows):
        raise not_local(None, "the first dim of its result is not that of the images")
    by_dim = [[WindowSpan(0, full, slice(None), slice(None))] for full in scene.shape[1:]]
    for dim, (size, full) in enumerate(zip(sizes, scene.shape[1:], strict=True), 2):
        if size != full:
            by_dim[dim - 2] = spans(rows[dim], size, full, locality.grid[dim], dim - 1)
    wanted = tuple(part.full if isinstance(part, SceneRows) else part.size for part in parts[1:])
    if out is not None and tuple(out.shape) != wanted:
        raise Error(
            "out is of another shape than the result",
            where="predict_scene(pm, scene, out)",
            expected=f"{wanted}, the model's result of the full scene",
            got=tuple(out.shape),
            remedy="make it anew",
        )
    windows = [SceneWindow(number, each) for number, each in enumerate(itertools.product(*by_dim))]
    last = tuple(each[-1].size for each in by_dim)
    ends = locality if last == sizes else _followed(pm, scene, last, result)[1]
    if ends.ragged is not None:
        raise not_local(ends.ragged, "gives another share of rows at the end of the scene than at that of a window")
    from rich.progress import Progress

    done = ProgressFile(state, {} if state is None else _run_of(pm, scene.shape, wanted, sizes), bool(pm._this_rank))
    told = {"scene": str(tuple(scene.shape)), "window": str(sizes), "done": str(done)}
    with pm._together("predicting a scene", told):
        pass
    left = [each for each in windows if each.number not in done]
    with Progress(transient=True, disable=not progress or bool(pm._this_rank)) as bar:
        task = bar.add_task("windows", total=len(windows), completed=len(windows) - len(left))
        for batch in batches(left, image.shape[0]):
            made = _computed(pm, scene, batch, place)
            for each, one in zip(batch, made, strict=False):
                _write(out, one, each, parts)
            done.add(out, [each.number for each in batch])
            bar.advance(task, len(batch))


def _sizes(pm: ParallelModule, scene: ArrayLike, window: Sequence[int] | None) -> tuple[int, ...]:
    """The sizes of a window: no more than the scene's.

    Raises:
        Error: the model takes other inputs; the scene does not fit.
    """
    image = pm.planned.input(IMAGE).value.shape
    arguments = [inp.name for inp in pm.planned.of_kind(InputKind.ARGUMENT)]
    if arguments != [IMAGE]:
        raise Error(
            "the model takes other inputs than one image",
            where="predict_scene(pm, ...)",
            expected="a model of one tensor",
            got=", ".join(arguments),
            remedy="wrap it in a module that takes the image alone",
        )
    asked = tuple(window) if window is not None else image[2:]
    if len(scene.shape) != len(image) - 1 or scene.shape[0] != image[1] or len(asked) != len(image) - 2:
        raise Error(
            "the scene is no image that the model takes",
            where="predict_scene(pm, scene, out, window=...)",
            expected=f"a shape of {image[1]} channels and {len(image) - 2} spatial dims, which windows have as well",
            got=f"{tuple(scene.shape)}, windows of {asked}",
            remedy="give it as (C, H, W), without the batch",
        )
    return tuple(min(a, b) for a, b in zip(asked, scene.shape[1:], strict=True))


def _followed(pm: ParallelModule, scene: ArrayLike, sizes: Sequence[int], result: str | None) -> tuple[int, Locality]:
    """The index of the result, and the locality of its rows.

    Raises:
        Error: it is not local, or there is none of this name.
    """
    image = pm.planned.input(IMAGE).value
    window, full = (
        pm._traced(torch.empty((*image.shape[:2], *space), dtype=image.type.dtype, device="meta"))
        for space in (sizes, scene.shape[1:])
    )
    names = [output.name for output in window.outputs if output.kind is OutputKind.RESULT]
    if result not in names and (result is not None or len(names) != 1):
        raise Error(
            "which of the model's results is meant?",
            where="predict_scene(result=...)",
            expected=f"one of {', '.join(names)}",
            got=result,
            remedy=f"result={names[0]!r}" if names else "the model must give a tensor",
        )
    name = result or names[0]
    axes = [dim for dim, (a, b) in enumerate(zip(sizes, scene.shape[1:], strict=True), 2) if a != b]
    batch = [0] if image.shape[0] > 1 else []
    return names.index(name), follow(window, full, pm._rule_book, [*batch, *axes], name)


def _computed(pm: ParallelModule, scene: ArrayLike, batch: Sequence[SceneWindow], place: int) -> torch.Tensor:
    """The model's result for some windows; the batch is filled up with the last one."""
    image = pm.planned.input(IMAGE).value
    channels, device = slice(0, image.shape[1]), next((p.device for p in pm.parameters()), None)
    read = [read_window(scene, (channels, *each.source), "the scene").to(image.type.dtype) for each in batch]
    read += [read[-1]] * (image.shape[0] - len(read))
    with torch.no_grad():
        made = pytree.tree_leaves(pm(torch.stack(read).to(device)))
    return [each for each in made if isinstance(each, torch.Tensor)][place].cpu()


def _write(out: Any, made: torch.Tensor, window: SceneWindow, parts: Sequence[Any]) -> None:
    """Write the valid rows of a window to their place in the result."""
    if out is None:
        return
    kept, into = [], []
    for part in parts[1:]:
        span = window.spans[part.axis - 2] if isinstance(part, SceneRows) else None
        kept.append(slice(None) if span is None else span.kept)
        into.append(slice(None) if span is None else span.into)
    valid = made[tuple(kept)]
    if not isinstance(out, torch.Tensor):
        out[tuple(into)] = (valid.float() if valid.dtype is torch.bfloat16 else valid).numpy()
    else:
        out[tuple(into)] = valid


# ---- windows ------------------------------------------------------------------------------------------------


class WindowSpan(NamedTuple):
    """Rows ``first`` to ``first + size`` of one dim of a scene are an input of the model; of its result rows ``kept``
    are valid, which are rows ``into`` of the full result."""

    first: int
    size: int
    kept: slice
    into: slice


class SceneWindow(NamedTuple):
    """A window of a scene: a span of each of its last dims, and its number."""

    number: int
    spans: tuple[WindowSpan, ...]

    @property
    def source(self) -> tuple[slice, ...]:
        """Its place in the scene."""
        return tuple(slice(each.first, each.first + each.size) for each in self.spans)


def spans(rows: SceneRows, window: int, scene: int, grid: int, dim: int) -> list[WindowSpan]:
    """The windows along one dim of a scene: every row of the result is kept once.

    Args:
        rows: the rows of the result of a window of this size.
        window: its size; a last one may be smaller, down to ``window - grid + 1``.
        scene: the size of the scene, which is larger.
        grid: windows begin at multiples of this.
        dim: for errors.

    Raises:
        Error: a window gives no valid row that others do not give.
    """
    found, first, done = [], 0, 0
    while first + window < scene:
        base = int(first * rows.scale)
        found.append(WindowSpan(first, window, slice(done - base, rows.high), slice(done, base + rows.high)))
        done = base + rows.high
        following = int((done - rows.low) / rows.scale) // grid * grid
        if following <= first:
            raise Error(
                "the window is too small for the receptive field of the result",
                where=f"predict_scene(window=...), dim {dim} of the scene",
                expected=f"more than {2 * int(rows.margin) + grid} rows: the margin is {int(rows.margin)} on each side",
                got=f"{window} rows",
                remedy="give larger windows, or plan for larger images",
            )
        first = following
    first = -((window - scene) // grid) * grid
    base = int(first * rows.scale)
    return [*found, WindowSpan(first, scene - first, slice(done - base, rows.full - base), slice(done, rows.full))]


def batches(windows: Sequence[SceneWindow], size: int) -> list[list[SceneWindow]]:
    """Batches of at most ``size`` windows of equal sizes."""
    by_sizes: dict[tuple[int, ...], list[SceneWindow]] = {}
    for each in windows:
        by_sizes.setdefault(tuple(span.size for span in each.spans), []).append(each)
    return [group[i : i + size] for group in by_sizes.values() for i in range(0, len(group), size)]


# ---- progress -----------------------------------------------------------------------------------------------


def _run_of(pm: ParallelModule, scene: Sequence[int], out: Sequence[int], window: Sequence[int]) -> dict[str, Any]:
    """The identity of a run: another one must not resume from its state."""
    total = sum(checksum(tensor.cpu()) * (i + 1) for i, tensor in enumerate(pm.full_state_dict().values()))
    return {"scene": list(scene), "out": list(out), "window": list(window), "weights": f"{total % (1 << 64):x}"}


class ProgressFile:
    """The numbers of the windows that are done, in a file from which an interrupted run resumes::

        {"scene": [3, 900, 700], "out": [5, 900, 700], "window": [256, 256], "weights": "5b0c..."}
        [0, 1]
        [2, 3]

    Args:
        path: of the file; None: nothing is recorded.
        run: the identity of the run.
        silent: another process writes the file.

    Raises:
        Error: the file is of another run, or no such file; there is no folder for it.
    """

    def __init__(self, path: str | Path | None, run: Mapping[str, Any], silent: bool) -> None:
        self._path = None if path is None else Path(path)
        self._run, self._silent, self._begun, self._numbers = dict(run), silent, False, set[int]()
        if self._path is not None and not self._path.parent.is_dir():
            raise Error(
                "there is no folder for the state",
                where=str(path),
                expected="a folder that exists",
                got=f"no {self._path.parent}",
                remedy="make it, or name a file elsewhere",
            )
        if self._path is None or not self._path.exists():
            return
        lines = self._path.read_text().split("\n")[:-1]  # a last line without an end is incomplete
        try:
            found, *done = (json.loads(line) for line in lines)
            self._numbers |= {int(number) for numbers in done for number in numbers}
        except (ValueError, TypeError) as error:
            raise Error(
                "this is no state of a run",
                where=str(path),
                expected="a file that predict_scene(state=...) wrote",
                got=f"{type(error).__name__}: {error}" if lines else "no complete line",
                remedy="delete it, to begin anew",
            ) from error
        if found != self._run:
            other = next(key for key in run if found.get(key) != run[key])
            raise Error(
                f"the state is of another run: {other} differs",
                where=str(path),
                expected=f"{other} {run[other]}",
                got=found.get(other),
                remedy="delete it, to begin anew",
            )

    def __contains__(self, number: int) -> bool:
        return number in self._numbers

    def __str__(self) -> str:
        return f"{len(self._numbers)} windows, {sum(self._numbers)}"

    def add(self, out: Any, numbers: Sequence[int]) -> None:
        """Record some more, after what was written to ``out`` is on the disk."""
        if self._path is None or self._silent:
            return
        getattr(out, "flush", lambda: None)()
        lines = [] if self._begun else [self._run, sorted(self._numbers)]
        with self._path.open("a" if self._begun else "w") as file:
            file.writelines(json.dumps(line) + "\n" for line in [*lines, list(numbers)])
            file.flush()
            os.fsync(file.fileno())
        self._begun = True
