"""Plans in which a rank's rows are those of several cuts, or none, are proven: what the ranks have in common decides.

Four rows over 2 x 2 x 2 ranks are one each on every second rank, and row 0 on rank 0 is also that of a cut over two of
the axes. A sum of squares of such rows is a share of the same sum by either cut, on rank 0 alone.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import shardfx as sx

AXES = {"2x2x2": {"a": 2, "b": 2, "c": 2}, "3x2": {"a": 3, "b": 2}, "2x3": {"a": 2, "b": 3}}


def planned(mesh: str, specs: dict[str, str], **hints: object) -> sx.ParallelModule:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4 if mesh == "2x2x2" else 5, dtype=torch.float64)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(4, (4,))
    given = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs, **hints)  # type: ignore[arg-type]
    return sx.parallelize(model, sx.Mesh(**AXES[mesh]), given)


@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        ("2x2x2", {"weight": "a, c", "bias": "a b c"}),
        pytest.param("2x2x2", {"weight": "a b c, -", "bias": "a b"}, marks=pytest.mark.slow),
        ("2x3", {"args.0": "a, -", "weight": "b a, -"}),
    ],
)
def test_a_norm_of_parameters_in_other_cuts_is_proven(mesh: str, specs: dict[str, str]) -> None:
    pm = planned(mesh, specs, clip=0.01)
    assert pm.verify(), pm.verify().why


def adafactor(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)  # type: ignore[arg-type]


def test_means_over_rows_of_cut_states_are_proven() -> None:
    pm = planned("3x2", {"weight": "a b, -"}, optimizer=adafactor)
    assert pm.verify(), pm.verify().why
