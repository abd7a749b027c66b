"""``pm.optimizer``: groups and schedules, states that are saved and loaded; what may change in it, and what may not."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import shardfx as sx
from tests.plans import MESHES
from tests.stepped import KINDS, alone, batches, refused, small_model, small_plan

DP2 = MESHES["dp2"]


def grouped(params: Any) -> torch.optim.Optimizer:
    """Matrices decay, the rest does not; by name on a parallel module, by position elsewhere."""
    decay = [p for p in params if p.ndim > 1]
    named = getattr(params, "named", None)
    rest = [p for name, p in named.items() if name.endswith("bias")] if named else [p for p in params if p.ndim == 1]
    return torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 2e-2}], lr=1e-2
    )


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Any] = torch.load(file)
    return loaded


@pytest.mark.long
@pytest.mark.parametrize("kind", ["Adafactor", "two"])
def test_training_goes_on_from_states_that_were_saved(kind: str) -> None:
    """On the same plan by shards; on another one by whole states."""
    losses, params, _ = alone(KINDS[kind], 4)
    first = small_plan(KINDS[kind], DP2, zero=3)
    for x, y in batches(2):
        first.step(x, y)
    same, other = small_plan(KINDS[kind], DP2, zero=3), small_plan(KINDS[kind], MESHES["dp2tp2"], zero=1)
    for pm in (same, other):
        pm.load_full_state_dict(first.full_state_dict())
    same.optimizer.load_state_dict(through_a_file(first.optimizer.state_dict()))
    other.optimizer.load_full_state_dict(through_a_file(first.optimizer.full_state_dict()))
    for pm in (first, same, other):
        for (x, y), loss in list(zip(batches(4), losses, strict=True))[2:]:
            assert float(pm.step(x, y)) == pytest.approx(loss, abs=1e-10)
        assert all(torch.allclose(pm.full_state_dict()[name], value, atol=1e-10) for name, value in params.items())


@pytest.mark.long
def test_states_move_as_those_of_torchs_own_optimizers_do() -> None:
    """``pm.full_optimizer_state_dict(pm.optimizer)`` has parameters by number, and torch's own states are loaded."""
    (theirs,) = alone(grouped, 2)[2]
    first, other = small_plan(grouped, DP2, zero=3), small_plan(grouped, MESHES["dp2tp2"], zero=1)
    for x, y in batches(2):
        first.step(x, y)
    mine = through_a_file(first.full_optimizer_state_dict(first.optimizer))
    wanted = theirs.state_dict()
    assert [group["params"] for group in mine["param_groups"]] == [group["params"] for group in wanted["param_groups"]]
    assert mine["state"].keys() == wanted["state"].keys() and mine["state"]
    for number, states in wanted["state"].items():
        assert all(torch.allclose(mine["state"][number][key], value, atol=1e-12) for key, value in states.items())
    for states in (mine, wanted):
        other.load_full_state_dict(first.full_state_dict())
        other.load_full_optimizer_state_dict(other.optimizer, states)
        again = other.full_optimizer_state_dict(other.optimizer)["state"]
        assert all(torch.allclose(again[0][key], value, atol=1e-12) for key, value in mine["state"][0].items())
    x, y = batches(3)[2]
    assert float(first.step(x, y)) == pytest.approx(float(other.step(x, y)), abs=1e-10)
    refused("of another optimizer", lambda: other.load_full_optimizer_state_dict(other.optimizer, dropped(wanted)))
    refused("no optimizer of this module", lambda: first.full_optimizer_state_dict(other.optimizer))
    refused("no optimizer of this module", lambda: first.full_optimizer_state_dict(None))  # type: ignore[arg-type]


def dropped(states: dict[str, Any]) -> dict[str, Any]:
    """A state dict without its last group."""
    return {**states, "param_groups": states["param_groups"][:-1]}


# ---- what is refused ---------------------------------------------------------------------------------------


class Decides(torch.optim.SGD):
    """Looks into a tensor, and goes on accordingly."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad.norm() > 1:
                p.sub_(p.grad)


class Draws(torch.optim.SGD):
    """Adds noise."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(0.1 * p.grad + 0.01 * torch.randn_like(p))


@pytest.mark.parametrize(
    ("what", "factory"),
    [
        ("is no optimizer", lambda ps: ps),
        ("calls the model again", lambda ps: torch.optim.LBFGS(ps)),
        ("cannot be traced", lambda ps: torch.optim.SparseAdam(ps)),
        ("of one parameter alone", lambda ps: Draws(ps, lr=0.1)),
        ("has two optimizers", lambda ps: [torch.optim.SGD(ps), torch.optim.AdamW(ps)]),
        ("was not given", lambda ps: torch.optim.SGD(small_model().parameters())),
        ("made otherwise of small parameters", lambda ps: torch.optim.SGD([p for p in ps if p.numel() > 40])),
    ],
)
def test_what_cannot_be_a_part_of_the_program(what: str, factory: Callable[[Iterable[Any]], Any]) -> None:
    error = refused(what, lambda: small_plan(factory, DP2))
    assert error.remedy is not None and "optimizer=" in str(error)


