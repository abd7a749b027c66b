"""The oracle: what may be cut of an op, found by running it on small pieces. It checks rules, and finds missing
ones."""
