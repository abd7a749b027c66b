"""Spatial sharding: placement of image tiles on ranks, beyond the hints."""

from .spatial import Spatial

__all__ = ["Spatial"]
