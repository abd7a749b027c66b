"""Odd models that are sound: a table of them, how each is run against one device, and sound rewrites of them."""

from . import models
from .odd_model import ODD, mesh, run

__all__ = ["ODD", "mesh", "models", "run"]
