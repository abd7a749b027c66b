"""Why something is sharded as it is."""

from .explanation import Explanation, explain

__all__ = ["Explanation", "explain"]
