"""Why something is cut as it is."""
