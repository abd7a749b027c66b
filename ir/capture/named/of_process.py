"""What code asks of installed modules, whose own code nobody looks into: a number or an object that it reads there
(``torch.backends.cudnn.benchmark``), what a function answers that takes nothing (``torch.get_num_threads()``), and the
environment."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial, reduce
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .code_names import cell_of, codes
from .installed import is_installed
from .reached import Chain, reached

Read = Callable[[], object]
ASKS = ("get", "is_", "are_", "has_")
"""How the names of functions begin that answer, and change nothing."""
ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))
CONSTANT = (torch.dtype, torch.layout, torch.memory_format, torch.Tensor, nn.Module, ModuleType)


def hooks_of_all() -> str:
    """The numbers of the hooks that every module of this process calls."""
    named = ("forward_pre", "forward", "backward_pre", "backward")
    return str([list(getattr(nn.modules.module, f"_global_{name}_hooks")) for name in named])


def of_process(names: Collection[str]) -> Iterator[tuple[str, Read]]:
    """The environment, if it is named."""
    if not ENVIRONMENT.isdisjoint(names):
        yield "os.environ", partial(dict, os.environ)


def answers(function: FunctionType) -> Iterator[tuple[str, Read]]:
    """What a function's code reads of modules, beyond their functions and classes, by name."""
    for code in codes(function.__code__):
        found = reached(code)
        for chain in sorted(found.chains | found.called):
            if not isinstance(_first(function, chain[0]), ModuleType) and len(chain) > 1:
                continue
            read: Read = partial(_follow, function, chain)
            if chain in found.called and chain[-1].startswith(ASKS) and _is_installed(read()):
                read = partial(_answer, read)
            elif len(chain) == 1:
                continue
            value = read()
            if value is None or callable(value) or isinstance(value, CONSTANT) or value is sys.modules:
                continue
            yield ".".join(chain), read


def _first(function: FunctionType, name: str) -> object:
    """What a name is to a function's code."""
    free = function.__code__.co_freevars
    if name in free and function.__closure__:
        return cell_of(function.__closure__[free.index(name)])
    return function.__globals__.get(name)


def _follow(function: FunctionType, chain: Chain) -> Any:
    """What a chain of names leads to; None, where it ends before."""
    try:
        return reduce(getattr, chain[1:], _first(function, chain[0]))
    except AttributeError:
        return None


def _is_installed(function: object) -> bool:
    """Whether a function is of no script."""
    code = getattr(function, "__code__", None)
    return isinstance(function, BuiltinFunctionType) if code is None else is_installed(code)


def _answer(read: Read) -> object:
    """What a function answers; None, where it wants arguments."""
    asked = read()
    try:
        return asked() if callable(asked) else asked
    except Exception:  # whatever it says of that
        return None
