"""Tiles of images: which are computed where, beyond what hints say."""

from .spatial import Spatial

__all__ = ["Spatial"]
