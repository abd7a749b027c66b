"""Graphs as text: printed, and read back."""

from .parser import parse_graph, parse_spec
from .printer import print_graph

__all__ = ["parse_graph", "parse_spec", "print_graph"]
