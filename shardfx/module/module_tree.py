"""The module tree of a parallel module: proxies of the model's modules with the stored shards."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch
from torch import nn

from shardfx.ir.capture.frontend.model_preparation import STATE
from shardfx.ir.errors import Error
from shardfx.module.model_state import NUMBER, ModelState
from shardfx.module.optimizer_hooks import watch_optimizers

if TYPE_CHECKING:
    from shardfx.module.source_model import SourceModel
    from shardfx.module.state_checks import SourceWeightsCheck


WHOLE = ("generate", "save_pretrained", "push_to_hub")
"""Methods that want the full weights of the model."""
AGAIN = "change the model, and parallelize it again"
REINITIALISE = "initialise the model before parallelize; or pm.load_full_state_dict(state_dict)"


class ModelProxy(nn.Module):
    """Stands for a module of the model: nn.Module's own methods, and all else delegated to ``_twin``, the user's own
    module. Another module or tensor in it is an error: the plan was made of it as it was."""

    @property
    def _twin(self) -> nn.Module:
        source: SourceModel = self.__dict__["_source"]
        return source.at(self.__dict__["_path"].partition(f".{NUMBER}")[0])

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return "_source" not in self.__dict__ or self._twin.training

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the mode of the module."""
        if "_source" in self.__dict__:
            self._twin.training = mode

    def __getattr__(self, name: str) -> Any:
        own = self.__dict__
        for place in ("_parameters", "_buffers", "_modules"):
            if name in own.get(place, ()):
                return own[place][name]
        if "_source" not in own or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        twin = self._twin
        kind = type(twin)
        if name in vars(twin) and name not in STATE:
            return vars(twin)[name]
        if name in WHOLE and hasattr(twin, name):
            return lambda *args, **kwargs: reject_gathered(name)
        found = inspect.getattr_static(kind, name, own)
        if found is own:
            self._reject_in_shards(name)
            if name in twin._buffers:  # one that was None when the model was parallelized
                return twin._buffers[name]
            raise AttributeError(f"neither a parallel module nor {kind.__name__!r} has an attribute {name!r}")
        return found.__get__(self, kind) if hasattr(type(found), "__get__") else found

    def _set_on_twin(self, name: str, value: object) -> bool:
        """Set an attribute of the model, also a new one, which guards see; whether it is one."""
        own = self.__dict__
        if "_source" not in own or isinstance(value, (torch.Tensor, nn.Module)) or hasattr(type(self), name):
            return False
        kept = (*own["_modules"], *own["_parameters"], *own["_buffers"], *STATE)
        if name in kept or (name.startswith("_") and name not in vars(self._twin)):
            return False
        setattr(self._twin, name, value)
        return True

    def __delattr__(self, name: str) -> None:
        if name not in vars(self._twin).keys() - STATE:
            self._refuse(f"a parallel module cannot lose its {name!r}")
        delattr(self._twin, name)

    def __getitem__(self, index: Any) -> Any:
        """Indexing as in the twin's class: a part of a list or a dict of modules."""
        if isinstance(index, slice) and isinstance(self._twin, (nn.Sequential, nn.ModuleList)):
            return nn.ModuleList(list(self)[index])
        return self._as_twin("__getitem__", index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._refuse("the modules of a parallel module cannot be changed", "another module")

    def __delitem__(self, index: Any) -> None:
        self._refuse("the modules of a parallel module cannot be changed", "one module less")

    def __iter__(self) -> Iterator[Any]:
        return iter(self._as_twin("__iter__"))

    def __len__(self) -> int:
        return int(self._as_twin("__len__"))

    def __contains__(self, key: Any) -> bool:
        return bool(self._as_twin("__contains__", key))

    def __bool__(self) -> bool:
        return True

    def _as_twin(self, name: str, *args: Any) -> Any:
        """An operator as the twin's class defines it.

        Raises:
            TypeError: nothing.
        """
        kind = type(self._twin)
        if not hasattr(kind, name):
            raise TypeError(f"{kind.__name__!r} object has no {name}")
        return getattr(kind, name)(self, *args)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self._twin)]  # type: ignore[no-untyped-call]

    def apply(self, fn: Any) -> NoReturn:
        """Not supported, as it is no module of its class, and its parameters may be shards: always an Error."""
        self._refuse("apply() cannot do to shards what it does to a model", getattr(fn, "__name__", fn), REINITIALISE)

    def _refuse(self, what: str, got: object = None, remedy: str = AGAIN) -> NoReturn:
        raise Error(
            what,
            where=f"{self.__dict__.get('_path', 'pm')} ({type(self._twin).__name__})",
            expected="the model as it was parallelized",
            got=got,
            remedy=remedy,
        )

    def _reject_in_shards(self, name: str) -> None:
        """Raise an Error, no AttributeError: ``getattr(module, "weight", None)`` would say that there is none.

        Raises:
            Error: it is a parameter or a buffer that is sharded.
        """
        inside = {own: part for own, part in self._modules.items() if own.startswith(NUMBER) and part is not None}
        shards = [own for own, part in inside.items() if name in part._parameters or name in part._buffers]
        if shards:
            raise Error(
                f"{name!r} is in {len(shards)} shards here",
                where=f"{self.__dict__.get('_path', 'pm')} ({type(self._twin).__name__})",
                expected=f"{', '.join(f'{own}.{name}' for own in shards)}, or the full tensors: pm.full_state_dict()",
                got=f"the full {name!r} asked for",
                remedy="what is to change a module (a parametrization, pruning) is put on the model before parallelize",
            )


