"""The oracle: valid shardings of an op, found by running it on shards. It checks rules, and finds missing ones."""
