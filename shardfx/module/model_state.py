"""The model's state by its own names: parameters and buffers, gathered and sharded; and stamps on sharded state dicts.

Under ``torchrun``, ``pm.state_dict()`` has a rank's shards under the model's names. Another rank's shards, or those of
another plan, have the same names and mostly the same shapes; loading them would give other weights, and no key would be
missing. So each state dict, and each tensor of a rank in it, says its sharding and the number of the shard. (A tensor
that was computed does not; ``torch.distributed.checkpoint`` moves shards between ranks and plans.)
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shardfx.compile import Compiled
from shardfx.ir.capture.frontend.loss_module import OwnLoss
from shardfx.ir.capture.frontend.model_preparation import copied, marked, marks_of, without_weights
from shardfx.ir.capture.model_and_loss import leaf_names
from shardfx.ir.errors import Error
from shardfx.ir.graph import InputKind
from shardfx.ir.spec import TensorType
from shardfx.plan import some
from shardfx.runtime.step import STORED
from shardfx.runtime.store import Store
from shardfx.runtime.verify.interface import without_content

WHERE = "load_full_state_dict(...)"
EXTRA = "_extra_state"
SHOWN = 8


class SourceModel:
    """The model that a parallel module was made of.

    ``module`` shares attributes, modes, hooks and submodules with the user's object, so that changes on either are seen
    by guards, and calls change both. Once the user's object is gone, ``module`` is a copy of it without weights.
    """

    def __init__(self, model: nn.Module, loss: object) -> None:
        self._loss = loss if isinstance(loss, OwnLoss) else None
        self.module: nn.Module = object.__new__(type(model))
        object.__setattr__(self.module, "__dict__", model.__dict__)
        weakref.finalize(model, SourceModel._detach, weakref.ref(self)).atexit = False

    @staticmethod
    def _detach(held: weakref.ref[SourceModel]) -> None:
        if (source := held()) is not None:
            source.module = without_weights(source.module)

    def __deepcopy__(self, memo: dict[int, Any]) -> SourceModel:
        made = memo[id(self)] = object.__new__(SourceModel)
        made.module, made._loss = without_weights(self.module), self._loss
        return made

    def is_of_loss(self, name: str) -> bool:
        """Whether a tensor is one of the loss."""
        return self._loss is not None and name.partition(".")[0] == self._loss.name

    @property
    def with_loss(self) -> nn.Module:
        """The model, and its loss as a submodule if that has tensors of its own."""
        return self.module if self._loss is None else self._loss.beside(self.module)

    def at(self, path: str) -> nn.Module:
        """A module by its path; those of the loss as well."""
        name, _, rest = path.partition(".")
        if self._loss is not None and name == self._loss.name:
            return self._loss.module.get_submodule(rest)
        return self.module.get_submodule(path)

    @property
    def training(self) -> frozenset[str]:
        """The paths of the modules that are in training mode."""
        return frozenset(path for path, module in self.module.named_modules() if module.training)


class ModelState:
    """The model's parameters and buffers by name, in a store.

    ``extra`` are the parameters and buffers that no program uses.
    """

    def __init__(self, compiled: Compiled, store: Store, model: nn.Module, source: SourceModel) -> None:
        self.compiled, self.store, self._source = compiled, store, source
        self.aliases = compiled.captured.aliases
        every = model.state_dict()
        own = {name: isinstance(each, nn.Parameter) for name, each in _tensors(model, remove_duplicate=False)}
        self.names = [name for name in every if name in own and (own[name] or not source.is_of_loss(name))]
        self.beside = {name: value for name, value in every.items() if name not in own}
        """The other entries of the model's state dict: its extra state (``get_extra_state``), or a hook's additions."""
        self.trainable = {self.aliases.get(n, n): p.requires_grad for n, p in model.named_parameters()}
        used = {inp.name for inp in compiled.after.inputs}
        self.extra = {
            name: tensor.detach().clone()
            for name, tensor in _tensors(model)
            if self.aliases.get(name, name) not in used and not tensor.is_meta
        }
        self._marks = {self.aliases.get(name, name): marks_of(p) for name, p in model.named_parameters()}
        self._complete = False

    def load_from(self, model: nn.Module) -> None:
        """Shard the model's own weights; those of a fake or meta model come later."""
        full = {self.aliases.get(name, name): tensor for name, tensor in _tensors(model)}
        if self.store.has_weights(not any(map(without_content, full.values()))):
            with torch.no_grad():
                self.store.load(full, self.trainable)
        self._mark()

    def _mark(self) -> None:
        """Copy a script's attributes on a parameter to the stored one."""
        for name, parameter in self.store.parameters.items():
            for mark, value in self._marks.get(name, {}).items():
                setattr(parameter, mark, value)

    def shape(self, name: str) -> torch.Size:
        """The global shape of a stored parameter."""
        return torch.Size(self.compiled.after.input(name).value.shape)

    def is_stored_full(self, name: str) -> bool:
        """Whether this process stores a full parameter."""
        spec = self.compiled.after.input(name).value.spec
        return self.store.rank is None or (spec is not None and not spec.axes)

    def lacking(self) -> list[str]:
        """The parameters and buffers without content: the model was fake, or on meta."""
        inputs = self.compiled.after.inputs
        return [g.name for g in inputs if g.kind in STORED and not self.store.is_loaded(g.name)]

    def check_complete(self) -> None:
        """Raise where weights are missing.

        Raises:
            Error: the model was fake or on meta, and nothing was loaded.
        """
        if self._complete:
            return
        lacking = self.lacking()
        if lacking:
            raise Error(
                "this plan lacks weights: the model was fake, or on meta",
                where="pm(...)",
                expected="real weights",
                got=f"none for {lacking[0]} and {len(lacking) - 1} more",
                remedy="pm.load_full_state_dict(state_dict), or parallelize a model with weights",
            )
        self._complete = True

    def full(self) -> dict[str, torch.Tensor]:
        """Copies of full parameters and buffers by the model's own names; tied ones are one tensor."""
        full: dict[str, torch.Tensor] = {}
        for name in self.names:
            known = self.aliases.get(name, name)
            if known not in full:
                full[known] = self._whole(known)
        named = {name: full[self.aliases.get(name, name)] for name in self.names}
        return named | self.beside | {name: module.get_extra_state() for name, module in self._saying()}

    def _whole(self, name: str) -> torch.Tensor:
        return self.store.full(name) if self.store.is_loaded(name) else self.extra[name].clone()

    def _saying(self) -> list[tuple[str, nn.Module]]:
        """The modules with extra state, and its keys in a state dict."""
        named = ((name, name.rpartition(".")) for name in self.beside)
        return [(name, self._source.at(path)) for name, (path, _, last) in named if last == EXTRA]

    def filled(self, model: nn.Module) -> nn.Module:
        """A copy of the module with its current full weights, on the CPU. All ranks call it alike."""
        full: dict[str, torch.Tensor] = {}
        memo: dict[int, object] = {}
        for name, tensor in _tensors(model):
            known = self.aliases.get(name, name)
            if known not in full:
                full[known] = self._whole(known).detach().cpu().clone()
            made = full[known]
            wants = known in self.store.trained_elsewhere or self.store.parameters.get(known, tensor).requires_grad
            memo[id(tensor)] = marked(nn.Parameter(made, wants) if isinstance(tensor, nn.Parameter) else made, tensor)
        return copied(model, memo)

    def known_inputs(self) -> dict[str, torch.Tensor]:
        """Global inputs of known content: real example inputs, and buffers that are not sharded."""
        hints = self.compiled.hints
        named = leaf_names(hints.args, hints.kwargs, hints.targets)
        known = {n: t for n, t in named if isinstance(t, torch.Tensor) and not without_content(t)}
        for inp in self.compiled.after.of_kind(InputKind.BUFFER):
            if inp.name in self.store.buffers and self.is_stored_full(inp.name):
                known[inp.name] = self.store.full(inp.name)
        return known

    def full_grads(self) -> dict[str, torch.Tensor]:
        """Full gradients by the model's own names."""
        mine = {name: p.grad for name, p in self.store.parameters.items() if p.grad is not None}
        dtypes = self.store.said({name: grad.dtype for name, grad in mine.items()})
        return {name: self.store.full(name, mine.get(name), dtype) for name, dtype in dtypes.items()}

    def load_full(self, state_dict: Mapping[str, torch.Tensor], strict: bool) -> None:
        """Load full tensors by the model's own names.

        Raises:
            Error: missing or unexpected names, if ``strict``; another shape or dtype.
        """
        stored = {g.name: g.value.type for g in self.compiled.after.inputs if g.kind in STORED}
        extra = {name: TensorType(tuple(tensor.shape), tensor.dtype) for name, tensor in self.extra.items()}
        names = {name: self.aliases.get(name, name) for name in state_dict}
        wanted = {self.aliases.get(name, name) for name in self.names} | set(self.lacking())
        if strict:
            given = {*names.values()}
            missing = [name for name in (stored | extra) if name in wanted and name not in given]
            others = {*stored, *extra, *self.names, *self.beside}
            check_names(missing, [name for name, known in names.items() if not {name, known} & others])
        for name, known in names.items():
            if (type_ := (stored | extra).get(known)) is not None:
                check_type(name, state_dict[name], type_)
        own_first = sorted(names, key=lambda name: name == names[name])  # of several names of one, that counts
        full = {names[name]: state_dict[name] for name in own_first}
        self.store.load({name: tensor for name, tensor in full.items() if name in stored}, self.trainable)
        self._mark()
        self.extra |= {name: full[name].detach().clone() for name in self.extra if name in full}
        self.beside |= {name: state_dict[name] for name in self.beside if name in state_dict}
        for name, module in self._saying():
            if name in state_dict:
                module.set_extra_state(state_dict[name])


