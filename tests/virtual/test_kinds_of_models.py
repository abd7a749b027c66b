"""A model may be a module, an ``fx.GraphModule`` or an ``ExportedProgram``, on any device; ``sx.api.trace`` shows
it."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import shardfx as sx
from tests.reference import check_step


class Mixer(nn.Module):
    """A little of everything: a keyword, a dict as result, attention, a factory op, a buffer that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.drop = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor, *, scale: Tensor | None = None) -> dict[str, Tensor]:
        self.calls.add_(1)
        h = self.lift(x) + torch.arange(8, device=x.device)
        h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        return {"out": self.drop(h if scale is None else h * scale)}


def loss(out: dict[str, Tensor]) -> Tensor:
    return (out["out"] ** 2).mean()


SPECS = {"args.0": "dp, -, -", "lift.weight": "tp, -", "drop.weight": "-, tp"}
X, SCALE = torch.randn(4, 6, 8), torch.randn(4, 6, 1)


def exported(model: nn.Module) -> torch.export.ExportedProgram:
    return torch.export.export(model, (X,), {"scale": SCALE})


def module_of(model: nn.Module) -> nn.Module:
    return exported(model).module()


@pytest.mark.long
@pytest.mark.parametrize("kind", [exported, module_of])
def test_exported_model_trains_as_one_device_does(kind: object) -> None:
    torch.manual_seed(0)
    model = Mixer()
    alone = deepcopy(model)
    given = kind(model)  # type: ignore[operator]
    hints = sx.Hints(args=(X,), kwargs={"scale": SCALE}, loss=loss, specs=SPECS)
    pm = sx.parallelize(given, sx.Mesh(dp=2, tp=2), hints)
    check_step(pm, alone, loss, (X,), kwargs={"scale": SCALE}, bound=1e-5)
    assert pm.full_state_dict()["calls"] == 1


@pytest.mark.long
def test_an_exported_program_is_the_same_in_both_modes() -> None:
    pm = sx.parallelize(exported(Mixer()), sx.Mesh(dp=2), sx.Hints(args=(X,), kwargs={"scale": SCALE}, loss=loss))
    trained = pm(X, scale=SCALE)
    pm.eval()
    assert torch.equal(pm(X, scale=SCALE), trained)


@pytest.mark.long
@pytest.mark.parametrize("device", ["meta", "cuda"])
def test_the_graph_names_no_device(device: str) -> None:
    """Planned on fake tensors of a device that need not be there."""
    hints = sx.Hints(args=(X,), loss=loss, specs=SPECS)
    plain = str(sx.api.trace(Mixer(), hints))
    model = Mixer()
    with FakeTensorMode():
        there = {id(p): nn.Parameter(torch.empty(p.shape, device=device)) for p in model.parameters()}
        there |= {id(b): torch.empty(b.shape, device=device) for b in model.buffers()}
        model, x = deepcopy(model, there), torch.empty(X.shape, device=device)
    text = str(sx.api.trace(model, sx.Hints(args=(x,), loss=loss, specs=SPECS)))
    assert text == plain
    assert "device" not in text


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (fx.symbolic_trace(nn.ReLU()).graph, ["this is no model", "got:      Graph", "fx.GraphModule(root, graph)"]),
        (Mixer, ["this is no model", "make one: Mixer(...)"]),
        (torch.relu, ["this is no model", "wrap it in an nn.Module"]),
        (3, ["this is no model", "got:      int"]),
    ],
)
def test_what_is_no_model(model: object, words: list[str]) -> None:
    for call in (
        lambda: sx.api.trace(model, sx.Hints(args=(X,))),  # type: ignore[arg-type]
        lambda: sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(X,))),  # type: ignore[arg-type]
    ):
        with pytest.raises(sx.Error) as caught:
            call()
        assert all(word in str(caught.value) for word in words), caught.value


def test_a_program_of_dynamic_shapes_is_refused() -> None:
    dynamic = {"x": {0: torch.export.Dim("batch", min=2, max=8)}}
    program = torch.export.export(nn.Linear(8, 8), (X[0],), dynamic_shapes={"input": dynamic["x"]})
    with pytest.raises(sx.Error, match="this ExportedProgram has dynamic shapes"):
        sx.api.trace(program, sx.Hints(args=(X[0],)))


class Recurrent(nn.Module):
    """Two layers over steps of time, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(6, 8, num_layers=2, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(x)[0])


@pytest.mark.long
def test_lstm_is_captured_without_onednn() -> None:
    """In float32 oneDNN has an LSTM of its own, whose backward takes what no other device has."""
    torch.manual_seed(0)
    model, x = Recurrent(), torch.randn(8, 5, 6)
    alone = deepcopy(model)
    hints = sx.Hints(args=(x,), loss=lambda out: out.square().mean(), specs={"args.0": "dp, -, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints)
    check_step(pm, alone, lambda out: out.square().mean(), (x,), bound=1e-5)
