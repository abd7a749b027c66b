"""Optimizer states, full and sharded: they move between plans, and to and from the model alone.

A full one is what ``optimizer.state_dict()`` of an optimizer of the model itself would be: the model's parameters in
the place of their shards, in the same groups, and states in their parameters' global shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error
from shardfx.module.model_state import ModelState

SAVED, LOADED = "pm.full_optimizer_state_dict(...)", "pm.load_full_optimizer_state_dict(...)"


def _sharded(state: ModelState, name: str, full: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The state of a stored parameter: tensors of its shape are sharded as it is, and numbers are the same.

    Raises:
        Error: a tensor of another shape, of a parameter that is sharded.
    """
    found: dict[str, Any] = {}
    for key, value in full.items():
        of_shape = isinstance(value, torch.Tensor) and value.shape == state.shape(name) and value.dim() > 0
        if not of_shape:
            _check_shape(key, value, name, state, where)
        found[key] = state.store.like(name, value) if of_shape else copy.deepcopy(value)
    return found


def _check_shape(key: str, value: object, name: str, state: ModelState, where: str) -> None:
    if isinstance(value, torch.Tensor) and value.numel() > 1 and not state.is_stored_full(name):
        raise Error(
            f"the state {key!r} of {name!r} is not sharded as the parameter is",
            where=where,
            expected=f"a tensor of shape {tuple(state.shape(name))}, or a number",
            got=f"one of shape {tuple(value.shape)}",
            remedy="an optimizer whose states are as its parameters, such as AdamW; or one made of pm.parameters()",
        )


def joined(state: ModelState, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state dict of an optimizer of stored parameters. A collective call.

    Raises:
        Error: a state cannot be joined.
    """
    saved = optimizer.state_dict()
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    for members, packed in zip(_members(state, optimizer), saved["param_groups"], strict=True):
        first = sum(len(each["params"]) for each in groups)
        for i, (name, place) in enumerate(members):
            mine = saved["state"].get(packed["params"][place], {}) if place is not None else {}
            if made := _full_state(state, name, mine) if name else mine:
                states[first + i] = made
        group = {**packed, "params": list(range(first, first + len(members)))}
        if "param_names" in packed:
            group["param_names"] = [name or packed["param_names"][place] for name, place in members]
        groups.append(group)
    return {**saved, "state": states, "param_groups": groups}


def sharding(state: ModelState, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]) -> dict[str, Any]:
    """The sharded argument of ``optimizer.load_state_dict``, from a full state dict. A collective call.

    Raises:
        Error: the groups are others; a state cannot be sharded as its parameter is.
    """
    every = _members(state, optimizer)
    sizes, theirs = [len(members) for members in every], [len(group["params"]) for group in full["param_groups"]]
    if sizes != theirs:
        raise Error(
            "the state dict is of another optimizer",
            where=LOADED,
            expected=f"groups of {sizes} parameters of the model",
            got=f"groups of {theirs}",
            remedy="pass what pm.full_optimizer_state_dict(optimizer) gave, or the state dict of an optimizer of the "
            "model itself",
        )
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    own = optimizer.state_dict()["param_groups"]
    for members, group, mine in zip(every, full["param_groups"], own, strict=True):
        for index, (name, place) in zip(group["params"], members, strict=True):
            if index in full["state"]:
                made = _sharded(state, name, full["state"][index], LOADED) if name else full["state"][index]
                states |= {mine["params"][place]: made} if place is not None else {}
        kept = {key: mine[key] for key in ("params", "param_names") if key in mine}
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, **kept})
    return {**full, "state": states, "param_groups": groups}


def _members(state: ModelState, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, int | None]]]:
    """The parameters of each group: name ("" for one that is not the model's) and place. Of a pipeline, the model's
    stand in its order, also those that only other processes hold, which have no place here."""
    store = state.store
    names = {id(parameter): name for name, parameter in store.parameters.items()}
    mine: list[list[tuple[str, int | None]]] = [
        [(names.get(id(parameter), ""), place) for place, parameter in enumerate(group["params"])]
        for group in optimizer.param_groups
    ]
    said = store.said({name: number for number, members in enumerate(mine) for name, _ in members if name})
    if all(map(store.is_here, said)):
        return mine
    order = {name: i for i, name in enumerate(state.names)}
    every: list[list[tuple[str, int | None]]] = []
    for number, members in enumerate(mine):
        here = {name: place for name, place in members if name}
        its = sorted((name for name, group in said.items() if group == number), key=lambda name: order[name])
        every.append([(name, here.get(name)) for name in its] + [each for each in members if not each[0]])
    return every


def _full_state(state: ModelState, name: str, mine: Mapping[str, Any]) -> dict[str, Any]:
    """The full state of a parameter, perhaps of another process; empty where it has none."""
    kept: dict[str, Any] = {}
    for key, value in mine.items():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == state.store.parameters[name].shape:
            kept[key] = value.dtype
        else:
            _check_shape(key, value, name, state, SAVED)
            kept[key] = copy.deepcopy(value)
    kept = dict(state.store.said({name: kept} if kept else {}).get(name, {}))
    for key, dtype in kept.items():
        if isinstance(dtype, torch.dtype):
            kept[key] = state.store.full(name, mine.get(key), dtype)
    return kept


WHERE = "parallelize(..., optimizer=...)"


def carry_over(optimizers: object, model: nn.Module, state: ModelState) -> None:
    """Make optimizers of the model's own parameters step the stored shards: options of groups stay, and states are
    sharded as the parameters are. Parameters that are not the model's stay as they are.

    Raises:
        Error: there are no weights yet; a state has another shape than its parameter, which is sharded.
    """
    args: list[Any] = list(optimizers) if isinstance(optimizers, (list, tuple)) else [optimizers]
    wrong = next((each for each in args if not isinstance(each, torch.optim.Optimizer)), None)
    if wrong is not None:
        raise Error(
            "this is no optimizer",
            where=WHERE,
            expected="a torch.optim.Optimizer, or a list of some",
            got=type(wrong).__name__,
        )
    if state.lacking():
        raise Error(
            "an optimizer cannot be carried over to a plan without weights",
            where=WHERE,
            expected="a model with weights",
            got="one that is fake, or on meta",
            remedy="load weights, then make the optimizer of pm.parameters()",
        )
    names = {
        id(parameter): state.aliases.get(name, name)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for optimizer in args:
        moved = {p: names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}
        moved = {p: name for p, name in moved.items() if state.store.is_loaded(name)}
        states = {p: _sharded(state, name, optimizer.state.pop(p, {}), WHERE) for p, name in moved.items()}
        for group in optimizer.param_groups:
            _move_group(group, {p: state.store.parameters.get(name) for p, name in moved.items()})
        for p, name in moved.items():
            if states[p] and name in state.store.parameters:
                optimizer.state[state.store.parameters[name]] = states[p]


def _move_group(group: dict[str, Any], stored: Mapping[nn.Parameter, nn.Parameter | None]) -> None:
    """Replace the parameters by the stored ones, in the same list: some optimizers share it."""
    places = [i for i, p in enumerate(group["params"]) if stored.get(p, p) is not None]
    if "param_names" in group:
        group["param_names"][:] = [group["param_names"][i] for i in places]
    group["params"][:] = [stored.get(p, p) for p in (group["params"][i] for i in places)]
