"""Turns and schedules of pipelines as people say and see them: accumulated, simulated, drawn, on the command line."""
