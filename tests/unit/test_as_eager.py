"""What was traced is what the model computes; code that does something else while it is traced is an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

import shardfx as sx

MESH = sx.Mesh(dp=2)


class Doubles(nn.Module):
    """Doubles its input where it is not watched."""

    def __init__(self, watched: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.watched = watched
        self.fc = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x if self.watched(x) else 2 * x)


WATCHED: dict[str, Callable[[Tensor], bool]] = {
    "compiling": lambda x: torch.compiler.is_compiling(),
    "exporting": lambda x: torch.compiler.is_exporting(),
    "fake": lambda x: isinstance(x, FakeTensor),
}


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.parametrize("guard", [False, True])
def test_a_model_that_is_another_when_traced_is_refused(watched: str, guard: bool) -> None:
    model = Doubles(WATCHED[watched])
    hints = sx.Hints(args=(torch.rand(4, 4),), loss=torch.mean, guard=guard)
    with pytest.raises(sx.Error, match="something else when it is traced"):
        sx.parallelize(model, MESH, hints)
    assert model.calls == 0, "the model was run, but is as it was"


def test_on_meta_there_is_nothing_to_compare() -> None:
    with torch.device("meta"):
        model = Doubles(WATCHED["compiling"])
    sx.parallelize(model, MESH, sx.Hints(args=(torch.rand(4, 4, device="meta"),), loss=torch.mean))


def test_a_random_model_is_no_other() -> None:
    x = torch.rand(4, 4)
    sx.parallelize(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).train(), MESH, sx.Hints(args=(x,), loss=torch.mean))


def test_an_example_that_the_model_does_not_take_is_said_to_be_one() -> None:
    ids = torch.full((4, 3), 1000)
    pm = sx.parallelize(nn.Embedding(10, 4), MESH, sx.Hints(args=(ids,), loss=torch.mean))
    assert "does not run on its example" in str(pm.report())


def test_a_model_that_does_not_run_in_another_dtype_is_refused() -> None:
    """Its buffer stays what it is, and takes what is computed along; a fake product would not have minded."""

    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4, dtype=torch.float64)
            self.register_buffer("centre", torch.ones(4, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x - self.centre)

    hints = sx.Hints(args=(torch.randn(4, 4, dtype=torch.float64),), compute=torch.float32)
    with pytest.raises(sx.Error, match="does not run in the dtype in which it is to compute"):
        sx.parallelize(Centred(), MESH, hints)
