"""How a program is seen: pictures of graphs as SVG."""

from .draw import draw_folder, draw_graph

__all__ = ["draw_folder", "draw_graph"]
