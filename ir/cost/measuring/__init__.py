"""How fast the machine at hand is."""
