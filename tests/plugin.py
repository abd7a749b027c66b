"""Plugins for tests: the packages that the docs show, written out as files, and packages with something wrong."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```\w+ file=(\S+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def write_package(page: str, folder: Path) -> Path:
    """Write the files that a page of docs/ shows; gives the folder."""
    blocks = BLOCK.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert blocks, f"docs/{page} shows no files"
    for name, text in blocks:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder


def install(target: Path, *packages: Path) -> None:
    """Install packages into a folder, without the network."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-index"]
    command += ["--no-deps", "--no-build-isolation", "--target", str(target), *map(str, packages)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def fake_distribution(folder: Path, name: str, entry_points: dict[str, dict[str, str]], **modules: str) -> None:
    """What an installed distribution looks like on sys.path: its metadata and its modules, without pip."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in each.items()) for group, each in entry_points.items()]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    for module, text in modules.items():
        (folder / f"{module}.py").write_text(text, encoding="utf-8")
