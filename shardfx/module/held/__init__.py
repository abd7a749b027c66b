"""What a parallel module holds: the model's state in pieces, the tree of its names, optimizers of them."""
