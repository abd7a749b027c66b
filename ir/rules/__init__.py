"""What may be cut of an op, as data; see docs/writing_rules.md."""

from .book import Contiguous, RuleBook, RuleEntry, rule
from .local import Emit, Share
from .sharding_rule import ShardingRule
from .strategy import strategy
from .template import Template, tensor_slots

__all__ = [
    "Contiguous",
    "Emit",
    "RuleBook",
    "RuleEntry",
    "ShardingRule",
    "Share",
    "Template",
    "rule",
    "strategy",
    "tensor_slots",
]
