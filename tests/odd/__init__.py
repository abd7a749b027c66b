"""Odd models that are sound: a table of them, how each is run against one device, and sound rewrites of them."""

from . import graphs, images, sequences, structures, weights
from .beside import run
from .odd_model import ODD, mesh

__all__ = ["ODD", "graphs", "images", "mesh", "run", "sequences", "structures", "weights"]
