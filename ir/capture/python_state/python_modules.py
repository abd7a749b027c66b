"""Python modules that code reaches: which are installed, which it imports at run time, and what it asks of them.

import options      from options import SCALE      sys.modules["options"].SCALE      eval("options.SCALE")

Of installed modules, whose code is not followed: a number or an object that it reads there
(``torch.backends.cudnn.benchmark``), what a function without arguments answers (``torch.get_num_threads()``), and the
environment.
"""

from __future__ import annotations

import csv
import os
import sys
import sysconfig
import weakref
from collections.abc import Callable, Collection, Iterator
from dis import get_instructions
from functools import cache, partial, reduce
from importlib.util import resolve_name
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

from .bytecode import Chain, cell_of, codes, reached

INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")})
"""Folders of installed code, whose globals and closures are not followed: no script changes those."""


SHARED = ("site-packages", "dist-packages")
"""Names of folders of installed code: of this Python, of the one below, of a user."""


def is_installed(code: CodeType) -> bool:
    """Whether code is installed."""
    return is_installed_file(code.co_filename)


def is_installed_file(path: str) -> bool:
    """Whether a file is installed."""
    return path.startswith(INSTALLED) or _came_with_a_package(path)


@cache
def _came_with_a_package(path: str) -> bool:
    """Whether a file was installed elsewhere on ``sys.path``: by ``pip install --target``, beneath a venv."""
    folders = [folder for folder in {*map(os.path.abspath, sys.path)} if path.startswith(os.path.join(folder, ""))]
    return any(path.startswith(_put_into(folder)) for folder in folders)


@cache
def _put_into(folder: str) -> tuple[str, ...]:
    """The installed paths of a folder: all of site-packages, else what the records of packages name."""
    if os.path.basename(folder) in SHARED:
        return (os.path.join(folder, ""),)
    put = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as lines:
            rows = [row[0].split("/") for row in csv.reader(lines) if row and row[0]]
        put |= {(parts[0], len(parts) > 1) for parts in rows if parts[0] != ".."}
    return tuple(os.path.join(folder, name, "") if inside else os.path.join(folder, name) for name, inside in put)


def is_installed_module(module: ModuleType) -> bool:
    """Whether a Python module is installed."""
    return getattr(module, "__file__", None) is None or is_installed_file(str(module.__file__))


def is_ours(thing: type | FunctionType) -> bool:
    """Whether a class or a function is of shardfx, which may be beside the user's script."""
    return str(thing.__module__).startswith("shardfx.")


def is_users_class(kind: type) -> bool:
    """Whether a class is the user's, and not installed."""
    if kind not in USERS:
        module = sys.modules.get(str(kind.__module__))
        installed = module is not None and kind.__module__ != "__main__" and is_installed_module(module)
        USERS[kind] = not installed and not is_ours(kind)
    return USERS[kind]


USERS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()


OWN = frozenset(("f_globals", "__globals__", "eval", "exec"))
"""Names by which code reaches all variables of its module."""
OTHERS = frozenset(("import_module", "__import__", *OWN))
"""Names by which code may reach any module by a text; ``sys.modules`` is one, too."""


def reaches_its_module(function: FunctionType) -> bool:
    """Whether a function may read any variable of its module by a name made at run time."""
    return any(not OWN.isdisjoint(code.co_names) for code in codes(function.__code__))


def imported(function: FunctionType) -> Iterator[ModuleType]:
    """The modules that a function imports when it runs, or may reach by their names; of scripts, not installed ones."""
    there = function.__globals__
    names = {*_names(function, str(there.get("__package__") or ""))}
    if any(_reaches_others(code) for code in codes(function.__code__)):
        texts = {each for code in codes(function.__code__) for each in code.co_consts if isinstance(each, str)}
        names |= {*texts, str(there.get("__name__"))}
    if reaches_its_module(function):
        names |= {each.__name__ for each in there.values() if isinstance(each, ModuleType)}
    for name in sorted(names):
        module = sys.modules.get(name)
        if isinstance(module, ModuleType) and not is_installed_module(module):
            yield module


def _reaches_others(code: CodeType) -> bool:
    return not OTHERS.isdisjoint(code.co_names) or any(chain[-1] == "modules" for chain in reached(code).chains)


def _names(function: FunctionType, package: str) -> Iterator[str]:
    for code in codes(function.__code__):
        yield from _imports(code, package)


@cache
def _imports(code: CodeType, package: str) -> frozenset[str]:
    """The names of modules that code imports, and of those that may be in them."""
    return frozenset(_imported_by(code, package))


def _imported_by(code: CodeType, package: str) -> Iterator[str]:
    level, name = 0, ""
    last: list[object] = []
    for each in get_instructions(code):
        if each.opname.startswith("LOAD_CONST") or each.opname == "LOAD_SMALL_INT":
            last.append(each.argval)
        elif each.opname == "IMPORT_NAME":
            level = next((value for value in last[-2:] if isinstance(value, int)), 0)
            name = resolve_name("." * level + str(each.argval), package) if level and package else str(each.argval)
            parts = name.split(".")
            yield from (".".join(parts[: count + 1]) for count in range(len(parts)))
        elif each.opname == "IMPORT_FROM":
            yield f"{name}.{each.argval}"


Read = Callable[[], object]
ASKS = ("get", "is_", "are_", "has_")
"""Prefixes of functions that answer, and change nothing."""
ENVIRONMENT = frozenset(("environ", "environb", "getenv", "getenvb"))
CONSTANT = (torch.dtype, torch.layout, torch.memory_format, torch.Tensor, nn.Module, ModuleType)


def hooks_of_all() -> str:
    """The ids of the global module hooks."""
    named = ("forward_pre", "forward", "backward_pre", "backward")
    return str([list(getattr(nn.modules.module, f"_global_{name}_hooks")) for name in named])


def of_process(names: Collection[str]) -> Iterator[tuple[str, Read]]:
    """The environment, if it is named."""
    if not ENVIRONMENT.isdisjoint(names):
        yield "os.environ", partial(dict, os.environ)


def answers(function: FunctionType) -> Iterator[tuple[str, Read]]:
    """The values that a function's code reads of modules, beside functions and classes, by name."""
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
    """The value of a name in a function's code."""
    free = function.__code__.co_freevars
    if name in free and function.__closure__:
        return cell_of(function.__closure__[free.index(name)])
    return function.__globals__.get(name)


def _follow(function: FunctionType, chain: Chain) -> Any:
    """The value of a chain of names; None where it ends before."""
    try:
        return reduce(getattr, chain[1:], _first(function, chain[0]))
    except AttributeError:
        return None


def _is_installed(function: object) -> bool:
    """Whether a function is installed."""
    code = getattr(function, "__code__", None)
    return isinstance(function, BuiltinFunctionType) if code is None else is_installed(code)


def _answer(read: Read) -> object:
    """The result of a function without arguments; None where it needs some."""
    asked = read()
    try:
        return asked() if callable(asked) else asked
    except Exception:  # whatever it says of that
        return None
