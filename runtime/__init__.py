"""How programs run, and the proof that they are the model."""
