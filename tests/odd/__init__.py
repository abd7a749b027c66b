"""Odd models that are sound: a table of them, and how each is run against one device."""

from . import models
from .odd_model import ODD, run

__all__ = ["ODD", "models", "run"]
