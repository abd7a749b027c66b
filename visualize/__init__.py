"""Pictures of graphs, of memory over a program's calls, of schedules and of tiles, as SVG."""

from .graph_picture import draw_folder as draw_folder
from .graph_picture import draw_graph as draw_graph
from .memory_chart import draw_memory as draw_memory
from .schedule_chart import draw_schedule as draw_schedule
from .tile_chart import LayerMargin as LayerMargin
from .tile_chart import draw_tiles as draw_tiles
