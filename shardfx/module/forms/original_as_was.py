"""The model that a parallel module was made of, and what became of it since: programs are of the model as it was.

    model.act = nn.GELU()        model.config = other        model.head.weight = model.embed.weight

Programs that were made before see none of these, so each is an error at the next call. Its modes (``eval()``) and the
content of its weights are its own: a script may go on with it beside the parallel module.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, NoReturn

from torch import nn

from shardfx.ir.capture.frontend.forward_hooks import is_users
from shardfx.ir.capture.python_state.bytecode import CodeNames, set_by_calls
from shardfx.ir.capture.python_state.python_values import ATOMS, STATE, ValueReader, is_apart
from shardfx.ir.errors import Error
from shardfx.module.held.original import Watch

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Text(NamedTuple):
    """What stands for a value with tensors or modules in it, which is not to be kept."""

    said: str


class ModuleAsWas(NamedTuple):
    """What a module was; it is not kept."""

    path: str
    module: weakref.ref[nn.Module]
    kind: type
    children: Mapping[str, weakref.ref[nn.Module] | None]
    hooks: list[int]
    attributes: Mapping[str, object]
    size: int


class OriginalAsWas:
    """What a model was.

    Args:
        names: what its code names.
    """

    def __init__(self, model: nn.Module, names: CodeNames) -> None:
        self._names, self._contents = names, ValueReader(names)
        self._model = weakref.ref(model)
        self._was = [self._of(path, module) for path, module in model.named_modules()]
        self._ties, self._parameters = _ties(model), list[int]()

    def __deepcopy__(self, memo: object) -> OriginalAsWas:
        return self

    def _of(self, path: str, module: nn.Module) -> ModuleAsWas:
        children = {name: None if child is None else weakref.ref(child) for name, child in module._modules.items()}
        own = vars(module)
        held = {name: own[name] for name in self._read(module)}
        kept = {n: v if is_apart(v) else Text(self._contents.said(v)) for n, v in held.items()}
        return ModuleAsWas(path, weakref.ref(module), type(module), children, _hooks(module), kept, len(own))

    def _read(self, module: nn.Module) -> Iterable[str]:
        """The attributes that the code reads, and does not set itself."""
        set_there = set_by_calls(type(module))
        return (n for n in self._names.of(module, vars(module).keys() - STATE) if n not in set_there)

    def check(self) -> None:
        """Raise if the model is not what it was.

        Raises:
            Error: naming the module, and what is other in it.
        """
        model = self._model()
        if model is None:
            return
        parameters: list[int] = []
        for was in self._was:
            module = was.module()
            if module is None:
                continue  # of which its parent says more
            parameters += map(id, module._parameters.values())
            if type(module) is not was.kind:
                _refuse(was, f"a {type(module).__name__}, and was a {was.kind.__name__}")
            if module._modules or was.children:
                self._check_children(was, module._modules)
            if _hooks(module) != was.hooks:
                _refuse(was, "another hook")
            self._check_attributes(was, module)
        if parameters != self._parameters and _ties(model) not in (self._ties, None):
            _refuse(self._was[0], "other parameters of it are one, or are not any more")
        self._parameters = parameters  # none of which is another one, as long as these are the same

    def _check_children(self, was: ModuleAsWas, now: Mapping[str, nn.Module | None]) -> None:
        for name, child in now.items():
            known = was.children.get(name, self._model)
            if child is not (known and known()):
                _refuse(was, f"another module {name!r}" + (f", a {type(child).__name__}" if child is not None else ""))
        if len(now) != len(was.children):
            _refuse(was, f"no module {next(name for name in was.children if name not in now)!r}")

    def _check_attributes(self, was: ModuleAsWas, module: nn.Module) -> None:
        own = vars(module)
        for name, kept in was.attributes.items():
            if (now := own.get(name, was)) is not kept and not self._same(kept, now):
                _refuse(was, f"another {name!r}" if now is not was else f"no {name!r}")
        if len(own) != was.size:
            new = next((name for name in self._read(module) if name not in was.attributes), None)
            if new is not None:
                _refuse(was, f"a {new!r}, which the code reads")

    def _same(self, kept: object, now: object) -> bool:
        if isinstance(kept, Text):
            return kept.said == self._contents.said(now)
        if isinstance(kept, ATOMS):
            return type(kept) is type(now) and bool(kept == now)
        return self._contents.said(kept) == self._contents.said(now)


def _hooks(module: nn.Module) -> list[int]:
    """The numbers of a script's hooks."""
    own = vars(module)
    held = [each for kind in HOOKS if (each := own.get(kind))]
    return [key for each in held for key, hook in each.items() if type(hook) is not Watch and is_users(hook)]


def _ties(model: nn.Module) -> list[int] | None:
    """For each parameter the number of the first that is the same one; None, where the model has no content now."""
    first: dict[int, int] = {}
    every: list[Any] = [p for module in model.modules() for p in module._parameters.values()]
    if any(p is not None and p.is_meta for p in every):
        return None
    return [first.setdefault(id(p), place) for place, p in enumerate(every)]


def _refuse(was: ModuleAsWas, got: str) -> NoReturn:
    raise Error(
        "the model was changed after parallelize, and the parallel module is of the model as it was",
        where=f"{was.path or 'the model'} ({was.kind.__name__})",
        expected="the model as it was parallelized",
        got=got,
        remedy="parallelize it again; a model that is to go its own way is a copy: "
        "parallelize(copy.deepcopy(model), mesh, hints)",
    )
