"""How a program is seen: pictures of graphs, of memory over a program's course, and of schedules, as SVG."""

from .draw import draw_folder, draw_graph
from .paint.course import draw_course
from .paint.courses import Line, draw_courses
from .paint.schedule_chart import draw_schedule
from .paint.tile_chart import Margin, draw_tiles

__all__ = ["Line", "Margin", "draw_course", "draw_courses", "draw_folder", "draw_graph", "draw_schedule", "draw_tiles"]
