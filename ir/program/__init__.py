"""One rank's program: lowered from the planned graph."""
