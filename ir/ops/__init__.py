"""Ops of the IR that are not torch's: communication, memory, loops, and their local versions."""
