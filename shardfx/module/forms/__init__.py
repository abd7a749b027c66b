"""Forms of call: what becomes of those that come again and again."""
