"""Capture: from a PyTorch module to one global graph."""
