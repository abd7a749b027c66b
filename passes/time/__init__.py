"""Time: what each rank of a pipeline does for which stage and turn, in which order."""

from .known_schedules import SCHEDULES, ScheduleMaker
from .list_schedule import list_schedule
from .make_schedule import make_schedule

__all__ = ["SCHEDULES", "ScheduleMaker", "list_schedule", "make_schedule"]