def _tensors(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters(remove_duplicate=remove_duplicate)
    yield from module.named_buffers(remove_duplicate=remove_duplicate)


def check_names(missing: Sequence[str], unexpected: Sequence[str]) -> None:
    """Check that no names of a state dict are missing, and none unexpected."""
    if missing or unexpected:
        raise Error(
            "the state dict is not that of the model",
            where=WHERE,
            expected=f"all of the model's names; missing: {some(missing, SHOWN)}",
            got=f"unexpected: {some(unexpected, SHOWN)}",
            remedy="pass the original model's state_dict() (with its non-persistent buffers, if the model was fake or "
            "on meta), or strict=False",
        )


def check_type(name: str, tensor: object, wanted: TensorType) -> None:
    """Check that a tensor has the model's global shape and dtype."""
    shape, dtype = (tuple(tensor.shape), tensor.dtype) if isinstance(tensor, torch.Tensor) else ((), type(tensor))
    if shape != wanted.shape or dtype != wanted.dtype:
        what = "shape" if shape != wanted.shape else "dtype"
        raise Error(
            f"{name!r} has the wrong {what}",
            where=WHERE,
            expected=f"{tuple(wanted.shape)}, {wanted.dtype}",
            got=f"{shape}, {dtype}",
            remedy="pass full tensors, such as full_state_dict() gives"
            if what == "shape"
            else f"convert it, if you mean to: state_dict[{name!r}].to({wanted.dtype})",
        )


STAMP = "shardfx"


def stamp_state_dicts(root: nn.Module) -> None:
    """Stamp the state dicts of a parallel module with the shards that they hold, and check stamps on load."""
    root.register_state_dict_post_hook(put_stamps)
    root.register_load_state_dict_pre_hook(check_stamps)


def put_stamps(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any]) -> None:
    """Stamp a state dict, and the tensors in it, with the shards that they are, in picklable words. Its DTensors are
    made such that torch copies them."""
    stamps = module._store.stamps()
    local_metadata[STAMP] = {name: list(each) for name, each in stamps.items()}
    for name, stamp in local_metadata[STAMP].items():
        shown, tensor = module._store.shown(name), state_dict.get(prefix + name)
        if tensor is None or isinstance(tensor, nn.Parameter):
            continue
        if shown is not None:
            tensor = state_dict[prefix + name] = shown.wrap(shown.plain(tensor))
        setattr(tensor, STAMP, stamp)


