"""Cost reports of plans, in tables."""
