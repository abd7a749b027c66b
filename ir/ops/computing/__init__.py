"""Compute ops of our own."""
