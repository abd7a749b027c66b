"""Optimizers tried on small parameters: what they do there, and whether one program of each parameter can do it."""
