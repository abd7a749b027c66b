"""Loops of a program: the nest, its lowering, schedule actions, and the same program unrolled."""
