"""The folders: who may import whom, what is packaged, and how long a file may grow."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "ir": {"ir"},
    "passes": {"ir", "passes"},
    "runtime": {"ir", "runtime"},
    "visualize": {"ir", "visualize"},
}
FOLDERS = ("shardfx", *MAY_IMPORT)
LONGEST = 450


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def imported(path: Path) -> list[tuple[int, str]]:
    """(line, absolute module) of each import of ours in the file, wherever in the file it stands."""
    package = ["shardfx", *path.relative_to(ROOT).parent.parts]
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from shardfx import ir` and `from .. import ir` name the folder last.
            found += [(node.lineno, f"{module}.{alias.name}") for alias in node.names]
    return [(line, name) for line, name in found if name.split(".")[0] in FOLDERS]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_lies_below(folder: str) -> None:
    allowed = {f"shardfx.{name}" for name in MAY_IMPORT[folder]}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for line, name in imported(path)
        if ".".join(name.split(".")[:2]) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("folder", ["shardfx", "tests", "examples", "benchmarks"])
def test_nobody_imports_a_folder_by_its_bare_name(folder: str) -> None:
    """In a checkout `import ir` works too, and would make a second copy of every class."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for line, name in imported(path)
        if not name.startswith("shardfx")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_packaged_folders_are_those_on_disk() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    on_disk = set()
    for init in (path for path in python_files(*FOLDERS) if path.name == "__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        on_disk.add(".".join(parts if parts[0] == "shardfx" else ("shardfx", *parts)))
    without_init = {path.parent for path in python_files(*FOLDERS) if not (path.parent / "__init__.py").exists()}
    assert set(tool["packages"]) == on_disk
    assert tool["package-dir"] == {"shardfx": "shardfx", **{f"shardfx.{name}": name for name in MAY_IMPORT}}
    assert not without_init


def test_no_file_has_two_subjects() -> None:
    files = python_files(*FOLDERS, "tests", "examples", "benchmarks", "docs")
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert not {name: length for name, length in lengths.items() if length > LONGEST}


def test_a_checkout_imports_without_being_installed(tmp_path: Path) -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT)!r}); import shardfx.ir, shardfx.ir.mesh; print(shardfx.ir.__file__)"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == ROOT / "ir" / "__init__.py"
