"""What a plan costs, in tables."""
