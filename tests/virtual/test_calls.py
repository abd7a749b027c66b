"""Calls and habits: each does what eager PyTorch does, or is an error with a remedy; none is passed over."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx

F64 = torch.float64
SPECS = {"args.0": "dp, -", "targets.0": "dp"}
TP = {"0.weight": "tp, -"}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 8, dtype=F64), torch.randint(0, 4, (8,))


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).double()


def parallel(model: nn.Module, mesh: sx.Mesh | None = None, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    given = {"args": (x,), "loss": F.cross_entropy, "targets": (y,), "specs": SPECS} | hints
    return sx.parallelize(model, mesh or sx.Mesh(dp=2), sx.Hints(**given))


def near(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours.detach(), theirs.detach(), rtol=0, atol=1e-12)


def same_step(pm: sx.ParallelModule, alone: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """Loss and gradients of a step."""
    pm.zero_grad(), alone.zero_grad()
    ours, theirs = pm(x, y), F.cross_entropy(alone(x), y)
    ours.backward(), theirs.backward()
    assert near(ours, theirs)
    grads = pm.full_grads()
    assert all(near(grads[name], p.grad) for name, p in alone.named_parameters() if p.grad is not None)
    assert set(grads) == {name for name, p in alone.named_parameters() if p.grad is not None}


# ---- another form of call -----------------------------------------------------------------------------------


def test_batches_of_other_sizes(caplog: pytest.LogCaptureFixture) -> None:
    """The last batch of an epoch is planned when it comes, once, and one line of the log says so."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)).double()
    alone = copy.deepcopy(model)
    pm = parallel(model, shapes=2)
    with caplog.at_level(logging.WARNING, "shardfx"):
        for rows in (8, 3, 8, 3):
            same_step(pm, alone, x[:rows], y[:rows])
    assert len(caplog.records) == 1 and "args.0 is (3, 8) float64, not (8, 8)" in caplog.text
    state = pm.full_state_dict()
    assert all(near(state[name], tensor) for name, tensor in alone.state_dict().items())
    for rows in (5, 6, 7):
        same_step(pm, alone, x[:rows], y[:rows])
    assert len(pm._variants.known) == 3
    assert pm.eval()(x[:2]).shape == (2, 4) and near(pm(x[:2]), alone.eval()(x[:2]))


class Scaled(nn.Module):
    """Branches on arguments that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.linear(x) * scale
        return y if mask is None else y * mask


def test_arguments_that_are_no_tensors() -> None:
    x, y = batch()
    model = Scaled().double()
    pm = parallel(model, kwargs={"scale": 2.0, "mask": None})
    mask = torch.rand(4, dtype=F64)
    for scale, given in ((2.0, None), (3.0, None), (3.0, mask)):
        assert near(pm(x, y, scale=scale, mask=given), F.cross_entropy(model(x, scale, given), y))
    with pytest.raises(sx.Error, match="not those that the model was captured with"):
        pm(x, y, scale=2.0)


def test_modes_of_modules() -> None:
    """Each module has its own mode, as the model has: frozen statistics stay frozen."""
    x, y = batch()
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).double()
    model[1].eval(), model[2].eval()
    alone = copy.deepcopy(model)
    pm = parallel(model)
    same_step(pm, alone, x, y)
    pm.train(), alone.train()
    pm.get_submodule("2").eval(), alone[2].eval()
    same_step(pm, alone, x, y)
    assert near(pm.full_state_dict()["1.running_mean"], alone[1].running_mean)


def test_what_wants_a_gradient() -> None:
    """Inputs too; parameters may be frozen and unfrozen."""
    x, y = batch()
    model = mlp()
    model[0].weight.requires_grad_(False)
    pm, alone = parallel(model), copy.deepcopy(model)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    same_step(pm, alone, x, y)
    pm(ours * 2, y).backward(), F.cross_entropy(alone(theirs * 2), y).backward()
    assert ours.grad is not None and theirs.grad is not None and near(ours.grad, theirs.grad)
    pm.get_submodule("0").weight.requires_grad_(True), alone[0].weight.requires_grad_(True)  # type: ignore[union-attr]
    pm.get_submodule("2").bias.requires_grad_(False), alone[2].bias.requires_grad_(False)  # type: ignore[union-attr]
    alone.zero_grad(), pm.zero_grad()
    same_step(pm, alone, x, y)


def test_autocast_around_a_call() -> None:
    """Casts are captured, and programs run without casts of their own."""
    x, y = batch()
    x, model = x.float(), mlp().float()
    pm, alone = parallel(model, args=(x,)), copy.deepcopy(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = pm(x, y), F.cross_entropy(alone(x), y)
    ours.backward(), theirs.backward()
    assert ours.dtype == theirs.dtype and near(ours, theirs)
    assert torch.allclose(pm(x, y), F.cross_entropy(alone(x), y), rtol=1e-6)
    grads = pm.full_grads()
    for name, p in alone.named_parameters():
        assert p.grad is not None and torch.allclose(grads[name], p.grad, rtol=0.02, atol=2e-3)


# ---- inputs are bound by position ---------------------------------------------------------------------------


class Holds(nn.Module):
    """Multiplies with a buffer and a parameter of the input's shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.linear = nn.Parameter(batch()[0].clone()), nn.Linear(8, 4)
        self.register_buffer("held", batch()[0].clone())

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.linear(a * b.cos() * self.weight * self.held)


