"""The ranks beside the whole program, on random numbers."""
