"""What is installed, and no part of anybody's script."""

from __future__ import annotations

import sys
import sysconfig
import weakref
from types import CodeType, FunctionType, ModuleType

INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")})
"""Where code lies of which globals and closures are not looked at: no script changes those."""


def is_installed(code: CodeType) -> bool:
    """Whether code lies where nobody's script does."""
    return is_installed_file(code.co_filename)


def is_installed_file(path: str) -> bool:
    """The same of a file."""
    return path.startswith(INSTALLED)


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
