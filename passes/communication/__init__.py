"""What differs becomes communication, and travels together."""
