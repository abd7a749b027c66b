"""What code names: attributes, globals, and where it makes up names only when it runs."""
