"""Our own ops: what changes a placement, and what a rank does for it."""
