"""Time: what each rank of a pipeline does for which stage and iteration, in which order."""

from .known_schedules import SCHEDULES, ScheduleMaker
from .list_schedule import list_schedule
from .make_schedule import check_live, make_schedule
from .micro_batches import Loops

__all__ = ["SCHEDULES", "Loops", "ScheduleMaker", "check_live", "list_schedule", "make_schedule"]
