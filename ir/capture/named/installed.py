"""What is installed, and no part of anybody's script."""

from __future__ import annotations

import csv
import os
import sys
import sysconfig
import weakref
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")})
"""Where code lies of which globals and closures are not looked at: no script changes those."""


SHARED = ("site-packages", "dist-packages")
"""The names of folders that nobody's script is in: of this Python, of the one below, of a user."""


def is_installed(code: CodeType) -> bool:
    """Whether code lies where nobody's script does."""
    return is_installed_file(code.co_filename)


def is_installed_file(path: str) -> bool:
    """The same of a file."""
    return path.startswith(INSTALLED) or _came_with_a_package(path)


@cache
def _came_with_a_package(path: str) -> bool:
    """Whether a file was put elsewhere that Python imports from: by ``pip install --target``, beneath a venv."""
    folders = [folder for folder in {*map(os.path.abspath, sys.path)} if path.startswith(os.path.join(folder, ""))]
    return any(path.startswith(_put_into(folder)) for folder in folders)


@cache
def _put_into(folder: str) -> tuple[str, ...]:
    """What of a folder was installed there: all of a shared one, else what the records of packages name."""
    if os.path.basename(folder) in SHARED:
        return (os.path.join(folder, ""),)
    put = set()
    for record in Path(folder).glob("*.dist-info/RECORD"):
        with record.open(encoding="utf-8", newline="") as lines:
            rows = [row[0].split("/") for row in csv.reader(lines) if row and row[0]]
        put |= {(parts[0], len(parts) > 1) for parts in rows if parts[0] != ".."}
    return tuple(os.path.join(folder, name, "") if inside else os.path.join(folder, name) for name, inside in put)


def is_installed_module(module: ModuleType) -> bool:
    """Whether a module of Python's is no part of anybody's script."""
    return getattr(module, "__file__", None) is None or is_installed_file(str(module.__file__))


def is_ours(thing: type | FunctionType) -> bool:
    """Whether a class or a function is of this package, which may lie beside somebody's script."""
    return str(thing.__module__).startswith("shardfx.")


def is_users_class(kind: type) -> bool:
    """Whether a class is somebody's own, and not installed."""
    if kind not in USERS:
        module = sys.modules.get(str(kind.__module__))
        installed = module is not None and kind.__module__ != "__main__" and is_installed_module(module)
        USERS[kind] = not installed and not is_ours(kind)
    return USERS[kind]


USERS: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()
