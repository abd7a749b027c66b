"""State dicts that are not the model's: what, where, expected, got and the remedy; and nothing is loaded by halves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from tests.captures import captured_once

State = dict[str, Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(12, 8), nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 12, bias=False)
        self.head.weight = self.embed.weight
        self.bias = nn.Parameter(torch.zeros(12))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.embed(x))) + self.bias


@captured_once("test_state_errors")
def make(device: str = "cpu") -> sx.ParallelModule:
    torch.manual_seed(0)
    with torch.device(device):
        model = Net().eval()
    hints = sx.Hints((torch.arange(8) % 12,), specs={"args.0": "dp", "embed.weight": "tp, -"})
    return sx.parallelize(model, sx.Mesh(dp=2, tp=2), hints)


def lacks(state: State) -> None:
    del state["bias"]


def lacks_tied(state: State) -> None:
    del state["embed.weight"], state["head.weight"]


def has_more(state: State) -> None:
    state["head.bias"] = torch.zeros(12)


def is_a_shard(state: State) -> None:
    state["embed.weight"] = state["embed.weight"][:6]
    del state["head.weight"]


def is_half(state: State) -> None:
    state["norm.running_mean"] = state["norm.running_mean"].half()


def is_whole_numbers(state: State) -> None:
    state["bias"] = state["bias"].long()


def is_no_tensor(state: State) -> None:
    state["bias"] = [0.0] * 12  # type: ignore[assignment]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lacks, ["not that of the model", "missing: bias", "strict=False"]),
        (lacks_tied, ["missing: embed.weight"]),
        (has_more, ["unexpected: head.bias"]),
        (is_a_shard, ["'embed.weight' has the wrong shape", "(12, 8)", "(6, 8)", "full tensors"]),
        (is_half, ["'norm.running_mean' has the wrong dtype", "torch.float32", "torch.float16", "convert"]),
        (is_whole_numbers, ["'bias' has the wrong dtype", "torch.int64"]),
        (is_no_tensor, ["'bias' has the wrong shape", "list"]),
    ],
)
def test_a_state_dict_with_something_wrong(spoil: Callable[[State], None], words: list[str], device: str) -> None:
    state = make().full_state_dict()
    pm = make(device)
    before = pm.full_state_dict() if device == "cpu" else {}
    spoil(state)
    with pytest.raises(sx.Error) as caught:
        pm.load_full_state_dict({name: t + 1 if isinstance(t, Tensor) else t for name, t in state.items()})
    text = str(caught.value)
    assert all(word in text for word in [*words, "load_full_state_dict"]), text
    assert all(torch.equal(tensor, before[name]) for name, tensor in (pm.full_state_dict() if before else {}).items())


def test_strict_false_takes_what_there_is() -> None:
    pm = make()
    before = pm.full_state_dict()
    pm.load_full_state_dict({"bias": before["bias"] + 1, "unknown": torch.zeros(3)}, strict=False)
    after = pm.full_state_dict()
    assert torch.equal(after["bias"], before["bias"] + 1)
    assert torch.equal(after["embed.weight"], before["embed.weight"])
