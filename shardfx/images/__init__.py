"""Images larger than a rank: data sets of which each rank reads its tiles, and inference window by window."""

from shardfx.passes import Spatial as Spatial

from .image_files import GeoTiff as GeoTiff
from .image_files import Nifti as Nifti
from .receptive_field import draw_tiles as draw_tiles
from .scene_inference import predict_scene as predict_scene
from .tile_dataset import TileDataset as TileDataset
from .whole_image import WholeImage as WholeImage
