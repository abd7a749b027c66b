"""Schedules as data: what each rank does for which stage and turn, in which order; checked, simulated."""

from .actions import Action, Schedule
from .check_schedule import ScheduleReport, check_schedule
from .pipelined import Pipelined
from .simulation import COSTS, Costs, Simulation
from .transfers import Transfer, with_transfers

__all__ = [
    "COSTS",
    "Action",
    "Costs",
    "Pipelined",
    "Schedule",
    "ScheduleReport",
    "Simulation",
    "Transfer",
    "check_schedule",
    "with_transfers",
]
