"""Optimizer states, full and sharded: they move between plans, and to and from the model alone.

A full one is what ``optimizer.state_dict()`` of an optimizer of the model itself would be: the model's parameters in
the place of their shards, in the same groups, and states in their parameters' global shapes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error
from shardfx.module.model_state import ModelState

SAVED, LOADED = "pm.full_optimizer_state_dict(...)", "pm.load_full_optimizer_state_dict(...)"


Walk = tuple[Sequence[str], Sequence[torch.Tensor]]
"""The model's parameters by name, in its order, and the shards as ``pm.parameters()`` gives them."""


def shards_of_state(state: ModelState, name: str, full: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The state of each shard of a parameter: tensors of its shape are sharded as it is, and numbers are the same.

    Raises:
        Error: a tensor of another shape, of a parameter that is sharded.
    """
    shards = state.store.parameters.get(name, ())
    shape = state.shape(name)
    found: list[dict[str, Any]] = [{} for _ in shards]
    for key, value in full.items():
        if isinstance(value, torch.Tensor) and value.shape == shape and value.dim():
            each: Sequence[Any] = state.store.sharding(name, value)
        elif isinstance(value, torch.Tensor) and value.numel() > 1 and not state.is_replicated(name):
            raise _other_shape(key, name, where, shape, value)
        else:
            each = [copy.deepcopy(value) for _ in shards]
        for place, shard in zip(found, each, strict=True):
            place[key] = shard
    return found


def joined(state: ModelState, walk: Walk, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The full state dict of an optimizer of stored shards. A collective call.

    Raises:
        Error: only some shards of a parameter have a state, or are there; a state cannot be joined.
    """
    saved = optimizer.state_dict()
    every = _every(state, walk, optimizer)
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    for wholes, packed in zip(every, saved["param_groups"], strict=True):
        first = sum(len(each["params"]) for each in groups)
        for i, (name, places) in enumerate(wholes):
            ids = [packed["params"][place] for place in places]
            stored = [saved["state"][index] for index in ids if index in saved["state"]]
            if stored:
                _check_all(name, state, len(stored))
            if made := _full_state(state, name, stored) if name else stored[:1] and stored[0]:
                states[first + i] = made
        group = {**packed, "params": list(range(first, first + len(wholes)))}
        if "param_names" in packed:
            group["param_names"] = [name or packed["param_names"][places[0]] for name, places in wholes]
        groups.append(group)
    return {**saved, "state": states, "param_groups": groups}


def sharding(
    state: ModelState, walk: Walk, optimizer: torch.optim.Optimizer, full: Mapping[str, Any]
) -> dict[str, Any]:
    """The sharded argument of ``optimizer.load_state_dict``, from a full state dict. A collective call.

    Raises:
        Error: the groups are others; a state cannot be sharded as its parameter is.
    """
    members = _every(state, walk, optimizer)
    sizes, theirs = [len(wholes) for wholes in members], [len(group["params"]) for group in full["param_groups"]]
    if sizes != theirs:
        raise _other_groups(sizes, theirs)
    groups: list[dict[str, Any]] = []
    states: dict[int, dict[str, Any]] = {}
    own = optimizer.state_dict()["param_groups"]
    for wholes, group, mine in zip(members, full["param_groups"], own, strict=True):
        for index, (name, places) in zip(group["params"], wholes, strict=True):
            if index in full["state"]:
                state_of_parameter = full["state"][index]
                shards = shards_of_state(state, name, state_of_parameter, LOADED) if name else [state_of_parameter]
                states.update(zip([mine["params"][place] for place in places], shards, strict=True))
        kept = {key: mine[key] for key in ("params", "param_names") if key in mine}
        groups.append({**{key: value for key, value in group.items() if key != "param_names"}, **kept})
    return {**full, "state": states, "param_groups": groups}


def by_number(full: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict by the model's names as torch's optimizers have it: parameters are numbers, group by group."""
    numbers = {name: i for i, name in enumerate(name for group in full["param_groups"] for name in group["params"])}
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in full["param_groups"]]
    states = {numbers[name]: state for name, state in full["state"].items() if state}
    return {**full, "state": states, "param_groups": groups}


def by_name(names: Sequence[Sequence[str]], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A numbered state dict by the ``names`` of its groups; one by names as it is.

    Raises:
        Error: the groups are others.
    """
    theirs = [group["params"] for group in values["param_groups"]]
    if not any(isinstance(each, int) for group in theirs for each in group):
        return values
    if [*map(len, names)] != [*map(len, theirs)]:
        raise _other_groups([*map(len, names)], [*map(len, theirs)])
    named = {i: name for group, mine in zip(theirs, names, strict=True) for i, name in zip(group, mine, strict=True)}
    groups = [{**group, "params": list(mine)} for group, mine in zip(values["param_groups"], names, strict=True)]
    states = {named[i]: state for i, state in values["state"].items() if i in named}
    return {**values, "state": states, "param_groups": groups}


def _owners(state: ModelState) -> dict[int, str]:
    """The parameter name of each shard."""
    return {id(shard): name for name, shards in state.store.parameters.items() for shard in shards}


def _every(state: ModelState, walk: Walk, optimizer: torch.optim.Optimizer) -> list[list[tuple[str, list[int]]]]:
    """The parameters of each group, as :func:`_members`; also those that only other processes hold.

    They stand in the order in which an optimizer of the model itself would have them: in the model's, if they stand
    here as ``pm.parameters()`` gives them (shards of some behind replicated ones), and else as the user has put them.
    """
    owners = _owners(state)
    mine = [_members(group["params"], owners) for group in optimizer.param_groups]
    said = state.store.said({name: number for number, wholes in enumerate(mine) for name, _ in wholes if name})
    every = mine
    if not all(state.store.is_here(name) for name in said):
        every = []
        for number, wholes in enumerate(mine):
            here = dict(wholes)
            names = [name for name, its in said.items() if its == number]
            every.append([(name, here.get(name, [])) for name in names] + [each for each in wholes if not each[0]])
    in_order, shards = walk
    as_walked = dict.fromkeys(owners[id(shard)] for shard in shards if id(shard) in owners)
    walked, order = ({name: i for i, name in enumerate(each)} for each in (as_walked, in_order))
    return [
        sorted(wholes, key=lambda full: order.get(full[0], len(order))) if _rises(walked, own) else wholes
        for own, wholes in zip(mine, every, strict=True)
    ]


def _rises(walked: Mapping[str, int], wholes: Sequence[tuple[str, list[int]]]) -> bool:
    """Whether parameters are in the order of the model, and those that are not the model's behind them."""
    places = [walked.get(name, len(walked)) for name, _ in wholes]
    return places == sorted(places)


def _members(params: Sequence[torch.Tensor], owners: Mapping[int, str]) -> list[tuple[str, list[int]]]:
    """The parameters of a group: name ("" for one that is not the model's), and the positions of its shards."""
    places: dict[tuple[str, int], list[int]] = {}
    for i, tensor in enumerate(params):
        name = owners.get(id(tensor), "")
        places.setdefault((name, 0 if name else i), []).append(i)
    return [(name, where) for (name, _), where in places.items()]


def _other_groups(wanted: Sequence[int], theirs: Sequence[int]) -> Error:
    return Error(
        "the state dict is of another optimizer",
        where=LOADED,
        expected=f"groups of {wanted} parameters of the model",
        got=f"groups of {theirs}",
        remedy="pass what pm.full_optimizer_state_dict(optimizer) gave, or the state dict of an optimizer of the "
        "model itself",
    )


def _other_shape(key: str, name: str, where: str, shape: Sequence[int], value: torch.Tensor) -> Error:
    return Error(
        f"the state {key!r} of {name!r} is not sharded as the parameter is",
        where=where,
        expected=f"a tensor of shape {tuple(shape)}, or a number",
        got=f"one of shape {tuple(value.shape)}",
        remedy="an optimizer whose states are as its parameters, such as AdamW; or one made of pm.parameters()",
    )


def _check_all(name: str, state: ModelState, count: int) -> None:
    wanted = len(state.store.parameters[name]) if name else 1
    if count != wanted:
        raise Error(
            f"only some shards of {name!r} have a state",
            where=SAVED,
            expected=f"all {wanted} shards in one group",
            got=count,
            remedy="keep the shards of a parameter together: groups by name, not by number",
        )


def _full_state(state: ModelState, name: str, shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The full state of a parameter from those of its shards, some in other processes; empty where it has none."""
    kept: dict[str, Any] = {}
    stored: Sequence[torch.Tensor] = state.store.parameters.get(name, ())
    for key, value in shards[0].items() if shards else ():
        if isinstance(value, torch.Tensor) and value.dim() and value.shape == stored[0].shape:
            kept[key] = value.dtype
        elif isinstance(value, torch.Tensor) and value.numel() > 1 and not state.is_replicated(name):
            raise _other_shape(key, name, SAVED, stored[0].shape, value)
        else:
            kept[key] = copy.deepcopy(value)
    kept = dict(state.store.said({name: kept} if kept else {}).get(name, {}))
    for key, dtype in kept.items():
        if isinstance(dtype, torch.dtype):
            kept[key] = state.store.full(name, [shard[key] for shard in shards], dtype)
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
        states = {p: shards_of_state(state, name, optimizer.state.get(p, {}), WHERE) for p, name in moved.items()}
        for group in optimizer.param_groups:
            _move_group(group, {p: state.store.parameters.get(name, []) for p, name in moved.items()})
        for p, name in moved.items():
            if optimizer.state.pop(p, None):
                optimizer.state.update(zip(state.store.parameters.get(name, ()), states[p], strict=True))


def _move_group(group: dict[str, Any], shards: dict[nn.Parameter, list[nn.Parameter]]) -> None:
    """Replace the parameters by their shards, in the same list: some optimizers share it."""
    params, names = [], []
    for i, p in enumerate(group["params"]):
        there = shards.get(p, [p])
        params += there
        own = group["param_names"][i] if "param_names" in group else ""
        names += [own if len(there) == 1 else f"{own}.{number}" for number in range(len(there))]
    group["params"][:] = params
    if "param_names" in group:
        group["param_names"][:] = names
