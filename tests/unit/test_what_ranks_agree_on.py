"""What real ranks compare: histories of parameters, and plans as lines. (On ranks:
tests/torchrun/test_agreement.py.)"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.mesh import Mesh
from shardfx.runtime.distributed import peers
from shardfx.runtime.distributed.groups import launched, the_cpu_group


class Stored:
    """A store of parameters of which all ranks hold a shard."""

    def __init__(self, model: nn.Module) -> None:
        self.history, self.is_staged, self.all_train = Counter[str](), False, True
        self.parameters = {name: [parameter] for name, parameter in model.named_parameters()}


def test_steps_of_optimizers_are_noted_with_their_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    stored = Stored(model)
    monkeypatch.setattr(peers, "_stores", [stored])
    groups = [{"params": [model.weight]}, {"params": [model.bias], "lr": torch.tensor(0.5)}]
    optimizers = [torch.optim.SGD(groups, lr=0.1, nesterov=True, momentum=0.9), torch.optim.SGD(other.parameters())]
    for optimizer in (*optimizers, optimizers[0]):
        peers._note_step(optimizer)
    rest = "momentum 0.9, dampening 0, weight_decay 0, nesterov True"
    assert stored.history == {f"SGD stepped with lr 0.1, {rest}, and with lr 0.5, {rest}": 2}
    stored.history.clear()
    stored.is_staged = True
    for _ in range(2):
        peers._note_step(optimizers[0])
    assert stored.history == {"an optimizer stepped": 1}


def test_plans_are_compared_without_where_they_come_from() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.arange(4096.0)

    pm = sx.parallelize(Shifted(), Mesh(dp=2), sx.Hints((torch.zeros(4, 4096),)))
    lines = pm._compiled.subjects()
    assert list(lines) == ["mesh", "the model and its loss", "constants", "the optimizer", "the plan"]
    added = next(line for line in lines["the plan"] if "aten.add" in line)
    assert "test_what_ranks_agree_on.py" in added and "test_what" not in peers._compared(added)


def test_a_process_without_a_job_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(sx.Error, match="no rank of a job any more"):
        the_cpu_group()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not launched(1)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not launched(1)
    monkeypatch.setenv("RANK", "0")
    assert launched(1)
