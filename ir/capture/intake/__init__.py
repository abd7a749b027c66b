"""What comes in to be captured: models of several kinds, their hooks, and what is refused."""
