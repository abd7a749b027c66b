"""The optimizer whose step is a part of the program, as a ``torch.optim.Optimizer``: groups, rates, states.

scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 1000)
for x, y in batches:
    loss = pm.step(x, y)
    scheduler.step()
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from shardfx.ir.capture.optimizer.training_step import SCALE
from shardfx.ir.capture.optimizer.update_spec import NAMES, OptimizerState, fixed, inputs_of
from shardfx.ir.errors import Error
from shardfx.ir.ops.pools.transfer import finish
from shardfx.module.model_state import ModelState
from shardfx.plan import some


class ProgramOptimizer(torch.optim.Optimizer):
    """Groups and states of the optimizer in the program. Rates (``lr``), and what ``Hints(scheduled_options=...)``
    names, may be changed, by a schedule of torch or by hand, and hold from the next ``pm.step(...)`` on; other options
    are those of the plan.

    ``state_dict()`` has the shards of this process, for ``torch.distributed.checkpoint`` and for the same plan;
    ``full_state_dict()`` full states as an optimizer of the model itself has them, for any plan and for that.
    """

    def __init__(self, state: ModelState) -> None:
        update = state.compiled.captured.update
        if update is None:
            raise Error(
                "there is no optimizer in this plan",
                where="pm.step(...), pm.optimizer",
                expected="Hints(loss=..., optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4))",
                got="a plan without optimizer, or without a loss",
                remedy="give it in the hints; or step one of pm.parameters() yourself",
            )
        state.check_complete()
        self.model_state, self.update = state, update
        groups = []
        for group in update.groups:
            here = [state.store.parameters[name] for name in group.names if name in state.store.parameters]
            groups.append({"params": here, **group.options})
        self._members = [list(group["params"]) for group in groups]
        super().__init__(groups, {})
        self.state = MappingProxyType({})  # type: ignore[assignment]  # states are stored by name
        shared = set[str]().union(*(group.options_in for group in update.groups))
        shared = shared.intersection(*(group.options_in for group in update.groups))
        self.defaults = {name: value for name, value in self.param_groups[0].items() if name in shared}  # for schedules
        self._planned = [fixed(group, made) for group, made in zip(self.param_groups, update.groups, strict=True)]
        self._began = False

    def step(self, closure: Any = None) -> NoReturn:
        """Not supported, as the step is a part of the program: always an Error."""
        raise Error(
            "the optimizer's step is a part of the program",
            where="pm.optimizer.step()",
            expected="pm.step(x, y), which runs forward, backward and update, and gives the loss",
            got="a step on its own",
            remedy="call pm.step(x, y) instead of pm(x, y), backward() and step()",
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> ProgramOptimizer:
        """The optimizer of a copied module: torch's own copies leave out what they do not know."""
        made = memo[id(self)] = type(self).__new__(type(self))
        copied = {name: value for name, value in self.__dict__.items() if name != "state"}
        made.__dict__.update(copy.deepcopy(copied, memo), state=self.state)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Not supported, as groups are those of the program.

        Raises:
            Error: always, once they are there.
        """
        if len(self.param_groups) == len(self._members):
            raise _other_groups("pm.optimizer.add_param_group(...)", "one more")
        super().add_param_group(param_group)

    def begin(self) -> None:
        """Initialize the states, if they do not exist. A collective call."""
        if self._began:
            return
        store = self.model_state.store
        with torch.no_grad():
            for name, states in self.update.states.items():
                for state in states:
                    if not store.is_loaded(state.name):
                        store.begin(state.name, name if state.start == "parameter" else float(state.start))
        self.begin_counts()
        self._began = True

    def begin_counts(self) -> None:
        """Initialize the states that are no parameter's, if missing: a scale of the loss is read in every call."""
        for name, count in self.update.counts.items():
            if not self.model_state.store.is_loaded(name):
                self.model_state.store.begin(name, count.start)

    @property
    def loss_scale(self) -> float | None:
        """The current dynamic loss scale (:class:`shardfx.LossScale`), of the next step; None without one. Under
        ``torchrun`` all ranks ask it."""
        if SCALE not in self.update.counts:
            return None
        self.begin_counts()
        return float(self.model_state.store.full(SCALE))

    def options(self) -> dict[str, torch.Tensor]:
        """The current rates and other scheduled options, by the names of the program's inputs.

        Raises:
            Error: another option was changed, which the program has as it was.
        """
        found: dict[str, torch.Tensor] = {}
        now = [group["params"] for group in self.param_groups]
        if [[*map(id, each)] for each in now] != [[*map(id, each)] for each in self._members]:
            raise _other_groups("pm.optimizer.param_groups", f"groups of {[*map(len, now)]} tensors, or others")
        for number, (group, planned, made) in enumerate(
            zip(self.param_groups, self._planned, self.update.groups, strict=True)
        ):
            found |= inputs_of(group, planned, made, f"pm.optimizer.param_groups[{number}]")
        self._opt_called = True  # what schedules ask for
        return found

    # ---- states ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The sharded states of this process (under ``torchrun`` DTensors), by the model's names; and the groups."""
        self.begin()
        store = self.model_state.store
        finish(store.device)
        shards = {name: each[0] if len(each) == 1 else list(each) for name, each in store.states.items()}
        return {"state": shards, "param_groups": self._groups(), "placed": self._placed()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load a :meth:`state_dict` of the same plan and optimizer.

        Raises:
            Error: it is of another one.
        """
        self.begin()
        store, where = self.model_state.store, "pm.optimizer.load_state_dict(...)"
        saved, placed = state_dict.get("state", {}), state_dict.get("placed", {})
        new = {name: tensors if isinstance(tensors, list) else [tensors] for name, tensors in saved.items()}
        wanted, have = _described(store.states, self._placed()), _described(new, placed)
        if have != wanted:
            apart = [name for name in {**wanted, **have} if wanted.get(name) != have.get(name)]
            raise _other_states(where, *({name: each.get(name, "none") for name in apart} for each in (wanted, have)))
        options = self._options_of(state_dict, where)
        finish(store.device)
        with torch.no_grad():
            for name, tensors in store.states.items():
                for shard, content in zip(tensors, new[name], strict=True):
                    shard.copy_(content)
        self._set_options(options)

    def full_state_dict(self) -> dict[str, Any]:
        """Full states as a ``torch.optim.Optimizer`` of the model has them: ``{"state": {0: {"exp_avg": ...}},
        "param_groups": [...]}``, with the parameters numbered group by group. Under ``torchrun`` all ranks call it."""
        self.begin()
        store, numbers = self.model_state.store, self._numbers
        full = {s.name: store.full(s.name) for states in self.update.states.values() for s in states}
        found = {
            numbers[name]: {state.key: _as_kept(full[state.name], state) for state in states}
            for name, states in self.update.states.items()
            if states
        }
        counts = {name: float(store.full(name)) for name in self.update.counts}
        return {"state": found, "param_groups": self._groups(), **({"counts": counts} if counts else {})}

    def load_full_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load full states, each rank its shards: those of any plan, or of an optimizer of the model itself. All ranks
        call it; rank 0's are loaded.

        Raises:
            Error: they are those of another model or optimizer; or differ where parameters share one.
        """
        self.begin()
        where, names = "pm.optimizer.load_full_state_dict(...)", [*self._numbers]
        options = self._options_of(state_dict, where)
        order = [number for group in state_dict["param_groups"] for number in group["params"]]
        saved = {name: state_dict["state"].get(number, {}) for name, number in zip(names, order, strict=True)}
        wanted = {name: {state.key for state in states} for name, states in self.update.states.items()}
        have = {name: set(saved[name]) for name in wanted}
        if have != wanted:
            raise _other_states(where, wanted, have)
        new: dict[str, torch.Tensor] = {}
        for name, states in self.update.states.items():
            for state in states:
                value = torch.as_tensor(saved[name][state.key])
                self._check(name, state, value, new.get(state.name))
                new[state.name] = value
        with torch.no_grad():
            said = state_dict.get("counts", {})
            counts = {name: float(said.get(name, count.unsaid)) for name, count in self.update.counts.items()}
            wholes = {name: torch.tensor(count, dtype=torch.float64) for name, count in counts.items()}
            self.model_state.store.load({**new, **wholes}, {})
        self._set_options(options)

    @property
    def _numbers(self) -> dict[str, int]:
        """The number of each parameter, group by group."""
        names = [name for made in self.update.groups for name in made.names]
        return {name: number for number, name in enumerate(names)}

    def _check(self, name: str, state: OptimizerState, value: torch.Tensor, other: torch.Tensor | None) -> None:
        type_ = self.model_state.compiled.after.input(state.name).value.type
        wrong = "shape" if tuple(value.shape) != type_.shape else ""
        if not wrong and value.dim() and value.is_floating_point() != type_.dtype.is_floating_point:
            wrong = "kind of numbers"
        if wrong:
            raise Error(
                f"the state {state.key!r} of {name!r} has the wrong {wrong}",
                where="pm.optimizer.load_full_state_dict(...)",
                expected=f"{type_.shape} of {type_.dtype}",
                got=f"{tuple(value.shape)} of {value.dtype}",
                remedy="pass full states, as full_state_dict() gives them",
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
        """The options of the groups, and the numbers of their parameters."""
        numbers = self._numbers
        return [
            {
                **{key: value for key, value in group.items() if key not in ("params", NAMES)},
                "params": [numbers[name] for name in made.names],
            }
            for group, made in zip(self.param_groups, self.update.groups, strict=True)
        ]

    def _options_of(self, state_dict: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
        """The saved options of each group.

        Raises:
            Error: the groups are others.
        """
        groups, sizes = state_dict.get("param_groups", ()), [len(made.names) for made in self.update.groups]
        theirs = [len(group["params"]) for group in groups]
        if theirs != sizes:
            raise _other_states(where, {"parameters of groups": sizes}, {"parameters of groups": theirs})
        return [{key: value for key, value in group.items() if key not in ("params", NAMES)} for group in groups]

    def _set_options(self, options: Iterable[Mapping[str, Any]]) -> None:
        for group, new in zip(self.param_groups, options, strict=False):
            group.update(new)

    def _placed(self) -> dict[str, str]:
        store = self.model_state.store
        return {name: store.placed(name) for name in store.states}


def _other_groups(where: str, got: str) -> Error:
    return Error(
        "the groups of parameters are a part of the program",
        where=where,
        expected="the groups that Hints(optimizer=...) made, with their parameters in their order",
        got=got,
        remedy="parallelize again with an optimizer that has them so; rates may be changed in those that are there",
    )


def _other_states(where: str, expected: Mapping[str, object], got: Mapping[str, object]) -> Error:
    wanted, have = (some([f"{name}: {value}" for name, value in each.items()], 4)[:300] for each in (expected, got))
    return Error(
        "these are states of another optimizer, plan or model",
        where=where,
        expected=wanted,
        got=have,
        remedy="full_state_dict() and load_full_state_dict() move states between plans of one model and optimizer",
    )


def _described(states: Mapping[str, Collection[Any]], placed: Mapping[str, str]) -> dict[str, str]:
    """The placement, and the shapes of the shards, of each state."""
    shapes = {name: [tuple(torch.as_tensor(each).shape) for each in shards] for name, shards in states.items()}
    return {name: f"{placed.get(name, 'nowhere')}, shards {shapes[name]}" for name in states}


def _as_kept(value: torch.Tensor, state: OptimizerState) -> Any:
    """A state in the form of the optimizer itself."""
    if isinstance(state.kept, torch.dtype):
        return value.to(state.kept)
    return state.kept(value.item())
