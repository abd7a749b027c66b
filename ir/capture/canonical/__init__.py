"""Canonical form: what is captured in one form, whatever way a model writes it."""
