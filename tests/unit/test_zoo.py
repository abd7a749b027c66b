"""The zoo itself: deterministic, trainable, and hinted by names that exist."""

from __future__ import annotations

import re

import pytest
import torch

from tests.reference import rel_err, single_device
from tests.zoo import CASES, WITH_SEQUENCE, make


def matches(pattern: str, name: str) -> bool:
    """``*`` is one part of a dotted name, ``**`` any number of them."""
    parts = (".*" if part == "**" else re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("."))
    return re.fullmatch(r"\.".join(parts), name) is not None


@pytest.mark.parametrize("name", CASES)
def test_case(name: str) -> None:
    case = make(name)
    assert case.name == name
    params, modules = dict(case.model.named_parameters()), dict(case.model.named_modules())
    assert all(param.dtype == torch.float64 for param in params.values())
    assert torch.get_default_dtype() == torch.float32
    for pattern, spec in case.megatron_specs.items():
        found = [param for path, param in params.items() if matches(pattern, path)]
        assert found, pattern
        assert {param.ndim for param in found} == {len(spec.split(","))}, pattern
    for pattern in case.sequence_specs or {}:
        assert any(matches(pattern, path) for path in modules), pattern
    assert (name in WITH_SEQUENCE) == bool(case.sequence_specs and "dropout" not in name)

    first, second = single_device(case, steps=2), single_device(make(name), steps=2)
    assert first.losses == second.losses
    assert first.losses[0] != first.losses[1]
    assert first.grads.keys() == params.keys()
    assert all(rel_err(first.params[path], second.params[path]) == 0 for path in params)
    assert all(
        torch.equal(param, make_param)
        for param, make_param in zip(params.values(), make(name).model.parameters(), strict=True)
    )


def test_rel_err() -> None:
    one, nan = torch.ones(3), torch.tensor([1.0, float("nan"), 1.0])
    assert rel_err(one, one) == 0
    assert rel_err(torch.zeros(3), torch.zeros(3)) == 0
    assert rel_err(one, 1.5 * one) == pytest.approx(1 / 3)
    assert rel_err(nan, nan) == 0
    assert rel_err(nan, one) == float("inf")
    assert rel_err(one, float("inf") * one) == float("inf")
    assert rel_err(one, torch.ones(4)) == float("inf")
    assert rel_err(torch.zeros(0), torch.zeros(0)) == 0
    assert rel_err(2.0, 2.0 + 1e-12) > 0
    assert rel_err(1e-17, -1e-17) < 1e-12
