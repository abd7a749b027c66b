"""Spatial sharding: which tiles of images are computed where, beyond what hints say."""

from .spatial import Spatial

__all__ = ["Spatial"]
