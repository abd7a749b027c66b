"""Passes that split a graph into the stages of a pipeline and check its loops, and schedules of pipelines."""

from .known_schedules import SCHEDULES, ScheduleMaker
from .loop_check import Loops
from .make_schedule import check_live, list_schedule, make_schedule
from .pipeline_pass import Pipeline
from .stage_blocks import SearchedCounts, stages_as_planned

__all__ = ["SCHEDULES", "Loops", "Pipeline", "ScheduleMaker", "SearchedCounts", "check_live", "list_schedule"]
__all__ += ["make_schedule", "stages_as_planned"]