def test_the_line_of_the_optimizer_is_named() -> None:
    error = refused("cannot be traced", lambda: small_plan(lambda ps: Decides(ps, lr=0.1), DP2))
    line = next(i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "p.grad.norm() > 1" in text)
    assert f"test_program_optimizer.py:{line}" in str(error.where)


@pytest.mark.long
def test_another_step_beside_the_program_is_refused() -> None:
    pm = small_plan(KINDS["AdamW"], DP2)
    x, y = batches(1)[0]
    pm(x, y).backward()
    refused("is a part of the program", lambda: pm.optimizer.step())
    refused("have an optimizer in the program", torch.optim.SGD(pm.parameters(), lr=0.1).step)
    refused("a step needs a loss", lambda: pm.step(x))
    hook = next(pm.parameters()).register_post_accumulate_grad_hook(lambda each: None)
    refused("has a hook on its gradient", lambda: pm.step(x, y))
    hook.remove()
    pm.step(x, y)
    plain = small_plan(None, DP2)
    refused("no optimizer in this plan", lambda: plain.step(x, y))
    refused("no optimizer in this plan", lambda: plain.optimizer)


@pytest.mark.long
def test_a_copy_steps_on_its_own() -> None:
    pm = small_plan(KINDS["AdamW"], DP2)
    x, y = batches(1)[0]
    pm.step(x, y)
    other, before = copy.deepcopy(pm), pm.full_state_dict()
    other.step(x, y)
    assert all(torch.equal(value, before[name]) for name, value in pm.full_state_dict().items())
    pm.step(x, y)
    assert all(torch.equal(value, other.full_state_dict()[name]) for name, value in pm.full_state_dict().items())
    refused("have an optimizer in the program", torch.optim.SGD(other.parameters(), lr=0.1).step)


@pytest.mark.long
def test_states_of_another_plan_or_optimizer_are_refused() -> None:
    pm, other, plan = (small_plan(KINDS[k], DP2, zero=z) for k, z in (("AdamW", 1), ("SGD", 1), ("AdamW", 0)))
    for theirs in (other, plan):
        refused("of another optimizer", lambda t=theirs: pm.optimizer.load_state_dict(t.optimizer.state_dict()))
    refused("of another optimizer", lambda: pm.optimizer.load_full_state_dict(other.optimizer.full_state_dict()))
    full = plan.optimizer.full_state_dict()
    full["state"][1]["step"] = torch.tensor(7.0)
    refused("differs from that of other parameters", lambda: pm.optimizer.load_full_state_dict(full))
    for wrong, what in ((torch.zeros(4), "wrong shape"), (torch.zeros(8).long(), "wrong kind of numbers")):
        full = plan.optimizer.full_state_dict()
        full["state"][1]["exp_avg"] = wrong
        refused(what, lambda full=full: pm.optimizer.load_full_state_dict(full))


@pytest.mark.long
def test_options_that_the_program_has_stay() -> None:
    pm = small_plan(KINDS["AdamW"], DP2)
    x, y = batches(1)[0]
    refused("groups of", lambda: pm.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}))
    pm.optimizer.param_groups[0]["betas"] = (0.5, 0.5)
    assert "cycle_momentum" in str(refused("'betas' of a group was changed", lambda: pm.step(x, y)).remedy)
    pm = small_plan(KINDS["AdamW"], DP2)
    pm.optimizer.param_groups[0]["lr"] = "fast"
    refused("'lr' of a group is no number any more", lambda: pm.step(x, y))
    pm = small_plan(KINDS["AdamW"], DP2)
    pm.get_parameter("0.weight").requires_grad_(False)
    refused("was frozen since", lambda: pm.step(x, y))
    model = small_model()
    model[0].weight.requires_grad_(False)  # type: ignore[union-attr]
    hints = sx.Hints(args=(x,), targets=(y,), loss=F.mse_loss, optimizer=KINDS["AdamW"], specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, DP2, hints)
    pm.get_parameter("0.weight").requires_grad_(True)
    refused("'0.weight' was made trainable since", lambda: pm.step(x, y))


