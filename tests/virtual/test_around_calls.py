"""What scripts put around a call: it does what it does with the model, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import shardfx as sx
from tests.reference import rel_err


class Pair:
    """A model, and it in parallel, with a batch."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
        self.x, self.y = torch.randn(2, 4, 4, dtype=torch.float64).unbind()
        specs = {"args.0": "dp, -", "targets.0": "dp, -"}
        hints = sx.Hints(args=(self.x,), loss=F.mse_loss, targets=(self.y,), specs=specs)
        self.pm = sx.parallelize(copy.deepcopy(self.model), sx.Mesh(dp=2), hints, virtual=True)

    def check(self, ours: Tensor, theirs: Tensor) -> None:
        ours.backward()
        theirs.backward()
        assert rel_err(ours, theirs) < 1e-12
        grads = self.pm.full_grads()
        assert all(rel_err(grads[name], p.grad) < 1e-12 for name, p in self.model.named_parameters())


@pytest.fixture
def pair() -> Pair:
    return Pair()


KEEPS: dict[str, Callable[[], saved_tensors_hooks]] = {
    "save_on_cpu": save_on_cpu,
    "nothing": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("keeps", KEEPS)
def test_hooks_that_keep_saved_tensors_change_nothing(pair: Pair, keeps: str) -> None:
    with KEEPS[keeps]():
        ours = pair.pm(pair.x, pair.y)
    pair.check(ours, F.mse_loss(pair.model(pair.x), pair.y))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_hooks_that_change_saved_tensors_are_an_error(pair: Pair, dtype: torch.dtype) -> None:
    """Kept in fewer bits, as some do to save memory: gradients would be others on one device."""
    with (
        saved_tensors_hooks(lambda t: (t.dtype, t.to(dtype)), lambda kept: kept[1].to(kept[0])),
        pytest.raises(sx.Error, match="hooks on saved tensors change them"),
    ):
        pair.pm(pair.x, pair.y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_sparse_input_is_an_error(pair: Pair) -> None:
    with pytest.raises(sx.Error, match="no dense tensor") as raised:
        pair.pm(pair.x.to_sparse(), pair.y)
    assert "args.0.to_dense()" in str(raised.value.remedy)
    with pytest.raises(sx.Error, match="no dense tensor"):
        pair.pm(torch.nested.nested_tensor([*pair.x]), pair.y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
@pytest.mark.parametrize("what", ["pm", "a model around it", "a step"])
def test_what_is_compiled_around_a_parallel_module_calls_its_programs(pair: Pair, what: str) -> None:
    pm, twice = pair.pm, 1 if what == "pm" else 2

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pm

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * self.inner(x, y)

    wrapped = {"pm": pm, "a model around it": Around(), "a step": lambda x, y: 2 * pm(x, y)}[what]
    compiled = torch.compile(wrapped, backend="aot_eager")
    pair.check(compiled(pair.x, pair.y), twice * F.mse_loss(pair.model(pair.x), pair.y))
