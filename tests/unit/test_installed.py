"""What is installed is told from somebody's script wherever it lies; a script of many files is looked at once."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from torch import nn

from shardfx.ir.capture.python_state import python_state
from shardfx.ir.capture.python_state.bytecode import led_to
from shardfx.ir.capture.python_state.python_modules import is_installed_file

RECORD = "kit/__init__.py,sha256=x,1\nkit/parts/one.py,sha256=x,1\n,,\nalone.py,sha256=x,1\n../../bin/kit,sha256=x,1\n"


def test_what_was_put_into_a_folder_is_installed_and_a_script_beside_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kit-1.0.dist-info").mkdir()
    (tmp_path / "kit-1.0.dist-info" / "RECORD").write_text(RECORD, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("kit/__init__.py", "kit/parts/one.py", "alone.py"):
        assert is_installed_file(str(tmp_path / name))
    for name in ("script.py", "kit_of_mine/one.py", "alone_too/one.py"):
        assert not is_installed_file(str(tmp_path / name))


def test_a_shared_folder_of_another_python_is_installed_where_it_is_imported_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below, elsewhere = tmp_path / "below" / "dist-packages", tmp_path / "elsewhere" / "dist-packages"
    monkeypatch.syspath_prepend(below)
    assert is_installed_file(str(below / "kit" / "one.py"))
    assert not is_installed_file(str(elsewhere / "kit" / "one.py"))


@pytest.mark.long
def test_a_script_of_many_files_that_know_each_other_is_looked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each file imports all others, and makes up names when it runs: what was looked at once for each of its readers
    took their product, in each round."""
    count, package = 40, tmp_path / "many_files"
    package.mkdir()
    (package / "__init__.py").touch()
    imports = "\n".join(f"    from many_files import part{i}" for i in range(count))
    for i in range(count):
        classes = "\n".join(
            f"class K{i}x{j}:\n    held = {j}\n    def ask(self, name):\n        return getattr(self, name)"
            for j in range(10)
        )
        (package / f"part{i}.py").write_text(
            f"{classes}\ndef of{i}(name):\n{imports}\n    return getattr(part0, name)\n"
        )
    top = "from torch import nn\nfrom many_files.part0 import of0\nclass Top(nn.Module):\n"
    (package / "top.py").write_text(f"{top}    def forward(self, x):\n        return x if x is None else of0('K0x0')\n")
    monkeypatch.syspath_prepend(tmp_path)
    for i in range(count):
        importlib.import_module(f"many_files.part{i}")
    made: nn.Module = importlib.import_module("many_files.top").Top()
    looked: list[type] = []

    def noted(kind: type, *begin: Any) -> list[FunctionType]:
        looked.append(kind)
        return led_to(kind, *begin)

    monkeypatch.setattr(python_state, "led_to", noted)
    read = python_state.PythonState(made).named()
    assert max(Counter(looked).values()) < 20  # rounds, and ways to begin; there are 40 readers of each
    assert {"K0x0", f"K{count - 1}x9"} <= read.keys()
    for name in [name for name in sys.modules if name.startswith("many_files")]:
        monkeypatch.delitem(sys.modules, name)