class Fades:
    """A schedule of one's own: decay and eps of a step, by number."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.steps = optimizer, 0

    def step(self) -> None:
        self.steps += 1
        for group in self.optimizer.param_groups:
            group.update(weight_decay=0.1 / self.steps, eps=1e-8 * self.steps)


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=2e-2, total_steps=6)


SCHEDULED: dict[str, tuple[Callable[[Any], Any], tuple[str, ...], Callable[[Any], Any]]] = {
    "momentum": (lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True), ("momentum",), cycle),
    "decay": (lambda ps: torch.optim.AdamW(ps, lr=1e-2, weight_decay=0.1), ("weight_decay", "eps"), Fades),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "zero"), [("momentum", 3), ("decay", 0)])
def test_what_is_scheduled_is_an_input(name: str, zero: int) -> None:
    """Schedules of torch that cycle momentum, and of one's own, do to a program what they do to torch's optimizer."""
    factory, scheduled, make = SCHEDULED[name]
    model = small_model()
    theirs = factory(list(model.parameters()))
    pm = small_plan(factory, DP2, zero=zero, scheduled_options=scheduled)
    schedules = [make(theirs), make(pm.optimizer)]
    for x, y in batches(5):
        loss = F.mse_loss(model(x), y)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert float(pm.step(x, y)) == pytest.approx(loss.item(), abs=1e-12)
        for each in schedules:
            each.step()
    full = pm.full_state_dict()
    assert all(torch.allclose(full[key], value, atol=1e-12) for key, value in model.named_parameters())
    assert pm.verify(), pm.verify().why


@pytest.mark.long
def test_a_number_that_the_step_compares_with_stays_on_its_side() -> None:
    """Decay that was planned as some is no program without it; and the other way round."""
    x, y = batches(1)[0]
    for planned, now in ((0.1, 0.0), (0.0, 0.1)):
        pm = small_plan(
            lambda ps, decay=planned: torch.optim.AdamW(ps, weight_decay=decay),
            DP2,
            scheduled_options=("weight_decay",),
        )
        pm.step(x, y)
        pm.optimizer.param_groups[0]["weight_decay"] = now
        refused("with this 'weight_decay' the step of AdamW is another program", lambda pm=pm: pm.step(x, y))
    refused("no optimizer has a number 'beta'", lambda: small_plan(KINDS["AdamW"], DP2, scheduled_options=("beta",)))


def test_hints_are_checked() -> None:
    one = torch.optim.SGD([torch.zeros(1)])
    for wrong in ({"optimizer": one}, {"clip_grad_norm": 0}, {"clip_grad_norm": True}, {"scheduled_options": "betas"}):
        refused("is not valid", lambda given=wrong: sx.Hints(args=(), loss=F.mse_loss, **given))


def in_two(params: Any) -> optim.Optimizer:
    return optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.1}], lr=1e-2)


# ---- what is loaded


@pytest.mark.long
def test_shards_that_do_not_fit_are_refused_before_any_is_loaded() -> None:
    pm, wider = small_plan(KINDS["AdamW"], DP2, zero=1), small_plan(KINDS["AdamW"], sx.Mesh(dp=4), zero=1)
    pm.step(*batches(1)[0])
    before = pm.optimizer.full_state_dict()

    def spoilt(change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        given = copy.deepcopy(pm.optimizer.state_dict())
        for held in given["state"].values():
            for shard in held if isinstance(held, list) else [held]:
                shard.add_(1)
        change(given["state"])
        return given

    first = "0.weight.exp_avg"
    for given in (
        wider.optimizer.state_dict(),
        spoilt(lambda state: state.pop(first)),
        spoilt(lambda state: state.update({first: state[first][:1]})),
    ):
        refused("of another optimizer", lambda given=given: pm.optimizer.load_state_dict(given))
    after = pm.optimizer.full_state_dict()
    assert all(torch.equal(after["state"][n][k], v) for n, held in before["state"].items() for k, v in held.items())


@pytest.mark.long
def test_rates_are_loaded_and_groups_of_other_sizes_refused() -> None:
    first, other, one = (small_plan(each, DP2) for each in (in_two, in_two, KINDS["AdamW"]))
    for x, y in batches(2):
        first.step(x, y)
    first.optimizer.param_groups[1]["lr"] = 0.5
    full = first.optimizer.full_state_dict()
    other.load_full_state_dict(first.full_state_dict())
    other.optimizer.load_full_state_dict(full)
    assert other.optimizer.param_groups[1]["lr"] == 0.5
    x, y = batches(1)[0]
    assert float(first.step(x, y)) == float(other.step(x, y))
    assert all(torch.equal(value, other.full_state_dict()[name]) for name, value in first.full_state_dict().items())
    refused("of another optimizer", lambda: one.optimizer.load_full_state_dict(full))
    assert not one.optimizer.full_state_dict()["state"][0]["exp_avg"].any()


@pytest.mark.long
def test_parameters_that_no_optimizer_has_are_told_of() -> None:
    with pytest.warns(sx.ShardfxWarning, match=r"1 of 4 trainable parameters have no optimizer: 2\.bias"):
        pm = small_plan(lambda ps: optim.AdamW(ps[:3]), DP2)
    assert any("no optimizer: 2.bias" in note for note in pm.planned.notes)
    before = pm.full_state_dict()["2.bias"]
    pm.step(*batches(1)[0])
    assert torch.equal(pm.full_state_dict()["2.bias"], before)


def test_step_of_a_model_that_was_made_on_meta() -> None:
    x, weights = torch.randn(4, 8), nn.Linear(8, 8).state_dict()
    hints = sx.Hints(args=(x,), targets=(x,), loss=nn.functional.mse_loss, optimizer=torch.optim.AdamW)
    ours, theirs = (sx.parallelize(nn.Linear(8, 8, device=device), DP2, hints) for device in ("meta", "cpu"))
    for pm in (ours, theirs):
        pm.load_full_state_dict(weights)
        pm.step(x, x)
    assert all(torch.equal(p, theirs.full_state_dict()[name]) for name, p in ours.full_state_dict().items())
