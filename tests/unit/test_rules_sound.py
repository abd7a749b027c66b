"""Every rule is right: each sharded and each partial sum that it allows is executed, and gives what the whole op gives.

Of hand-picked instances, and a sample of PyTorch's operator database; ``make coverage`` does it to the whole of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from benchmarks.op_coverage import Score, Total, measure
from benchmarks.op_instances import Recorder, record
from shardfx.ir.oracle.instance import Instance, instance
from shardfx.ir.oracle.recombine import split_max
from shardfx.ir.oracle.soundness import refutations
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import rule
from tests.instances import picked
from tests.op_calls import f

aten = torch.ops.aten
BOOK = default_rules()
EVERY = 80
"""Of the operator database every so many-th op is in the quick tier."""


def check(instances: Iterable[Instance]) -> None:
    wrong, missing = [], Counter()
    for each in instances:
        entry = BOOK.entry(each.node.op)
        if entry is None:
            missing[str(each.node.op)] += 1
        else:
            wrong += refutations(entry, each)
    assert not wrong, "\n".join(map(str, wrong))
    assert not missing, missing


@pytest.mark.long
@pytest.mark.parametrize("share", range(4))
def test_picked_instances(share: int) -> None:
    check(picked()[share::4])


def instances(recorder: Recorder) -> list[Instance]:
    return [each for of_op in recorder.found.values() for each in of_op.values()]


def total(scores: Iterable[Score]) -> Total:
    made = Total()
    for each in scores:
        made.add(each)
    refuted = [text for each in made.scores for text in each.refuted]
    assert not refuted, "\n".join(refuted)
    return made


@pytest.mark.long
def test_a_sample_of_the_operator_database() -> None:
    made = total(measure(instances(record(3, 2, every=EVERY)), jobs=1, dtensor=False))
    assert made.shardings[1] > 30 and made.shardings[0] >= 0.97 * made.shardings[1]


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
        (aten.view_as_real.default, "m n -> m n e!", {"linear": "0", "moves_only": True}, (f(4, 6).to(torch.cfloat),)),
        (aten.real.default, "m n -> m n", {"linear": "0", "moves_only": True}, (torch.complex(f(4, 6), f(4, 6)),)),
    ],
)
def test_a_wrong_rule_is_refuted(op: object, template: str, options: dict[str, Any], args: tuple[object, ...]) -> None:
    assert refutations(rule(op, template, **options), instance(op, args))  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float64])
@pytest.mark.parametrize("kind", ["max", "min"])
def test_shares_of_a_maximum_are_of_its_dtype(dtype: torch.dtype, kind: str) -> None:
    """Also where there is nothing less: of what is False, or 0 without a sign."""
    draw = torch.Generator().manual_seed(0)
    whole = torch.tensor([0, 1, 0, 1]) if dtype is torch.bool else torch.tensor([0, 1, 254, 255])
    parts = split_max(whole.to(dtype), 3, kind, draw)
    assert all(part.dtype is dtype for part in parts)
    assert torch.equal(getattr(torch.stack(parts), f"a{kind}")(0), whole.to(dtype))
