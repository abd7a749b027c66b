"""What may be sharded of an op, as data; see docs/writing_rules.md."""

from .book import Contiguous, RuleBook, RuleEntry, rule
from .local import Emit, Share, add_once, mine, others_zero, reshaped
from .schema import argument, tensor_slots
from .sharding_rule import ShardingRule, rule_text
from .strategy import strategy
from .template import Template

__all__ = [
    "Contiguous",
    "Emit",
    "RuleBook",
    "RuleEntry",
    "ShardingRule",
    "Share",
    "Template",
    "add_once",
    "argument",
    "mine",
    "others_zero",
    "reshaped",
    "rule",
    "rule_text",
    "strategy",
    "tensor_slots",
]
