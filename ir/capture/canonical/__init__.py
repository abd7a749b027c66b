"""Canonicalization: one form for equivalent ways to write a model."""