def check_stamps(module: Any, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any) -> None:
    """Check the stamps of a state dict against the shards of this module.

    Raises:
        Error: naming the first parameter or buffer that is another shard, is sharded in another way, or is full where
            there are shards; new tensors are to be put in the place of those that there are.
    """
    stamps, theirs = module._store.stamps(), local_metadata.get(STAMP, {})
    for name, (spec, shard) in stamps.items():
        got_spec, got = getattr(state_dict.get(prefix + name), STAMP, None) or theirs.get(name, (spec, shard))
        if (got_spec, got) != (spec, shard):
            sharding = got_spec != spec
            raise Error(
                f"{name!r} of this state dict is {'stored otherwise' if sharding else 'the shard of another rank'}",
                where="pm.load_state_dict(...)",
                expected=spec if sharding else f"shard {shard} of it",
                got=got_spec if sharding else f"shard {got}",
                remedy="save pm.full_state_dict(), and pm.load_full_state_dict(...) that; or save the shards of all "
                "ranks by torch.distributed.checkpoint",
            )
    values = {name: state_dict[prefix + name] for name in stamps if prefix + name in state_dict}
    mine = dict(_tensors(module))
    full = next((name for name, new in values.items() if _is_dtensor(mine[name]) > _is_dtensor(new)), None)
    if full is not None or local_metadata.get("assign_to_params_buffers"):
        raise Error(
            "new tensors cannot take the place of the stored ones"
            if full is None
            else f"{full!r} of this state dict is a full tensor, and sharded here",
            where="pm.load_state_dict(...)",
            expected="shards, as pm.state_dict() gives them",
            got="assign=True" if full is None else "a state dict of the model itself",
            remedy="leave assign=True out" if full is None else "pm.load_full_state_dict(...)",
        )
    module._store.loaded(values)


def _is_dtensor(value: object) -> bool:
    return hasattr(type(value), "to_local")
