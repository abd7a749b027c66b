"""Memory beside the device's own: the host's, and files."""
