"""Timing of a step: simulated from the costs of calls, and labels for measurements."""
