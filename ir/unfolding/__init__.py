"""Unfolding of repeated blocks that a graph leaves out."""
