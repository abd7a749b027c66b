"""What is done once for each turn of an axis of time."""
