"""Memory pools beside the device's own: host memory, and files."""
