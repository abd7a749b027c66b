"""``pm.optimizer`` in other hands: what is changed in it, loaded into it or done beside it holds, or is an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn, optim

import shardfx as sx
from tests.plans import MESHES
from tests.stepped import KINDS, Lamb, batches, refused, small_model, small_plan

DP2 = MESHES["dp2"]


def in_two(params: Any) -> optim.Optimizer:
    return optim.AdamW([{"params": params[:2], "lr": 1e-3}, {"params": params[2:], "weight_decay": 0.1}], lr=1e-2)


def turned_round(params: Any) -> optim.Optimizer:
    return optim.AdamW([{"params": params[2:], "weight_decay": 0.1}, {"params": params[:2], "lr": 1e-3}], lr=1e-2)


@pytest.mark.slow
def test_who_is_in_which_group_is_a_part_of_the_program() -> None:
    pm = small_plan(in_two, DP2)
    changes: list[Callable[[list[Any]], object]] = [
        lambda groups: groups.reverse(),
        lambda groups: groups.pop(),
        lambda groups: groups[0].update(params=groups[0]["params"][:1]),
        lambda groups: groups[1]["params"].append(groups[0]["params"].pop()),
    ]
    for change in changes:
        other = copy.deepcopy(pm)
        change(other.optimizer.param_groups)
        refused("groups of parameters are a part", lambda other=other: other.step(*batches(1)[0]))
    pm.step(*batches(1)[0])


@pytest.mark.long
def test_groups_and_options_stay() -> None:
    pm = small_plan(in_two, DP2)
    refused("groups of", lambda: pm.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}))
    pm.optimizer.param_groups[0]["maximize"] = True
    assert "scheduled" not in str(refused("'maximize' of a group was changed", lambda: pm.step(*batches(1)[0])).remedy)
    pm.optimizer.param_groups[0]["maximize"] = False
    del pm.optimizer.param_groups[1]["weight_decay"]
    refused("'weight_decay' of a group was changed", lambda: pm.step(*batches(1)[0]))


@pytest.mark.long
def test_a_rate_that_is_a_tensor_is_changed_in_place() -> None:
    rates = [torch.tensor(1e-2, dtype=torch.float64) for _ in range(2)]
    model, pm = small_model(), small_plan(lambda ps: optim.AdamW(ps, lr=rates[0]), DP2)
    theirs = optim.AdamW(model.parameters(), lr=rates[1])
    for x, y in batches(3):
        loss = F.mse_loss(model(x), y)
        theirs.zero_grad()
        loss.backward()
        theirs.step()
        assert float(pm.step(x, y)) == pytest.approx(loss.item(), abs=1e-12)
        for rate in rates:
            rate.mul_(0.1)
    assert pm.optimizer.param_groups[0]["lr"] is rates[0]


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
        spoilt(lambda state: state.update({first: [torch.ones(1), torch.ones(1)]})),
        spoilt(lambda state: state.update({first: state[first][:1]})),
    ):
        refused("of another optimizer", lambda given=given: pm.optimizer.load_state_dict(given))
    after = pm.optimizer.full_state_dict()
    assert all(torch.equal(after["state"][n][k], v) for n, held in before["state"].items() for k, v in held.items())


@pytest.mark.long
def test_rates_go_to_the_groups_of_their_parameters() -> None:
    """Whatever the order of the groups; what several say in several ways is an error, and nothing is loaded."""
    first, other, one = (small_plan(each, DP2) for each in (in_two, turned_round, KINDS["AdamW"]))
    for x, y in batches(2):
        first.step(x, y)
    first.optimizer.param_groups[1]["lr"] = 0.5
    full = first.optimizer.full_state_dict()
    other.load_full_state_dict(first.full_state_dict())
    other.optimizer.load_full_state_dict(full)
    assert [group["lr"] for group in other.optimizer.param_groups] == [0.5, 1e-3]
    x, y = batches(1)[0]
    assert float(first.step(x, y)) == float(other.step(x, y))
    assert all(torch.equal(value, other.full_state_dict()[name]) for name, value in first.full_state_dict().items())
    refused("groups of another optimizer", lambda: one.optimizer.load_full_state_dict(full))
    assert not one.optimizer.full_state_dict()["state"]["0.weight"]["exp_avg"].any()
    del full["param_groups"]
    one.optimizer.load_full_state_dict(full)


def test_states_of_whole_numbers_are_refused() -> None:
    pm = small_plan(KINDS["AdamW"], DP2)
    full = pm.optimizer.full_state_dict()
    full["state"]["0.weight"]["exp_avg"] = full["state"]["0.weight"]["exp_avg"].long()
    refused("wrong kind of numbers", lambda: pm.optimizer.load_full_state_dict(full))


# ---- what is done beside it


def test_copies_have_their_shards_looked_at() -> None:
    pm = copy.deepcopy(small_plan(None, DP2, zero=3))
    pm(*batches(1)[0]).backward()
    refused("looks at full tensors", Lamb(pm.parameters()).step)


@pytest.mark.long
def test_parameters_that_no_optimizer_has_are_told_of() -> None:
    with pytest.warns(sx.ShardfxWarning, match=r"1 of 4 trainable parameters have no optimizer: 2\.bias"):
        pm = small_plan(lambda ps: optim.AdamW(ps[:3]), DP2)
    assert any("no optimizer: 2.bias" in note for note in pm.planned.notes)
    before = pm.full_state_dict()["2.bias"]
    pm.step(*batches(1)[0])
    assert torch.equal(pm.full_state_dict()["2.bias"], before)
    refused("this is no optimizer", lambda: small_plan(lambda ps: [], DP2))