def reject_gathered(name: str) -> NoReturn:
    """Refuse a method that wants full weights: always an Error."""
    raise Error(
        f"{name}() wants the model with full weights, and here they may be shards",
        where=f"pm.{name}(...)",
        expected="the model itself",
        got="a parallel module",
        remedy=f"with pm.gathered() as model: model.{name}(...)",
    )


class ProxyModule(ModelProxy):
    """A module inside a parallel module: it holds stored shards and the mode, and computes nothing. ``isinstance``
    sees the class of the module that it stands for."""

    def __init__(self, path: str, source: SourceModel) -> None:
        super().__init__()
        self.__dict__.update(_path=path, _source=source)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the original module; ``type(part)`` is the proxy's."""
        return type(self._twin) if "_source" in self.__dict__ else ProxyModule

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported: always an Error."""
        self._refuse("a module of a parallel module is called on its own", remedy="call the whole module")

    def train(self, mode: bool = True) -> ProxyModule:
        """The module's own ``train``."""
        self._twin.train(mode)
        return self

    def get_extra_state(self) -> Any:
        """The module's own extra state."""
        return self._twin.get_extra_state()

    def set_extra_state(self, state: Any) -> None:
        """Set the module's own extra state."""
        self._twin.set_extra_state(state)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._set_on_twin(name, value):
            return
        if name.startswith("_") or name == "training":
            super().__setattr__(name, value)
        else:
            self._refuse(f"a module of a parallel module is given another {name!r}")

    def _get_name(self) -> str:
        return type(self._twin).__name__

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> NoReturn:
        what = "a module of a parallel module is given a hook, which would never be called"
        self._refuse(what, remedy="register it on the model before parallelize")

    register_forward_hook = register_forward_pre_hook = register_backward_hook = _refuse_hook
    register_full_backward_hook = register_full_backward_pre_hook = _refuse_hook


class ProxyRoot(ModelProxy):
    """The root of a proxy tree: changes of the model, or wrappers of its programs, are an error."""

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> NoReturn:
        """The parameters and buffers that ``DistributedDataParallel`` must ignore: an Error, as it must not wrap this.

        Raises:
            Error: always; it would reduce gradients that are reduced already.
        """
        raise Error(
            "a parallel module is put into a DistributedDataParallel",
            where="DistributedDataParallel(pm)",
            expected="pm alone: its gradients are those of the global batch",
            got="a wrapper that would reduce them once more",
            remedy="leave DistributedDataParallel out, and shard the batch over the ranks by a hint",
        )

    @property
    def module(self) -> nn.Module:
        """The module itself, as a wrapper such as ``DistributedDataParallel`` has it under this name, unless the model
        has one of its own."""
        own = self._modules.get("module")
        return self if own is None else own

    def __setattr__(self, name: str, value: Any) -> None:
        own = self.__dict__
        if name in own.get("_own", ()):  # whatever the model has under this name
            own[name] = value
            return
        if self._set_on_twin(name, value):
            return
        kept = (own.get(place, ()) for place in ("_modules", "_parameters", "_buffers"))
        if "_tree" in own and (any(name in each for each in kept) or name in vars(self._twin).keys() - STATE):
            self._refuse(f"{name!r} of a parallel module cannot be replaced", type(value).__name__)
        super().__setattr__(name, value)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise Error(
            "a parallel module cannot be pickled: programs and process groups are this process's own",
            where="torch.save(pm, ...)",
            expected="its state, or its plan",
            got="the module",
            remedy="torch.save(pm.full_state_dict(), path) and pm.plan.save(path), then parallelize again; "
            "pm.save_programs(folder) writes programs",
        )


def watch(state: ModelState) -> None:
    """Hook optimizers of stored shards, so that they step local shards."""
    update = state.compiled.captured.update
    stepped = {n for group in update.groups for n in group.names} if update else ()
    watch_optimizers(state.store, state.layouts(), stepped)


