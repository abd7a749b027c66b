"""From a user's module to a graph of forward, loss and backward."""
