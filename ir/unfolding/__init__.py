"""Unfolding of repeated blocks that a graph contains only once."""
