"""When ranks do what of their programs: foreseen from what calls cost, and as it was measured."""

from shardfx.ir.timing.rank_tasks import BEFORE, RECEIVED, Purpose, main_iterations, purposes
from shardfx.ir.timing.simulate import Course, Stall, Transfer, foreseen

__all__ = ["BEFORE", "RECEIVED", "Course", "Purpose", "Stall", "Transfer", "foreseen", "main_iterations", "purposes"]
