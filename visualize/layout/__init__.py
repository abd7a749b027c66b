"""Where it is drawn."""
