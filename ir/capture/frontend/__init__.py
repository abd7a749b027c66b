"""Models as users give them: accepted kinds, hooks, losses, custom gradients, and errors in their terms."""
