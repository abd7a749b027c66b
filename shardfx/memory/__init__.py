"""Memory of a rank, predicted and compared with its budget."""
