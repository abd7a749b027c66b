"""Forward hooks of a model: what they compute is captured; hooks that only observe would never be called again."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from shardfx.ir.capture.source_locations import is_user_file

from .model_preparation import refuse_hook

Hook = Callable[..., Any]
LIBRARIES = ("transformers.utils.output_capturing", "transformers.modeling_utils")
"""Modules whose hooks are a part of what forward returns (a model has them once it was called), or have inputs want a
gradient (as ``gradient_checkpointing_enable()`` does); they are captured with it."""


class WatchedHooks:
    """A twin of the model, whose forward hooks are observed while it is traced."""

    def __init__(self, model: nn.Module) -> None:
        self._seen: dict[tuple[str, str], bool] = {}
        """Whether each hook, by path and name, changed the program."""
        self._twins: dict[int, nn.Module] = {}
        hooked = any(is_users(hook) for module in model.modules() for hook in _hooks(module))
        self.model = self._twin(model, "") if hooked else model

    def check(self) -> None:
        """Refuse hooks that were called, returned nothing, and changed nothing.

        Raises:
            Error: naming the module and the hook.
        """
        for (where, name), useful in self._seen.items():
            if not useful:
                refuse_hook(where, f"the forward hook {name}, which only looks,", "let forward return what it looks at")

    def _twin(self, module: nn.Module, path: str) -> nn.Module:
        if id(module) in self._twins:
            return self._twins[id(module)]
        made = self._twins[id(module)] = module.__new__(type(module))
        made.__dict__.update(module.__dict__)
        children = module._modules.items()
        own = made.__dict__
        own["_modules"] = {n: child and self._twin(child, f"{path}.{n}".lstrip(".")) for n, child in children}
        where = f"{path or 'the model'} ({type(module).__name__})"
        for kind in ("_forward_hooks", "_forward_pre_hooks"):
            hooks = getattr(module, kind)
            own[kind] = OrderedDict(
                (k, self._watched(hook, where) if is_users(hook) else hook) for k, hook in hooks.items()
            )
        return made

    def _watched(self, hook: Hook, where: str) -> Hook:
        key = where, getattr(hook, "__qualname__", None) or type(hook).__name__

        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            before = {name: id(value) for name, value in vars(module).items()}
            result = hook(module, *args, **kwargs)
            changed = before != {name: id(value) for name, value in vars(module).items()}
            self._seen[key] = self._seen.get(key, False) or result is not None or changed
            return result

        return watched


def _hooks(module: nn.Module) -> Iterable[Hook]:
    return (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def is_users(hook: Hook) -> bool:
    """Whether a hook is the user's code, not torch's or a library's."""
    function = inspect.unwrap(hook)
    if getattr(function, "__module__", "") in LIBRARIES:
        return False
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    return code is not None and is_user_file(code.co_filename)
