"""The public core of the IR: the names that a plug-in writer needs (docs/writing_passes.md, docs/writing_rules.md)."""

from .capture.canonical.patterns import Match, replace_pattern
from .dim_sharding import DimSharding, Part
from .errors import Error, ShardfxWarning
from .graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Strategy, Value, Where, op_name, substitute
from .mesh import Link, Loop, Mesh
from .names import pattern
from .ops import comm
from .ops.local_ops import row_of
from .ops.redistribute import Redistribution
from .program.program_text import parse_program
from .program.rank_program import RankProgram
from .rewriter import Rewriter, dead_code
from .rulebook import default_rules
from .rules import RuleBook, ShardingRule, rule
from .spec import Spec, TensorType
from .text import parse_graph, parse_spec, print_graph
from .validate import validate_graph

__all__ = [
    "DimSharding",
    "Error",
    "Graph",
    "Input",
    "InputKind",
    "Link",
    "Loop",
    "Match",
    "Mesh",
    "Node",
    "Output",
    "OutputKind",
    "Part",
    "Phase",
    "RankProgram",
    "Redistribution",
    "Rewriter",
    "RuleBook",
    "ShardfxWarning",
    "ShardingRule",
    "Spec",
    "Strategy",
    "TensorType",
    "Value",
    "Where",
    "comm",
    "dead_code",
    "default_rules",
    "op_name",
    "parse_graph",
    "parse_program",
    "parse_spec",
    "pattern",
    "print_graph",
    "replace_pattern",
    "row_of",
    "rule",
    "substitute",
    "validate_graph",
]
