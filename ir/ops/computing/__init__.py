"""Ops of our own that compute."""
