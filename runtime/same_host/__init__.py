"""Collectives among CPU ranks of one machine, through memory that they share."""
