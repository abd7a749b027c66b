"""The oracle: finds the valid shardings of an op by running it on shards; checks rules, and discovers missing ones."""
