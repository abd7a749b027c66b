"""Proof without numbers."""
