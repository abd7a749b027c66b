"""The module tree of a parallel module: proxies of the model's modules with the stored shards."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardfx.ir.capture.frontend.model_preparation import STATE
from shardfx.ir.errors import Error
from shardfx.module.model_state import ModelState, SourceModel

WHOLE = ("generate", "save_pretrained", "push_to_hub")
"""Methods that want the full weights of the model."""
AGAIN = "change the model, and parallelize it again"
REINITIALISE = "initialise the model before parallelize; or pm.load_full_state_dict(state_dict)"


def _operator(name: str) -> Callable[..., Any]:
    """An operator as the class of a proxy's module defines it."""

    def operate(proxy: ModelProxy, *args: Any) -> Any:
        kind = type(proxy._twin)
        if not hasattr(kind, name):
            raise TypeError(f"{kind.__name__!r} object has no {name}")
        return getattr(kind, name)(proxy, *args)

    return operate


class ModelProxy(nn.Module):
    """Stands for a module of the model: nn.Module's own methods, and all else delegated to ``_twin``, the user's own
    module. Another module or tensor in it is an error: the plan was made of it as it was."""

    @property
    def _twin(self) -> nn.Module:
        source: SourceModel = self.__dict__["_source"]
        return source.at(self.__dict__["_path"])

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
            what = f"{name}() wants the model with full weights, and here they may be shards"
            return partial(self._refuse, what, remedy=f"with pm.gathered() as model: model.{name}(...)")
        found = inspect.getattr_static(kind, name, own)
        if found is own:
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

    __iter__, __len__, __contains__ = map(_operator, ("__iter__", "__len__", "__contains__"))

    def __getitem__(self, index: Any) -> Any:
        """Indexing as in the model's class: a part of a list or a dict of modules."""
        if isinstance(index, slice) and isinstance(self._twin, (nn.Sequential, nn.ModuleList)):
            return nn.ModuleList(list(self)[index])
        return _operator("__getitem__")(self, index)

    def __bool__(self) -> bool:
        return True

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *dir(self._twin)]  # type: ignore[no-untyped-call]

    def _refuse_new(self, name: str, *args: Any, **kwargs: Any) -> NoReturn:
        what = "modules of a parallel module, or what they hold, were changed; its programs are of the model as it was"
        self._refuse(what, got=f"a new {name!r}")

    add_module = register_parameter = register_buffer = _refuse_new

    def apply(self, fn: Any) -> NoReturn:
        """Not supported, as it is no module of its class, and its parameters may be shards: always an Error."""
        self._refuse("apply() cannot do to shards what it does to a model", remedy=REINITIALISE)

    @property
    def _where(self) -> str:
        return f"{self.__dict__.get('_path') or 'pm'} ({type(self._twin).__name__})"

    def _refuse(
        self,
        what: str,
        *args: object,
        expected: str = "the model as it was parallelized",
        got: object = None,
        remedy: str = AGAIN,
        **kwargs: object,
    ) -> NoReturn:
        raise Error(what, where=self._where, expected=expected, got=got, remedy=remedy)


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
            self._refuse(f"{name!r} of a parallel module cannot be replaced", got=type(value).__name__)
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


class ProxyTree:
    """The proxy tree of the model's modules under ``root``, and the stored tensors in it."""

    def __init__(self, root: ProxyRoot, model: nn.Module, source: SourceModel) -> None:
        self.root, self.source = root, source
        self.names = tuple(name for name, _ in model.named_parameters())
        """The model's parameters by name, in its order."""
        root.__dict__.update(_source=source, _path="")
        made: dict[nn.Module, ModelProxy] = {model: root}
        for path, module in model.named_modules():
            made.setdefault(module, root if module is model else ProxyModule(path, source))
        for module, proxy in made.items():
            proxy._modules.update({name: made[child] for name, child in module._modules.items() if child is not None})
        self._placed: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        """Where each stored tensor stands."""

    def register(self, state: ModelState) -> None:
        """Make what is stored parameters and buffers of the tree, under the model's own names and in their order.

        Whoever walks the modules finds them in the order of ``named_parameters()``: a copy that is held by a module of
        somebody else's (``AveragedModel``) is compared with them one by one.
        """
        self._placed = []
        order = {name: i for i, name in enumerate(self.names)}
        for name, parameter in sorted(state.store.parameters.items(), key=lambda named: order.get(named[0], 0)):
            holder, leaf = self._place(name)
            self._put(holder._parameters, leaf, parameter)
        for name, tensor in state.store.buffers.items():
            holder, leaf = self._place(name)
            self._put(holder._buffers, leaf, tensor)
            if name not in state.names:
                holder._non_persistent_buffers_set.add(leaf)

    def _put(self, held: dict[str, Any], leaf: str, tensor: torch.Tensor) -> None:
        held[leaf] = tensor
        self._placed.append((held, leaf, tensor))

    def check(self) -> None:
        """Check that the tensors of the tree are the stored ones.

        Raises:
            Error: another one stands in the place of one.
        """
        for held, leaf, tensor in self._placed:
            if held.get(leaf) is not tensor:
                raise Error(
                    "a tensor of a parallel module was replaced",
                    where=leaf,
                    expected="the model as it was parallelized",
                    got="another one, as torch.func.functional_call and torch.export put in",
                    remedy="pm.load_full_state_dict(state_dict), or parameter.data.copy_(...), and call pm itself; "
                    "torch.func and torch.export take the model: with pm.gathered() as model: ...",
                )

    def _place(self, name: str) -> tuple[ModelProxy, str]:
        """The module that holds a value, and under which name. A child may be called as one of our methods is
        (``memory``, ``step``): it is not asked for as an attribute."""
        *path, leaf = name.split(".")
        holder: Any = self.root
        for each in path:
            holder = holder._modules[each]
        return holder, leaf
