"""The modules of Python's that code reaches when it runs, beside those that its own module has under a name:

import options      from options import SCALE      sys.modules["options"].SCALE      eval("options.SCALE")
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dis import get_instructions
from functools import cache
from importlib.util import resolve_name
from types import CodeType, FunctionType, ModuleType

from .code_names import codes
from .installed import is_installed_module
from .reached import reached

OWN = frozenset(("f_globals", "__globals__", "eval", "exec"))
"""What code names that reaches all variables of its module."""
OTHERS = frozenset(("import_module", "__import__", *OWN))
"""What code names that may reach any module, by a text; ``sys.modules`` is one, too."""


def reaches_its_module(function: FunctionType) -> bool:
    """Whether a function may read each variable of its module, by a name that nobody sees."""
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