class ProxyTree:
    """The proxy tree of the model's modules under ``root``, and the stored tensors in it."""

    def __init__(self, root: ProxyRoot, model: nn.Module, source: SourceModel) -> None:
        self.root, self.source = root, source
        root.__dict__.update(_source=source, _path="")
        self.paths: list[tuple[str, ModelProxy]] = [("", root)]
        self._sizes = list[tuple[int, int, int]]()
        self._made: dict[int, nn.Module] = {id(model): root}
        self._grow(root, model, "")
        self.registered: list[tuple[dict[str, Any], str, torch.Tensor, str]] = []
        self.watched: list[SourceWeightsCheck] = []
        self._order = {name: i for i, (name, _) in enumerate(model.named_parameters())}

    def _grow(self, part: nn.Module, model: nn.Module, path: str) -> None:
        for name, child in model._modules.items():
            if child is None:
                continue
            made = self._made.get(id(child))
            if made is None:
                own = f"{path}.{name}" if path else name
                made = self._made[id(child)] = ProxyModule(own, self.source)
                self.paths.append((own, made))
                self._grow(made, child, own)
            part._modules[name] = made

    @property
    def names(self) -> tuple[str, ...]:
        """The model's parameters by name, in its order."""
        return tuple(self._order)

    def register(self, state: ModelState) -> None:
        """Make the stored shards parameters and buffers of the tree, under the model's own names and in their order.

        Whoever walks the modules finds them in the order of ``named_parameters()``: a copy that is held by a module of
        somebody else's (``AveragedModel``) is compared with them one by one.
        """
        self.registered = []
        watch(state)
        for name, shards in sorted(state.store.parameters.items(), key=lambda named: self._order.get(named[0], 0)):
            holder, leaf = self._holder(name)
            for place, shard in zip(self._places(name, holder, len(shards)), shards, strict=True):
                parameters = place._parameters
                parameters[leaf] = shard
                self.registered.append((parameters, leaf, shard, name))
        for name, tensors in state.store.buffers.items():
            holder, leaf = self._holder(name)
            for place, tensor in zip(self._places(name, holder, len(tensors)), tensors, strict=True):
                place._buffers[leaf] = tensor
                self.registered.append((place._buffers, leaf, tensor, name))
                if name not in state.names:
                    place._non_persistent_buffers_set.add(leaf)
        self._sizes = [*map(_size, self.paths)]

    def _places(self, name: str, holder: ModelProxy, count: int) -> list[ModelProxy]:
        """The modules that hold the shards of a parameter: its own; or a proxy for each shard."""
        if count == 1:
            return [holder]
        path = name.rpartition(".")[0]
        made: list[tuple[str, ModelProxy]] = [
            (f"{NUMBER}{i}", ProxyModule(f"{path}.{NUMBER}{i}", self.source)) for i in range(count)
        ]
        return [cast(ModelProxy, holder._modules.setdefault(own, part)) for own, part in made]

    def check(self) -> None:
        """Raise if somebody replaced a stored tensor, or changed watched state.

        Raises:
            Error: naming it.
        """
        for each in self.watched:
            each.check()
        self._check_children()
        for parameters, key, tensor, name in self.registered:
            if parameters.get(key) is not tensor:
                raise Error(
                    f"{name!r} of a parallel module was replaced by another tensor",
                    where="pm(...)",
                    expected="the stored shards, whose contents may change",
                    got="another tensor, as torch.func.functional_call puts in",
                    remedy="pm.load_full_state_dict(state_dict), or parameter.data.copy_(...), and call pm itself",
                )

    def _check_children(self) -> None:
        if (sizes := [*map(_size, self.paths)]) == self._sizes:
            return
        for (path, part), was, now in zip(self.paths, self._sizes, sizes, strict=True):
            container = isinstance(part._twin, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
            beside = part is self.root and not container and now[0] > was[0] and now[1:] == was[1:]
            if was != now and not beside:  # of a module that is put beside the model nothing is known, nor asked
                raise Error(
                    "modules of a parallel module, or what they hold, were changed, and its programs are of the model "
                    "as it was",
                    where=f"pm.{path} ({type(part._twin).__name__})" if path else "pm",
                    expected="{} modules, {} parameters, {} buffers".format(*was),
                    got="{} modules, {} parameters, {} buffers".format(*now),
                    remedy="change the model, and parallelize it again",
                )

    def _holder(self, name: str) -> tuple[ModelProxy, str]:
        """The module that holds a parameter or buffer, and the last part of its name. A child may be called as one of
        our methods is (``memory``, ``step``): it is not asked for as an attribute."""
        *path, leaf = name.split(".")
        holder: ModelProxy = self.root
        for each in path:
            inside = holder._modules[each]
            assert isinstance(inside, ModelProxy)
            holder = inside
        return holder, leaf


def _size(named: tuple[str, ModelProxy]) -> tuple[int, int, int]:
    own = named[1].__dict__
    return len(own["_modules"]), len(own["_parameters"]), len(own["_buffers"])
