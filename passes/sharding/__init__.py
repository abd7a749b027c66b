"""From hints to a strategy for every op."""
