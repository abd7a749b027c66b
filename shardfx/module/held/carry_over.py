"""An optimizer that was made of the model's parameters goes on with those of the parallel module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardfx.ir.errors import Error

from .optimizer_states import pieces_of_state
from .state import ModelState

WHERE = "parallelize(..., optimizer=...)"


def carry_over(optimizers: object, model: nn.Module, state: ModelState) -> None:
    """Have optimizers step the stored pieces in the place of the model's own parameters: options of groups stay, and
    states are sharded as the parameters are. Parameters that are not the model's stay as they are.

    Raises:
        Error: there are no weights yet; a state has another shape than its parameter, which is sharded.
    """
    given = _optimizers(optimizers)
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
    for optimizer in given:
        moved = {p: names.get(id(p), "") for group in optimizer.param_groups for p in group["params"]}
        moved = {p: name for p, name in moved.items() if state.store.is_loaded(name)}
        states = {p: pieces_of_state(state, name, optimizer.state.get(p, {}), WHERE) for p, name in moved.items()}
        for group in optimizer.param_groups:
            _move_group(group, {p: state.store.parameters.get(name, []) for p, name in moved.items()})
        for p, name in moved.items():
            if optimizer.state.pop(p, None):
                optimizer.state.update(zip(state.store.parameters.get(name, ()), states[p], strict=True))


def _optimizers(given: object) -> list[torch.optim.Optimizer]:
    found = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        if not isinstance(each, torch.optim.Optimizer):
            raise Error(
                "this is no optimizer",
                where=WHERE,
                expected="a torch.optim.Optimizer, or a list of some",
                got=type(each).__name__,
            )
        found.append(each)
    return found


def _move_group(group: dict[str, Any], pieces: dict[nn.Parameter, list[nn.Parameter]]) -> None:
    """Put the pieces in the place of the parameters, in the same list: some optimizers hold it, too."""
    params, names = [], []
    for i, p in enumerate(group["params"]):
        there = pieces.get(p, [p])
        params += there
        own = group["param_names"][i] if "param_names" in group else ""
        names += [own if len(there) == 1 else f"{own}.{number}" for number in range(len(there))]
    group["params"][:] = params
    if "param_names" in group:
        group["param_names"][:] = names
