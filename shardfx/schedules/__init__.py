"""Pipeline schedules and timelines: made by name, checked, simulated, drawn, traced; and the command line for them."""

from shardfx.ir.schedule import Action, Schedule, ScheduleReport, check_schedule
from shardfx.passes.stages import make_schedule

from .timeline import Timeline, simulate

__all__ = ["Action", "Schedule", "ScheduleReport", "Timeline", "check_schedule", "make_schedule", "simulate"]
