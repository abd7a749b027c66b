"""Pictures of graphs, as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from shardfx.ir.graph import Graph
from shardfx.visualize.paint.picture import picture_svg
from shardfx.visualize.scene.detail import show


def draw_graph(graph: Graph, path: str | Path, title: str = "", *, boxes: int = 300, header: bool = True) -> Path:
    """Draw ``graph`` as one SVG file.

    Args:
        path: where to write the file; its folder is made.
        title: what stands above the picture.
        boxes: how many boxes there may be; of a larger graph, modules are drawn closed.
        header: whether title and legend stand above the picture; without them it fits on a page with text.

    Returns:
        The path of the file.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(picture_svg(show(graph, boxes), title or "graph", header=header), encoding="utf-8")
    return path


def draw_folder(graphs: Mapping[str, Graph], folder: str | Path) -> list[Path]:
    """Draw ``before``, ``after`` and what stood between as ``before.svg``, ``after.svg``, ``01-<name>.svg``, ...

    Args:
        graphs: the graphs by name, in order; a name other than ``before`` and ``after`` is that of a pass.

    Returns:
        The paths of the files, in the same order.
    """
    paths = []
    passes = 0
    for name, graph in graphs.items():
        file, title = name, name.capitalize()
        if name not in ("before", "after"):
            passes += 1
            file, title = f"{passes:02}-{name}", f"After pass {passes}: {name}"
        paths.append(draw_graph(graph, Path(folder) / f"{file}.svg", title))
    return paths
