"""Time: what each rank of a pipeline does for which stage and turn, in which order."""

from .make_schedule import SCHEDULES, ScheduleMaker, make_schedule

__all__ = ["SCHEDULES", "ScheduleMaker", "make_schedule"]
