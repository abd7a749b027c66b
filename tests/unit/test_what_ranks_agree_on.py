"""What real ranks compare: samples of tensors, what was done to parameters, plans as lines. (On ranks:
tests/torchrun/test_agreement.py.)"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.mesh import Mesh
from shardfx.runtime.distributed.agreement.acts import Acts, backward_of, watch_steps
from shardfx.runtime.distributed.agreement.samples import FEW, Sketch, sampled, some, tolerance_of
from shardfx.runtime.distributed.agreement.subjects import compared
from shardfx.runtime.distributed.groups import launched, the_cpu_group


@pytest.mark.parametrize("shape", [(), (3,), (100_000,), (3, 50_000), (40, 30, 20, 10), (0, 4)])
def test_a_sample_is_small_and_from_all_over(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    assert some(x, FEW).numel() <= max(FEW, 1)
    assert sampled([x]) == sampled([x.clone()])
    if x.numel():
        assert sampled([x]) != sampled([x + 1]) and sampled([x, x]) != sampled([x])
        assert Sketch.said(*Sketch.of(x).numbers()) == Sketch.of(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_sketches_are_alike_up_to_rounding(dtype: torch.dtype) -> None:
    x = torch.randn(300, 40).to(dtype)
    tolerance, eps = tolerance_of(dtype), torch.finfo(dtype).eps
    sketch = Sketch.of(x)
    assert sketch.is_like(Sketch.of(x * (1 + eps * torch.randn(300, 40).to(dtype))), tolerance)
    assert not sketch.is_like(Sketch.of(x * 1.5), tolerance)
    if dtype is not torch.bfloat16:  # one step of AdamW at another rate
        assert not sketch.is_like(Sketch.of(x * 50 + 0.05 * x.sign()), tolerance)
    nan = torch.full((3,), torch.nan)
    assert Sketch.of(nan).is_like(Sketch.of(nan), 0.1) and not Sketch.of(nan).is_like(sketch, 0.1)
    assert not Sketch.of(torch.ones(3) + 0j).is_like(Sketch.of(torch.ones(3) + 1j), tolerance)
    assert not Sketch.of(torch.tensor(3)).is_like(Sketch.of(torch.tensor(4)), tolerance_of(torch.int64))


class Stored:
    """Of whose parameters all are held by all ranks."""

    def __init__(self, model: nn.Module) -> None:
        self.acts, self._model, self.is_staged = Acts(), model, False

    def stepped_by_all(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self._model.named_parameters()}


def test_steps_of_optimizers_are_noted_with_their_rates() -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    stored = Stored(model)
    watch_steps(stored)
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
    optimizers = [torch.optim.SGD(groups, lr=0.1, nesterov=True, momentum=0.9), torch.optim.SGD(other.parameters())]
    for optimizer in optimizers:
        optimizer.step()
    rest = "momentum 0.9, dampening 0, weight_decay 0, nesterov True"
    assert str(stored.acts) == f"SGD stepped with lr 0.1, {rest}, and with lr 0.5, {rest}"
    grads: list[Tensor | None] = [None, model.weight]
    stored.acts.begin_anew("loaded")
    stored.acts.note(backward_of(torch.tensor(2.0), grads))
    assert str(stored.acts) == "loaded; a backward of 2.0 times the loss, added to gradients"
    for _ in range(200):
        stored.acts.note("x")
    assert str(stored.acts).endswith("; and 138 more")
    stored.acts.clear()
    stored.is_staged = True
    for _ in range(2):
        optimizers[0].step()
    assert str(stored.acts) == "an optimizer stepped"
    stored.acts.clear()
    assert str(stored.acts) == "nothing"


def test_plans_are_compared_without_where_they_come_from() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(4096.0)

    pm = sx.parallelize(Shifted(), Mesh(dp=2), sx.Hints((torch.zeros(4, 4096),)))
    lines = pm._compiled.subjects()
    assert list(lines) == ["mesh", "the model and its loss", "constants", "the optimizer", "the plan"]
    added = next(line for line in lines["the plan"] if "aten.add" in line)
    assert "test_what_ranks_agree_on.py" in added and "test_what" not in compared(added)


def test_a_process_without_a_job_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(sx.Error, match="no rank of a job any more"):
        the_cpu_group()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not launched(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launched(1) and "WORLD_SIZE is set and RANK is not" in caplog.text
    monkeypatch.setenv("RANK", "0")
    assert launched(1)
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    x = torch.zeros(4, 2)
    with pytest.raises(sx.Error, match=r"cannot join the job(.|\n)*RANK=0, WORLD_SIZE=2, MASTER_ADDR=,"):
        sx.parallelize(nn.Linear(2, 2), Mesh(dp=2), sx.Hints((x,)))
