"""The optimizer whose step is a part of the program, as a ``torch.optim.Optimizer``: groups, rates, states.

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 1000)
for x, y in batches:
    loss = pm.step(x, y)
    scheduler.step()
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch.utils.weak import WeakIdKeyDictionary

from shardfx.ir.capture.update.loss_scale import SCALE
from shardfx.ir.capture.update.stepped import NAMES, HeldState, fixed, inputs_of
from shardfx.ir.errors import Error

from .state import ModelState

_stepped = WeakIdKeyDictionary()
"""The parameters that a program steps."""


class ProgramOptimizer(torch.optim.Optimizer):
    """Groups and states of the optimizer in the program. Rates (``lr``), and what ``Hints(scheduled=...)`` names, may
    be changed, by a schedule of torch or by hand, and hold from the next ``pm.step(...)`` on; other options are those
    of the plan.

    ``state_dict()`` has the pieces of this process, for ``torch.distributed.checkpoint`` and for the same plan;
    ``full_state_dict()`` whole states by the model's names, for any plan and for torch's own optimizers.
    """

    def __init__(self, held: ModelState) -> None:
        update = held.compiled.captured.update
        if update is None:
            raise Error(
                "there is no optimizer in this plan",
                where="pm.step(...), pm.optimizer",
                expected="Hints(loss=..., optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))",
                got="a plan without optimizer, or without a loss",
                remedy="give it in the hints; or step one of pm.parameters() yourself",
            )
        held.check_complete()
        self.held, self.update = held, update
        groups = []
        for group in update.groups:
            pieces = [piece for name in group.names for piece in held.store.parameters.get(name, ())]
            options = {key: _plain(value) for key, value in group.options.items()}
            groups.append({"params": pieces, **options})
        super().__init__(groups, {})
        shared = set[str]().union(*(group.options_in for group in update.groups))
        shared = shared.intersection(*(group.options_in for group in update.groups))
        self.defaults = {name: value for name, value in self.param_groups[0].items() if name in shared}  # for schedules
        self._planned = [fixed(group, made) for group, made in zip(self.param_groups, update.groups, strict=True)]
        self._began = False
        _stepped.update({piece: True for group in self.param_groups for piece in group["params"]})

    def step(self, closure: Any = None) -> NoReturn:
        """The step is a part of the program.

        Raises:
            Error: always.
        """
        raise Error(
            "the optimizer's step is a part of the program",
            where="pm.optimizer.step()",
            expected="pm.step(x, y), which runs forward, backward and update, and gives the loss",
            got="a step on its own",
            remedy="call pm.step(x, y) instead of pm(x, y), backward() and step()",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramOptimizer:
        """That of a copy of the module: torch's own copies leave out what they do not know."""
        made = memo[id(self)] = type(self).__new__(type(self))
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        _stepped.update({piece: True for group in made.param_groups for piece in group["params"]})
        return made

    def begin(self) -> None:
        """Make the states, if they are not there. All ranks call it alike."""
        if self._began:
            return
        store = self.held.store
        with torch.no_grad():
            for name, states in self.update.states.items():
                for state in states:
                    if not store.is_loaded(state.name):
                        store.begin(state.name, name if state.start == "parameter" else float(state.start))
        self.begin_counts()
        self._began = True

    def begin_counts(self) -> None:
        """Make the states that are no parameter's, if they are not there: a scale of the loss is read in every call."""
        for name, count in self.update.counts.items():
            if not self.held.store.is_loaded(name):
                self.held.store.begin(name, count.start)

    @property
    def loss_scale(self) -> float | None:
        """What the loss is multiplied by in the next step, where that adapts (:class:`shardfx.LossScale`); else None.
        Under ``torchrun`` all ranks ask it."""
        if SCALE not in self.update.counts:
            return None
        self.begin_counts()
        return float(self.held.store.whole(SCALE))

    def options(self) -> dict[str, torch.Tensor]:
        """The rates of the moment, and what else is scheduled, by the names of the program's inputs.

        Raises:
            Error: another option was changed, which the program has as it was.
        """
        found: dict[str, torch.Tensor] = {}
        for number, (group, planned, made) in enumerate(
            zip(self.param_groups, self._planned, self.update.groups, strict=True)
        ):
            found |= inputs_of(group, planned, made, f"pm.optimizer.param_groups[{number}]")
        self._opt_called = True  # what schedules ask for
        return found

    # ---- states ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The states of this process, in pieces (under ``torchrun`` DTensors), by the model's names; and the groups."""
        self.begin()
        store = self.held.store
        pieces = {name: held[0] if len(held) == 1 else list(held) for name, held in store.states.items()}
        return {"state": pieces, "param_groups": self._groups(), "placed": self._placed()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` gave, of the same plan and optimizer.

        Raises:
            Error: it is of another one.
        """
        self.begin()
        store, given = self.held.store, state_dict.get("state", {})
        if state_dict.get("placed") != self._placed():
            raise Error(
                "these are states of another plan or optimizer",
                where="pm.optimizer.load_state_dict(...)",
                expected=_few(self._placed()),
                got=_few(state_dict.get("placed") or given),
                remedy="full_state_dict() and load_full_state_dict() carry states from one plan to another",
            )
        with torch.no_grad():
            for name, held in store.states.items():
                new = given[name] if isinstance(given[name], list) else [given[name]]
                for piece, content in zip(held, new, strict=True):
                    piece.copy_(content)
        self._load_groups(state_dict.get("param_groups", ()))

    def full_state_dict(self) -> dict[str, Any]:
        """Whole states by the model's own names: ``{"state": {name: {"exp_avg": ...}}, "param_groups": [...]}``, as
        ``torch.distributed.checkpoint.state_dict`` has it. Under ``torchrun`` all ranks call it."""
        self.begin()
        store = self.held.store
        whole = {s.name: store.whole(s.name) for states in self.update.states.values() for s in states}
        found = {
            name: {state.key: _as_kept(whole[state.name], state) for state in states}
            for name, states in self.update.states.items()
        }
        counts = {name: float(store.whole(name)) for name in self.update.counts}
        return {"state": found, "param_groups": self._groups(), **({"counts": counts} if counts else {})}

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load whole states by the model's own names, each rank its pieces. All ranks call it; rank 0's are loaded.

        Raises:
            Error: they are those of another model or optimizer; or differ where parameters share one.
        """
        self.begin()
        given = state_dict.get("state", {})
        wanted = {name: {state.key for state in states} for name, states in self.update.states.items() if states}
        have = {name: set(states) for name, states in given.items() if states}
        if have != wanted:
            raise Error(
                "these are states of another optimizer or model",
                where="pm.optimizer.load_full_state_dict(...)",
                expected=_few(wanted),
                got=_few(have),
                remedy="pass what full_state_dict() gave, of the same model and kind of optimizer",
            )
        new: dict[str, torch.Tensor] = {}
        for name, states in self.update.states.items():
            for state in states:
                value = torch.as_tensor(given[name][state.key])
                self._check(name, state, value, new.get(state.name))
                new[state.name] = value
        with torch.no_grad():
            for name, value in new.items():
                self.held.store.fill(name, value)
            for name, count in self.update.counts.items():
                said = float(state_dict.get("counts", {}).get(name, count.unsaid))
                self.held.store.fill(name, torch.tensor(said, dtype=torch.float64))
        self._load_groups(state_dict.get("param_groups", ()))

    def _check(self, name: str, state: HeldState, value: torch.Tensor, other: torch.Tensor | None) -> None:
        shape = next(g.value.shape for g in self.held.compiled.after.inputs if g.name == state.name)
        if tuple(value.shape) != shape:
            raise Error(
                f"the state {state.key!r} of {name!r} has the wrong shape",
                where="pm.optimizer.load_full_state_dict(...)",
                expected=shape,
                got=tuple(value.shape),
                remedy="pass whole states, as full_state_dict() gives them",
            )
        if other is not None and not torch.equal(value, other):
            raise Error(
                f"the state {state.key!r} of {name!r} differs from that of other parameters of its group",
                where="pm.optimizer.load_full_state_dict(...)",
                expected=f"{other.item()}, one for all parameters that are stepped together",
                got=value.item(),
                remedy="put parameters that were not always stepped together into groups of their own",
            )

    def _groups(self) -> list[dict[str, Any]]:
        """The options of the groups, and their parameters by name."""
        return [
            {**{key: value for key, value in group.items() if key not in ("params", NAMES)}, "params": list(made.names)}
            for group, made in zip(self.param_groups, self.update.groups, strict=True)
        ]

    def _load_groups(self, given: Any) -> None:
        for group, new in zip(self.param_groups, given, strict=False):
            group.update({key: value for key, value in new.items() if key not in ("params", NAMES)})

    def _placed(self) -> dict[str, str]:
        held = self.held.store.held()
        return {name: str(held[name]) for name in self.held.store.states}


def reject_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Raise where an optimizer steps parameters that a program steps.

    Raises:
        Error: it does.
    """
    for group in optimizer.param_groups:
        if not isinstance(optimizer, ProgramOptimizer) and any(p in _stepped for p in group["params"]):
            raise Error(
                f"{type(optimizer).__name__} steps parameters that have an optimizer in the program",
                where=f"{type(optimizer).__name__}.step()",
                expected="pm.step(x, y)",
                got="a second optimizer of the same parameters",
                remedy="leave it out; or leave Hints(optimizer=...) out, and go on as with any module",
            )


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, torch.Tensor) else value


def _as_kept(value: torch.Tensor, state: HeldState) -> Any:
    """A state as the optimizer itself keeps it."""
    if isinstance(state.kept, torch.dtype):
        return value.to(state.kept)
    return state.kept(value.item())


def _few(given: Any, count: int = 4) -> str:
    if not isinstance(given, Mapping):
        return repr(given)[:200]
    names = [f"{name}: {value}" for name, value in list(given.items())[:count]]
    more = f" and {len(given) - count} more" if len(given) > count else ""
    return ", ".join(names)[:300] + more
