"""Schedules of pipelines as people see them: simulated, drawn, on the command line."""
