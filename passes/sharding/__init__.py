"""Sharding propagation: from the user's hints to a strategy for every op."""

from .bind_hints import BindHints, hint_value
from .propagate import Propagate
from .sum_placement import Reassociate, SumPlacement

__all__ = ["BindHints", "Propagate", "Reassociate", "SumPlacement", "hint_value"]
