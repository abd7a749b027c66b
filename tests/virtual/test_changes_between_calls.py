"""Changes between calls, of the model, the parallel module or what is around a call: each call gives eager's loss and
gradients, or is an error with a remedy."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.flop_counter import FlopCounterMode

import shardfx as sx

from .test_calls import batch, mlp, near, parallel, same_step

X, Y = batch()
SHARDING = {"args.0": "dp, -", "targets.0": "dp", "0.weight": "dp, -"}
CHANGES: dict[str, Callable[[Any], Any]] = {
    "append": lambda pm: pm.append(nn.Linear(4, 4)),
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


def test_what_cannot_be_copied_is_shared_and_what_holds_it_is_copied() -> None:
    class Counter:
        def __init__(self) -> None:
            self.lock, self.seen = threading.Lock(), [0]

    model = mlp()
    model.counter = Counter()  # type: ignore[assignment]
    with parallel(model).gathered() as made:
        assert made.counter.lock is model.counter.lock and made.counter.seen is not model.counter.seen


def test_extra_state_is_in_state_dicts() -> None:
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
def test_functional_transform_in_forward_is_refused() -> None:
    """And none is left behind, of which everything that follows would be a part."""
    with pytest.raises(sx.Error, match=r"(?s)that differentiates.*test_changes_between_calls.py:\d+.*create_graph"):
        parallel(Net(lambda x: x + torch.func.vmap(torch.func.grad(cubed))(x)).double())
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
def test_gradient_hook_or_backward_in_a_loss_is_refused(loss: Callable[..., Any], what: str) -> None:
    with pytest.raises(sx.Error, match=rf"(?s){what}.*test_changes_between_calls.py:\d+.*torch.autograd"):
        parallel(mlp().to("meta"), loss=loss)


def test_hooks_on_saved_tensors_have_no_effect() -> None:
    pm = parallel(mlp())
    with save_on_cpu():
        same_step(pm, mlp(), X, Y)


def test_a_sparse_input_is_an_error() -> None:
    with pytest.raises(sx.Error, match=r"(?s)no dense tensor.*args.0.to_dense\(\)"):
        parallel(mlp())(X.to_sparse(), Y)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which torch.compile looks at
def test_function_compiled_around_a_parallel_module_calls_its_programs() -> None:
    pm, model = parallel(mlp()), mlp()
    compiled = torch.compile(lambda x, y: 2 * pm(x, y), backend="aot_eager")
    ours, theirs = compiled(X, Y), 2 * F.cross_entropy(model(X), Y)
    ours.backward(), theirs.backward()
    assert near(ours, theirs)
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name], p.grad) for name, p in model.named_parameters())


# ---- changes back and forth: what was planned before is known


class Options:
    """An object of no known kind, whose class has something, too."""

    power = 1.0

    def __init__(self) -> None:
        self.by = [1.0]

    def scaled(self, x: Tensor) -> Tensor:
        return torch.relu(x * self.by[0]) ** self.power


SCALE, OPTIONS = {"by": 1.0}, Options()


def by_default(x: Tensor, by: list[float] = [1.0]) -> Tensor:  # noqa: B006
    return x * by[0]


class Reads(nn.Module):
    """Reads of what may change."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)
        self.norm, self.beta, self.deep, self.listed = nn.BatchNorm1d(8), 1.0, {"a": {"b": 1.0}}, [1.0] * 1000

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        h = self.act(self.norm(self.up(x))) * self.beta * self.deep["a"]["b"] * self.listed[-1] * SCALE["by"]
        return by_default(OPTIONS.scaled(self.down(h if shift is None else h + shift)))


def frozen(model: Any) -> None:
    model.up.weight.requires_grad_(not model.up.weight.requires_grad)


HOOKS: list[Any] = []


def toggle_hook(model: Any) -> None:
    if HOOKS:
        HOOKS.pop().remove()
    else:
        HOOKS.append(model.down.register_forward_hook(lambda module, args, out: out * 2))


def swapped(holder: Any, key: Any, one: Any, other: Any) -> None:
    holder[key] = other if holder[key] == one else one


