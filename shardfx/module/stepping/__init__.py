"""Optimizers of a parallel module's parameters: whether they may work on pieces, and on pieces without their looks."""
