"""Odd models that are sound: a table of them, how each is run against one device, and sound rewrites of them."""

from . import attention, densities, graphs, images, recurrent, signals, structures, weights
from .beside import Found, run
from .odd_model import ODD, Odd, mesh

__all__ = [
    "ODD",
    "Found",
    "Odd",
    "attention",
    "densities",
    "graphs",
    "images",
    "mesh",
    "recurrent",
    "run",
    "signals",
    "structures",
    "weights",
]
