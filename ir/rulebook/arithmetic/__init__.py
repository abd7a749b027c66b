"""Rules of compute ops."""
