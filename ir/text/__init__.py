"""Graphs as text: printed, and read back. Importing this lets ``str(graph)`` know how."""

from shardfx.ir.graph import Graph

from .parser import parse_graph, parse_spec
from .printer import print_graph

Graph.printer = print_graph

__all__ = ["parse_graph", "parse_spec", "print_graph"]
