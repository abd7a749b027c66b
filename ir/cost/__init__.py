"""Cost of programs: bytes, FLOPs, memory."""