@pytest.mark.parametrize("which", ["twice", "buffer", "parameter"])
def test_examples_that_are_something_else_too(which: str) -> None:
    x, y = batch()
    model = Holds().double()
    example = {"twice": x, "buffer": model.held, "parameter": model.weight}[which]
    pm = parallel(model, args=(x, example))
    other = torch.randn_like(x)
    assert near(pm(x, other, y), F.cross_entropy(model(x, other), y))
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_a_target_that_is_an_input() -> None:
    x, _ = batch()
    model = nn.Sequential(nn.Linear(8, 8)).double()
    pm = parallel(model, targets=(x,), loss=F.mse_loss, specs={"args.0": "dp, -"})
    other = torch.randn_like(x)
    assert near(pm(x, other), F.mse_loss(model(x), other))


def test_one_module_used_many_times() -> None:
    x, y = batch()
    model = nn.Sequential(*([nn.Linear(8, 8)] * 8), nn.Linear(8, 4)).double()
    alone = copy.deepcopy(model)
    same_step(parallel(model), alone, x, y)
    assert near(model(x), alone(x)) and len(list(model.parameters())) == 4


# ---- wherever it is called ----------------------------------------------------------------------------------


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode])
def test_a_training_step_is_planned_wherever_parallelize_is_called(around: Callable[[], Any]) -> None:
    model = mlp()
    with around():
        pm = parallel(model)
    same_step(pm, copy.deepcopy(model), *batch())


def test_a_copy_is_its_own() -> None:
    x, y = batch()
    pm = parallel(mlp())
    made = copy.deepcopy(pm)
    before = pm(x, y).detach()
    made(x, y).backward()
    torch.optim.SGD(made.parameters(), lr=1.0).step()
    assert near(pm(x, y), before) and not near(made(x, y), before)
    assert copy.deepcopy(pm.rank_module(0)).code == pm.rank_module(0).code


def test_hooks_of_pm_are_called() -> None:
    x, y = batch()
    pm, seen = parallel(mlp()), list[str]()
    parameter = next(pm.parameters())
    parameter.register_hook(lambda grad: seen.append("parameter"))  # type: ignore[no-untyped-call]
    parameter.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    pm.register_forward_hook(lambda *_: seen.append("module"))
    pm(x, y).backward()
    assert seen == ["module", "parameter", "accumulated"]


def test_a_forward_hook_that_computes_is_captured() -> None:
    x, y = batch()
    model = mlp()
    model[0].register_forward_hook(lambda module, given, out: out * 2)
    assert near(parallel(model)(x, y), F.cross_entropy(model(x), y))


# ---- what is refused ----------------------------------------------------------------------------------------


def with_hook(register: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = mlp()
    register(model)
    return model


class Plain(nn.Module):
    """Has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scales = nn.Linear(8, 4), [torch.ones(4, dtype=F64)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.scales[0]


class Branches(nn.Module):
    """Asks what its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return self.linear(x)
        return -self.linear(x)


WEIGHT = torch.rand(4, dtype=F64)


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "hints", "what"),
    [
        (lambda: with_hook(lambda m: m[0].weight.register_hook(lambda g: g)), {}, "a hook would never be called"),
        (lambda: with_hook(lambda m: m[0].register_full_backward_hook(lambda *_: None)), {}, "a backward hook"),
        (lambda: with_hook(lambda m: m[0].register_forward_hook(lambda *_: print())), {}, "only looks"),
        (lambda: torch.jit.script(mlp()), {}, "a ScriptModule cannot be captured"),  # type: ignore[no-untyped-call]
        (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 4))).double(), {}, "computed outside of forward"),
        (lambda: Plain().double(), {}, "no input, parameter or buffer(.|\n)*scales(.|\n)*register_buffer"),
        (mlp, {"loss": lambda o, y: F.cross_entropy(o, y, WEIGHT)}, "WEIGHT of the loss(.|\n)*as a target"),
        (mlp, {"loss": nn.CrossEntropyLoss(weight=WEIGHT)}, "the loss has tensors of its own"),
        (lambda: Branches().double(), {}, "depend on the data(.|\n)*test_calls.py"),
        (mlp, {"strict": "yes"}, "strict=(.|\n)*True or False"),
        (mlp, {"fuse_mb": -1}, "megabytes"),
        (mlp, {"device": "gpus"}, "name of a device"),
        (mlp, {"rank_passes": "waits"}, "list of rank passes"),
        (mlp, {"shapes": 0}, "at least 1"),
        (mlp, {"loss": 3}, "a function loss"),
    ],
)
def test_what_cannot_be_planned(make: Callable[[], nn.Module], hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error, match=what):
        parallel(make(), **hints)


