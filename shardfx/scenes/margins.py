"""How far the places of each layer reach on the image, and the picture of its tiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import op_name
from shardfx.module.held.input_tile import input_value

from .locality import Layer, follow

if TYPE_CHECKING:
    from shardfx.module.parallel_module import ParallelModule
    from shardfx.visualize import LayerMargin

LARGE = (4, 8)
"""How many times as large as the plan's the images are by which margins are found, so that none is cut off."""


def draw_tiles(pm: ParallelModule, path: str | Path, name: str = "args.0") -> Path:
    """Draw tiles and halos on the image as one SVG file: who has what, who sends what to whom in each exchange with its
    bytes, and how far the places of each layer reach. ::

        sx.draw_tiles(pm, "out/tiles.svg")

    Args:
        pm: a plan that cuts an image.
        path: where to write the file; its folder is made.
        name: the input that is cut.

    Raises:
        Error: there is no such input, or none of its dims behind the second one is cut.
    """
    from shardfx.visualize import draw_tiles as draw

    value = input_value(pm.after, name, "draw_tiles(pm, path, name)")
    if value.spec is None or not any(cut.axes for cut in value.spec.dims[2:]):
        raise Error(
            f"{name} is not cut into tiles",
            where=f"draw_tiles(pm, path, {name!r})",
            expected='a cut of height or width, such as Hints(specs={"args.0": "-, -, h, w"})',
            got=value.spec.text(value.shape) if value.spec is not None else "no placement",
            remedy="pm.draw(folder) draws other plans",
        )
    return draw(pm.after, name, layer_margins(pm), path)


def layer_margins(pm: ParallelModule, name: str = "args.0") -> list[LayerMargin]:
    """How many rows of the image, on each side, a place of each layer is made of: where that changes, layer by layer,
    up to the first that takes the whole image."""
    from shardfx.visualize import LayerMargin

    image = input_value(pm.after, name, "layer_margins(pm, name)")
    space = range(2, image.type.ndim)
    try:
        window, whole = (
            pm.traced(torch.empty((1, image.shape[1], *sizes), dtype=image.type.dtype, device="meta"))
            for sizes in ([size * by for size in image.shape[2:]] for by in LARGE)
        )
        found = follow(window, whole, pm.rule_book, space, None)
    except Error as error:
        return [LayerMargin(error.where or "the model", 0.0, f"not known: {error.what}")]
    made: list[LayerMargin] = []
    for layer in found.layers:
        rows = max((float(each.margin) for each in layer.rows.values()), default=None)
        if rows is not None and (not made or rows != made[-1].rows):
            made.append(LayerMargin(_named(layer), rows))
    local = {each.node for each in found.layers}
    first = next((node for node in window.nodes if node.outs and node not in local), None)
    if first is not None:
        made.append(LayerMargin(first.where.module or op_name(first.op), 0.0, "the whole image"))
    return made


def _named(layer: Layer) -> str:
    where = layer.node.where
    return where.module or f"{where} {op_name(layer.node.op).removeprefix('aten.')}"
