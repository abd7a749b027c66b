"""Attention as the model means it, and its sharding along the sequence."""
