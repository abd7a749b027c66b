"""When ranks do what of their programs: foreseen from what calls cost, and as it was measured."""

from .foreseen import Course, Stall, Transfer, foreseen
from .purposes import BEFORE, RECEIVED, Purpose, main_turns, purposes

__all__ = ["BEFORE", "RECEIVED", "Course", "Purpose", "Stall", "Transfer", "foreseen", "main_turns", "purposes"]
