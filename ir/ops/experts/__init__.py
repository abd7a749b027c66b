"""Ops of mixtures of experts: products with the matrices of experts, and the rows that are sent to them."""
