"""Rewriting by example: what a Python function is in a graph, and another in its place."""
