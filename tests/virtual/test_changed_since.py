"""What scripts do around calls, or change after parallelize: it counts, or is an error with a remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.nn.utils import parametrizations, prune

import shardfx as sx

from .test_calls import batch, mlp, near, parallel, same_step

X, Y = batch()
SHARDING = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "dp, -"}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda pm: pm.append(nn.Linear(4, 4)),
    "a buffer": lambda pm: pm.register_buffer("seen", torch.zeros(())),
    "a parameter of a module": lambda pm: pm[0].register_parameter("scale", nn.Parameter(torch.ones(()))),
}


@pytest.mark.parametrize("what", CHANGES)
def test_other_modules_in_a_parallel_module_are_an_error(what: str) -> None:
    pm = parallel(mlp())

    def changed() -> None:
        CHANGES[what](pm)
        pm(X, Y)

    with pytest.raises(sx.Error, match=r"(?s)modules of a parallel module.*parallelize it again"):
        changed()


@pytest.mark.parametrize(
    "change",
    [
        lambda part: parametrizations.spectral_norm(part),
        lambda part: prune.l1_unstructured(part, "weight", 0.5),
        lambda part: nn.init.zeros_(part.weight),
        lambda part: getattr(part, "weight", None),
    ],
)
def test_sharded_weight_is_not_missing(change: Callable[[Any], Any]) -> None:
    with pytest.raises(sx.Error, match=r"(?s)'weight' is in 2 shards.*@0.weight, @1.weight"):
        change(parallel(mlp(), specs=SHARDING)[0])


@pytest.mark.long
def test_attributes_of_parameters_are_copied() -> None:
    """Scripts group parameters by what they wrote on them, and code may read it, also of another specialization."""

    class Marked(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * getattr(self[0].weight, "scale", 1.0)

    model = Marked(nn.Linear(8, 16), nn.Linear(16, 4)).double()
    model[0].weight.scale = 2.0  # type: ignore[assignment]
    for specs in ({}, {"0.weight": "dp, -"}):
        pm = parallel(model, specs=SHARDING | specs)
        marked = [name for name, p in pm.named_parameters() if getattr(p, "scale", 1.0) == 2.0]
        assert marked and all(name.endswith("weight") and name.startswith("0.") for name in marked)
    for rows in (8, 6):
        assert near(pm(X[:rows], Y[:rows]), F.cross_entropy(model(X[:rows]), Y[:rows]))


def test_what_a_state_dict_has_beside() -> None:
    class Says(nn.Linear):
        def get_extra_state(self) -> object:
            return {"version": 2}

        def set_extra_state(self, state: object) -> None:
            assert state == {"version": 2}

    model = nn.Sequential(Says(8, 4)).double()
    pm = parallel(model, specs=SHARDING)
    state = pm.full_state_dict()
    assert set(state) == set(model.state_dict()) and state["0._extra_state"] == {"version": 2}
    pm.load_full_state_dict(model.state_dict()), model.load_state_dict(state)
    pm.load_state_dict(pm.state_dict())


@pytest.mark.long
def test_specialization_that_cannot_be_planned_names_the_input() -> None:
    pm = parallel(mlp())
    for x, y, said in (
        (X[:, :7], Y, r"args\.0 is \(8, 7\) float64, not \(8, 8\)"),
        (X, Y[:5], r"targets\.0 is \(5,\) int64"),
        (X.float(), Y, r"args\.0 is \(8, 8\) float32"),
    ):
        with pytest.raises(sx.Error, match=said):
            pm(x, y)
    assert near(pm(X, Y), pm(X, Y))


@pytest.mark.long
def test_used_programs_are_for_the_captured_specialization() -> None:
    pm = parallel(mlp())
    pm.use({0: pm.rank_module(0)})
    pm(X, Y)
    for call in (lambda: pm(X[:6], Y[:6]), lambda: pm(X)):
        with pytest.warns(sx.ShardfxWarning, match=r"pm.use.*runs as planned"), torch.no_grad():
            call()


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def cubed(x: torch.Tensor) -> torch.Tensor:
    return (x**3).sum()


@pytest.mark.long
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.func.grad(cubed)(x),
        lambda x: torch.func.jvp(torch.sin, (x,), (x,))[1],
        lambda x: x + torch.func.vmap(torch.func.grad(cubed))(x),
    ],
)
def test_functional_transform_is_named(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """And none is left behind, of which everything that follows would be a part."""
    with pytest.raises(sx.Error, match=r"(?s)transform that differentiates.*test_changed_since.py:\d+.*create_graph"):
        parallel(Net(function).double())
    model = Net(lambda x: x * torch.autograd.grad(cubed(x), x, create_graph=True)[0]).double()
    same_step(parallel(copy.deepcopy(model)), model, X, Y)


def hooked(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    out.register_hook(lambda grad: grad * 2)
    return F.cross_entropy(out, y)


def backwards(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(out, y)
    loss.backward(retain_graph=True)
    return loss


@pytest.mark.parametrize(("loss", "what"), [(hooked, "hook on the gradient"), (backwards, r"backward\(\) within")])
def test_what_watches_gradients_or_makes_them_in_a_loss_is_named(loss: Callable[..., Any], what: str) -> None:
    with pytest.raises(sx.Error, match=rf"(?s){what}.*test_changed_since.py:\d+.*torch.autograd"):
        parallel(mlp().to("meta"), loss=loss)


def test_children_and_attributes_of_our_own_names() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._tree, self._watch, self._optimizer = nn.Linear(8, 4), 1.0, 2.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self._modules["_tree"](x) * self._watch * self._optimizer

    model = Own().double()
    pm = parallel(copy.deepcopy(model))
    with pm.debug_nan():
        same_step(pm, model, X, Y)


KEEPS: dict[str, Callable[[], saved_tensors_hooks]] = {
    "save_on_cpu": save_on_cpu,
    "nothing": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
}


@pytest.mark.parametrize("keeps", KEEPS)
def test_hooks_that_keep_saved_tensors_change_nothing(keeps: str) -> None:
    pm = parallel(mlp())
    with KEEPS[keeps]():
        same_step(pm, mlp(), X, Y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def test_hooks_that_change_saved_tensors_are_an_error(dtype: torch.dtype) -> None:
    """Kept in fewer bits, as some do to save memory: gradients would be others on one device."""
    pm = parallel(mlp())
    with (
        saved_tensors_hooks(lambda t: (t.dtype, t.to(dtype)), lambda kept: kept[1].to(kept[0])),
        pytest.raises(sx.Error, match="hooks on saved tensors change them"),
    ):
        pm(X, Y)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_sparse_input_is_an_error() -> None:
    pm = parallel(mlp())
    with pytest.raises(sx.Error, match=r"(?s)no dense tensor.*args.0.to_dense\(\)"):
        pm(X.to_sparse(), Y)
    with pytest.raises(sx.Error, match="no dense tensor"):
        pm(torch.nested.nested_tensor([*X]), Y)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
@pytest.mark.parametrize("what", ["pm", "a model around it", "a step"])
def test_what_is_compiled_around_a_parallel_module_calls_its_programs(what: str) -> None:
    pm, model, twice = parallel(mlp()), mlp(), 1 if what == "pm" else 2

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = pm

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return 2 * self.inner(x, y)

    wrapped = {"pm": pm, "a model around it": Around(), "a step": lambda x, y: 2 * pm(x, y)}[what]
    ours, theirs = torch.compile(wrapped, backend="aot_eager")(X, Y), twice * F.cross_entropy(model(X), Y)
    ours.backward(), theirs.backward()
    assert near(ours, theirs)
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name], p.grad) for name, p in model.named_parameters())
