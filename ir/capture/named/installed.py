"""What is installed, and no part of anybody's script."""

from __future__ import annotations

import sysconfig
from types import CodeType

INSTALLED = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "purelib", "platlib")})
"""Where code lies of which globals and closures are not looked at: no script changes those."""


def is_installed(code: CodeType) -> bool:
    """Whether code lies where nobody's script does."""
    return is_installed_file(code.co_filename)


def is_installed_file(path: str) -> bool:
    """The same of a file."""
    return path.startswith(INSTALLED)
