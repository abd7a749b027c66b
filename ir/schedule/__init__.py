"""Schedules as data: what each rank does for which stage and micro-batch, in which order; checked, simulated."""

from shardfx.ir.schedule.actions import Pipelined
from shardfx.ir.schedule.simulation import ScheduleReport, check_schedule

from .actions import Action, Schedule
from .simulation import COSTS, Costs, Simulation

__all__ = [
    "COSTS",
    "Action",
    "Costs",
    "Pipelined",
    "Schedule",
    "ScheduleReport",
    "Simulation",
    "check_schedule",
]