OF_BOTH: dict[str, Callable[[Any], Any]] = {
    "an attribute": lambda m: setattr(m, "beta", 3.0 if m.beta == 1.0 else 1.0),
    "a nested dict": lambda m: swapped(m.deep["a"], "b", 1.0, 3.0),
    "a list": lambda m: swapped(m.listed, -1, 1.0, 3.0),
    "a mode": lambda m: m.norm.train(not m.norm.training),
    "all modes": lambda m: m.train(not m.training),
}
OF_MODEL: dict[str, Callable[[Any], Any]] = {
    "another module": lambda m: setattr(m, "act", nn.GELU() if isinstance(m.act, nn.ReLU) else nn.ReLU()),
    "a hook": toggle_hook,
}
OF_SCRIPT: dict[str, Callable[[], Any]] = {
    "a global": lambda: swapped(SCALE, "by", 1.0, 3.0),
    "an object": lambda: swapped(OPTIONS.by, 0, 1.0, 3.0),
    "a class": lambda: setattr(Options, "power", 3.0 - Options.power),
    "a default": lambda: swapped(by_default.__defaults__[0], 0, 1.0, 3.0),  # type: ignore[index]
}


def plan_of_reads() -> tuple[Reads, sx.ParallelModule, Reads]:
    torch.manual_seed(0)
    model = Reads().double()
    reference = copy.deepcopy(model)
    hints = sx.Hints(args=(X,), loss=F.cross_entropy, targets=(Y,), specs={"args.0": "dp, -"}, max_specializations=30)
    return model, sx.parallelize(model, sx.Mesh(dp=2), hints), reference


def reads_step(pm: sx.ParallelModule, reference: nn.Module, x: Tensor = X, **beside: Tensor) -> None:
    pm.zero_grad()
    reference.zero_grad()
    loss, expected = pm(x, Y[: len(x)], **beside), F.cross_entropy(reference(x, **beside), Y[: len(x)])
    assert near(loss, expected)
    loss.backward()
    expected.backward()
    wanted = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None and p.requires_grad}
    torch.testing.assert_close(pm.full_grads(), wanted)
    torch.testing.assert_close(pm.full_state_dict(), dict(reference.state_dict()))


@pytest.mark.long
@pytest.mark.parametrize("on", ["model", "pm"])
def test_changes_between_calls(on: str) -> None:
    model, pm, reference = plan_of_reads()
    reads_step(pm, reference)
    changed = model if on == "model" else pm
    for what, change in (OF_BOTH | (OF_MODEL if on == "model" else {})).items():
        known = []
        for _ in range(4):
            change(changed)
            change(reference)
            reads_step(pm, reference)
            known.append(len(pm._variants.known))
        assert known[1] == known[-1] and known[0] <= known[1], what
    for what, turn in OF_SCRIPT.items():
        known = []
        for _ in range(4):
            turn()
            reads_step(pm, reference)
            known.append(len(pm._variants.known))
        assert known[1] == known[-1], what


@pytest.mark.long
def test_changes_of_calls() -> None:
    """Another batch size, a further argument, a frozen weight, no gradients, autocast, and a mode that only looks."""
    _, pm, reference = plan_of_reads()
    for _ in range(2):
        reads_step(pm, reference)
        reads_step(pm, reference, X[:4])
        reads_step(pm, reference, shift=X)
        for each in (pm, reference):
            frozen(each)
        reads_step(pm, reference)
        for each in (pm, reference):
            frozen(each)
        with torch.no_grad():
            assert near(pm(X), reference(X))
        with FlopCounterMode(display=False):
            reads_step(pm, reference)
        torch._dynamo.reset()
        with torch.compiler.set_stance("force_eager"):
            reads_step(pm, reference)
        known = len(pm._variants.known)
    for around in (nullcontext(), torch.autocast("cpu", torch.bfloat16)):
        with around:
            torch.testing.assert_close(pm(X, Y), F.cross_entropy(reference(X), Y), rtol=1e-2, atol=1e-2)
    assert known <= len(pm._variants.known) == 4


def test_new_parameters_are_an_error() -> None:
    model, pm, _ = plan_of_reads()
    model.down = nn.Sequential(model.down, nn.Linear(4, 4).double())
    with pytest.raises(sx.Error, match=r"(?s)other parameters since it was parallelized.*down.0.weight"):
        pm(X, Y)
