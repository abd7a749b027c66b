"""Schedules as data: for each rank a row of actions; checked and simulated."""

from .actions import Action, Pipelined, Schedule
from .simulation import COSTS, Costs, ScheduleReport, Simulation, check_schedule

__all__ = ["COSTS", "Action", "Costs", "Pipelined", "Schedule", "ScheduleReport", "Simulation", "check_schedule"]
