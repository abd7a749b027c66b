"""Sharding rules of ops, as data; see docs/writing_rules.md."""

from .book import Contiguous, RuleBook, RuleEntry, rule
from .local import Emit, NodeShard, add_once, mine, others_zero, reshaped
from .sharding_rule import ShardingRule, rule_text
from .strategy import strategy
from .template import Template, argument, tensor_slots

__all__ = [
    "Contiguous",
    "Emit",
    "NodeShard",
    "RuleBook",
    "RuleEntry",
    "ShardingRule",
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
