"""How a program is seen: pictures of graphs, and of memory over a program's course, as SVG."""

from .draw import draw_folder, draw_graph
from .paint.course import draw_course
from .paint.courses import Line, draw_courses

__all__ = ["Line", "draw_course", "draw_courses", "draw_folder", "draw_graph"]