def test_things_of_another_kind() -> None:
    for given in ((3, sx.Mesh(dp=2), sx.Hints()), (mlp(), 3, sx.Hints()), (mlp(), sx.Mesh(dp=2), 3)):
        with pytest.raises(sx.Error, match=r"(3|int)"):
            sx.parallelize(*given)  # type: ignore[arg-type]


def test_what_cannot_be_done_to_a_parallel_module() -> None:
    x, y = batch()
    pm = parallel(mlp())
    part = pm.get_submodule("0")
    for wrong, what in (
        (lambda: pm.apply(nn.init.zeros_), "initialise the model before"),
        (lambda: part.apply(nn.init.zeros_), "initialise the model before"),
        (lambda: part.register_forward_hook(lambda *_: None), "never be called"),
        (lambda: setattr(pm, "0", nn.Linear(8, 8)), "cannot be replaced"),
        (lambda: setattr(part, "weight", nn.Parameter(x)), "parallelize it again"),
        (lambda: part(x), "called on its own"),
        (lambda: torch.func.functional_call(pm, {"0.weight": torch.zeros(16, 8, dtype=F64)}, (x, y)), "was replaced"),
        (lambda: torch.save(pm, "nowhere.pt"), "full_state_dict"),
    ):
        with pytest.raises(sx.Error, match=what):
            wrong()
    assert near(pm(x, y), F.cross_entropy(mlp()(x), y))


@dataclasses.dataclass
class Output:
    """A result that torch does not look into."""

    logits: torch.Tensor


def test_results_of_no_known_class() -> None:
    x, y = batch()
    model = mlp()
    model.register_forward_hook(lambda module, given, out: Output(out))
    pm = parallel(model, loss=lambda out, y: F.cross_entropy(out.logits, y))
    assert near(pm(x, y), F.cross_entropy(mlp()(x), y))
    with pytest.raises(sx.Error, match="register_dataclass"):
        pm(x)
    with pytest.raises(sx.Error, match="register_dataclass"):
        parallel(model, loss=None, targets=(), specs={})


def test_indices_out_of_range_of_a_cut_table() -> None:
    """Where no rank has the row, the sum over the ranks would be zero."""
    words = nn.Sequential(nn.Embedding(8, 6), nn.Flatten(), nn.Linear(18, 4)).double()
    tokens, labels = torch.randint(0, 8, (8, 3)), torch.randint(0, 4, (8,))
    pm = parallel(words, sx.Mesh(tp=2), args=(tokens,), targets=(labels,), specs=TP | {"2.weight": "tp, -"})
    labels[2] = -100
    same_step(pm, copy.deepcopy(words), tokens, labels)
    for given, target, what in ((8, 0, "index 8 .* 0 .. 7"), (-1, 0, "index -1"), (0, 4, "index 4 .* 0 .. 3")):
        wrong, label = tokens.clone(), labels.clone()
        wrong[1, 1], label[1] = given, target
        with pytest.raises(sx.Error, match=what):
            pm(wrong, label)


def test_optimizers_that_look_at_whole_tensors() -> None:
    x, y = batch()
    pm = parallel(mlp(), sx.Mesh(tp=2), specs=TP)
    pm(x, y).backward()
    for kind in (torch.optim.Adafactor, torch.optim.AdamW, torch.optim.SGD):
        optimizer = kind(pm.parameters(), lr=1e-3)
        if kind is torch.optim.Adafactor:
            with pytest.raises(sx.Error, match=r"Adafactor looks at whole tensors, and '0.weight' is in pieces"):
                optimizer.step()
        else:
            optimizer.step()
