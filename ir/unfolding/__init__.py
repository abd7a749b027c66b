"""Equal blocks that a graph leaves out, put back."""
