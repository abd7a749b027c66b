"""Schedules as data: for each rank a row of actions; checked and simulated."""

from .actions import Action, Pipelined, Schedule
from .simulation import COSTS, Costs, ScheduleReport, check_schedule

__all__ = ["COSTS", "Action", "Costs", "Pipelined", "Schedule", "ScheduleReport", "check_schedule"]
