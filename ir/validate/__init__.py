"""Validation of graphs: well-formedness."""

from .validator import COMM_EXPLICIT, SHARDED, Validator, validate_graph

__all__ = ["COMM_EXPLICIT", "SHARDED", "Validator", "validate_graph"]
