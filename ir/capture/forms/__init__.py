"""The forms in which ops are captured, whatever way a model writes them."""
