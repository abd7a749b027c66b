"""Inference on what nothing holds: a scene is computed window by window, and the result is that of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree

from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind, OutputKind

from .locality import Locality, follow, not_local
from .progress_file import Done, fingerprint
from .reading import ArrayLike, read_window
from .scene_rows import Rows
from .scene_windows import SceneWindow, all_windows, batches, spans, whole_span

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
    """Run a model over a scene that is larger than what all ranks hold, window by window::

        pm.eval()
        out = np.lib.format.open_memmap("classes.npy", "w+", np.float32, shape=(5, 40_000, 30_000))
        sx.predict_scene(pm, sx.GeoTiff("scene.tif"), out)

    The result is that of the whole scene, to rounding: by the model's graph it is worked out of which rows of the scene
    a place of the result is made (the margin), and windows overlap by that, begin where strides fall as they do in the
    whole, and are padded at the border of the scene alone. As many windows are computed at a time as the plan's batch
    has samples. Under ``torchrun`` all ranks call it.

    Args:
        pm: a plan whose model takes one image; the mode that it is in counts (``pm.eval()``).
        scene: anything with ``shape`` (C, H, W; or C, D, H, W) and slicing.
        out: what takes the result: an array of its shape. None on a process that is to write nothing.
        window: rows of the last dims; by default those that the plan is for. Other sizes, and what is left at the end
            of a scene, are planned when they come.
        result: which of the model's results, where it gives several: ``"results.0"``.
        state: a file that says which windows are done: called again, with ``out`` as it was, it goes on from there.
        progress: show a bar.

    Raises:
        Error: the model is not local: the op that takes the whole image (a global pool, attention, a norm by statistics
            of the batch), and where it stands; a window that is smaller than the margin; shapes that do not fit; a
            ``state`` of another run.
    """
    image = pm.after.input(IMAGE).value
    sizes = _sizes(pm, scene, image.shape, window)
    place, locality = _followed(pm, scene, sizes, result)
    parts, rows = locality.dims, {part.axis: part for part in locality.dims if isinstance(part, Rows)}
    if parts[0].size != image.shape[0] or (image.shape[0] > 1 and 0 not in rows):
        raise not_local(None, "the first dim of its result is not that of the images")
    by_dim = [
        spans(rows[dim], size, whole, locality.grid[dim], dim - 1) if size != whole else [whole_span(whole)]
        for dim, (size, whole) in enumerate(zip(sizes, scene.shape[1:], strict=True), 2)
    ]
    wanted = tuple(part.whole if isinstance(part, Rows) else part.size for part in parts[1:])
    if out is not None and tuple(out.shape) != wanted:
        raise Error(
            "out is of another shape than the result",
            where="predict_scene(pm, scene, out)",
            expected=f"{wanted}, the model's result of the whole scene",
            got=tuple(out.shape),
            remedy="make it anew",
        )
    windows = all_windows(by_dim)
    last = tuple(each[-1].size for each in by_dim)
    ends = locality if last == sizes else _followed(pm, scene, last, result)[1]
    if ends.ragged is not None:
        raise not_local(ends.ragged, "gives another share of rows at the end of the scene than at that of a window")
    from rich.progress import Progress

    done = Done(state, {} if state is None else fingerprint(pm, scene.shape, wanted, sizes), bool(pm.this_rank))
    pm.agree_on("predicting a scene", {"scene": str(tuple(scene.shape)), "window": str(sizes), "done": str(done)})
    left = [each for each in windows if each.number not in done]
    with Progress(transient=True, disable=not progress or bool(pm.this_rank)) as bar:
        task = bar.add_task("windows", total=len(windows), completed=len(windows) - len(left))
        for batch in batches(left, image.shape[0]):
            made = _computed(pm, scene, batch, place)
            for each, one in zip(batch, made, strict=False):
                _write(out, one, each, parts)
            done.add(out, [each.number for each in batch])
            bar.advance(task, len(batch))


def _sizes(
    pm: ParallelModule, scene: ArrayLike, image: tuple[int, ...], window: Sequence[int] | None
) -> tuple[int, ...]:
    """The rows of a window: no more than the scene has.

    Raises:
        Error: the model takes other inputs; the scene does not fit.
    """
    arguments = [given.name for given in pm.after.of_kind(InputKind.ARGUMENT)]
    if arguments != [IMAGE]:
        raise Error(
            "the model takes other inputs beside one image",
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
            expected=f"a shape of {image[1]} channels and {len(image) - 2} dims of space, which windows have as well",
            got=f"{tuple(scene.shape)}, windows of {asked}",
            remedy="give it as (C, H, W), without the batch",
        )
    return tuple(min(a, b) for a, b in zip(asked, scene.shape[1:], strict=True))


def _followed(pm: ParallelModule, scene: ArrayLike, sizes: Sequence[int], result: str | None) -> tuple[int, Locality]:
    """Which of the model's results is meant, and what is known of its rows.

    Raises:
        Error: it is not local, or there is none of this name.
    """
    image = pm.after.input(IMAGE).value
    window, whole = (
        pm.traced(torch.empty((*image.shape[:2], *space), dtype=image.type.dtype, device="meta"))
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
    together = [0] if image.shape[0] > 1 else []
    return names.index(name), follow(window, whole, pm.rule_book, [*together, *axes], name)


def _computed(pm: ParallelModule, scene: ArrayLike, batch: Sequence[SceneWindow], place: int) -> torch.Tensor:
    """The model's result for some windows; those that the batch lacks are the last one again."""
    image = pm.after.input(IMAGE).value
    channels, device = slice(0, image.shape[1]), next((p.device for p in pm.parameters()), None)
    read = [read_window(scene, (channels, *each.source), "the scene").to(image.type.dtype) for each in batch]
    read += [read[-1]] * (image.shape[0] - len(read))
    with torch.no_grad():
        made = pytree.tree_leaves(pm(torch.stack(read).to(device)))
    tensors = [each for each in made if isinstance(each, torch.Tensor)]
    return tensors[place].cpu()


def _write(out: Any, made: torch.Tensor, window: SceneWindow, parts: Sequence[Any]) -> None:
    """Write what is right of a window where it belongs."""
    if out is None:
        return
    kept, into = [], []
    for part in parts[1:]:
        span = window.spans[part.axis - 2] if isinstance(part, Rows) else None
        kept.append(slice(None) if span is None else span.kept)
        into.append(slice(None) if span is None else span.into)
    piece = made[tuple(kept)]
    if not isinstance(out, torch.Tensor):
        piece = piece.float() if piece.dtype is torch.bfloat16 else piece
        out[tuple(into)] = piece.numpy()
    else:
        out[tuple(into)] = piece
