"""Rules of ops that move elements."""
