"""One rank's program: lowered from the planned graph."""

from .program_text import parse_program, print_program
from .rank_program import RankProgram

__all__ = ["RankProgram", "parse_program", "print_program"]
