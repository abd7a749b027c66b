"""Every rule is right: each cut and each partial sum that it allows is executed, and gives what the whole op gives."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules import ShardingRule, replicated, rule
from tests.instances import f, of_case, picked
from tests.zoo import CASES

pytestmark = pytest.mark.slow

aten = torch.ops.aten
BOOK = default_rules()


def check(instances: list[Instance]) -> None:
    wrong, missing = [], Counter()
    for each in instances:
        entry = BOOK.entry(each.node.op)
        if entry is None:
            missing[str(each.node.op)] += 1
        else:
            wrong += refutations(entry, each, most=2)
    assert not wrong, "\n".join(map(str, wrong))
    assert not missing, missing


def test_picked_instances() -> None:
    check(picked())


@pytest.mark.parametrize("name", CASES)
def test_instances_of_the_zoo(name: str) -> None:
    check(of_case(name))


@pytest.mark.parametrize(
    ("op", "template", "options", "args"),
    [
        (aten._softmax.default, "m n -> m n", {}, (f(4, 6), 1, False)),
        (aten.mm.default, "m k, k n -> m n", {"linear": "0&1"}, (f(4, 6), f(6, 5))),
        (aten.mm.default, "m k!, k! n -> n m", {}, (f(5, 6), f(6, 5))),
        (aten.relu.default, "m n -> m n", {"linear": "0"}, (f(4, 6),)),
        (aten.sum.dim_IntList, "m n -> m", {"reduce": "max"}, (f(4, 6), [1])),
        (aten.flip.default, "m n -> m n", {}, (f(4, 6), [0])),
        (aten.view.default, "(a b) c -> b (a c)", {"shape_arg": 1}, (f(6, 4), [3, 8])),
        (aten.view.default, "m n -> m n", {}, (f(4, 6), [4, 6])),
    ],
)
def test_a_wrong_rule_is_refuted(op: object, template: str, options: dict[str, str], args: tuple[object, ...]) -> None:
    assert refutations(rule(op, template, **options), instance(op, args))  # type: ignore[arg-type]


def test_what_a_rule_does_not_allow_is_not_tried() -> None:
    entry = rule(aten.flip.default, replicated)
    made = entry.make(instance(aten.flip.default, (f(4, 6), [0])).node)
    assert isinstance(made, ShardingRule)
    assert not refutations(entry, instance(aten.flip.default, (f(4, 6), [0])))
