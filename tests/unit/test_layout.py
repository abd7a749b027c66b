"""The house's rules: who may import whom, how much a folder and a file may hold, what is packaged and documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from torch import fx

from shardfx.ir.ops.computing.library import SOURCES
from shardfx.ir.ops.local_ops import BY_FUNCTION
from shardfx.runtime.export_programs import own_files
from tests.house import FOLDERS, MODULES, ROOT, RULES, TOP, imported, imports, package_of, python_files

IN_FUNCTIONS = {
    ("ir.graph", "ir.text.printer"),  # which knows graphs
    ("ir.program.rank_program", "ir.program.program_text"),
    ("module.planned_module", "visualize"),  # needs Graphviz, which only pictures do
    ("memory.rank_memory", "visualize"),
    ("schedules.timeline", "visualize"),
    ("images.receptive_field", "visualize"),
    ("memory.rank_memory", "report.tables"),
    ("report.figures", "report.tables"),  # need rich, which only what is printed does
    ("runtime.compiled_programs", "runtime.inductor_passes"),  # needs Inductor, which only pm.compile() does
    ("module.execution_target", "runtime.distributed.process_store"),  # nothing of torch.distributed for virtual ranks
    ("module.execution_target", "runtime.distributed.process_engine"),
}
"""The imports that stand in a function, and why."""


OVER = "parts over their budget"
"""Budgets are printed by ``python -m tests.house``; not every part has reached its own."""


@pytest.mark.parametrize("rule", [name for name in RULES if name != OVER])
def test_the_tree_keeps_its_rules(rule: str) -> None:
    assert not RULES[rule]()


@pytest.mark.long
@pytest.mark.parametrize("folder", ["shardfx", "tests", "examples", "benchmarks"])
def test_nobody_imports_a_folder_by_its_bare_name(folder: str) -> None:
    """In a checkout `import ir` works too, and would make a second copy of every class."""
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for line, name, _ in imported(path)
        if not name.startswith("shardfx")
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_top_of_a_file() -> None:
    inside = {(module, other) for module, others in imports() for other, when in others if when == "function"}
    assert inside == IN_FUNCTIONS


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = [(module, other) for module, others in imports() for other, when in others if not when]
    assert [sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(edges)) if len(group) > 1] == []


def documented(module: str, owner: list[str], node: ast.ClassDef | ast.FunctionDef) -> bool:
    """Whether the definition has a docstring, or is the method of a base class that has one."""
    if ast.get_docstring(node):
        return True
    found: Any = importlib.import_module(f"shardfx.{module}" if module != "shardfx" else module) if owner else None
    for name in owner:
        found = getattr(found, name)
    return any(getattr(vars(base).get(node.name), "__doc__", None) for base in getattr(found, "__mro__", ())[1:])


def definitions(body: Iterable[ast.stmt], owner: tuple[str, ...] = ()) -> Iterator[tuple[list[str], Any]]:
    """The public functions and classes, and the public methods of these, each with the classes around it."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            yield list(owner), node
            if isinstance(node, ast.ClassDef):
                yield from definitions(node.body, (*owner, node.name))


@pytest.mark.long
def test_what_is_public_is_documented() -> None:
    lacking = [
        f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        for module, path in MODULES.items()
        for owner, node in definitions(ast.parse(path.read_text(encoding="utf-8")).body)
        if not documented(module, owner, node)
    ]
    assert not lacking, "\n".join(lacking)


def test_docstrings_name_modules_that_are_there() -> None:
    """Relative to the module's package, or in full. ``:class:`.Fact``` names a class, and is not looked for."""
    named = re.compile(r":(?:mod|func|class):`~?(?:shardfx(?=\.\w+\.))?(\.+)([a-z_]\w*(?:\.[a-z_]\w*)*)")
    wrong = []
    for module, path in MODULES.items():
        for match in named.finditer(path.read_text(encoding="utf-8")):
            dots, parts = match[1], match[2].split(".")
            package = [] if "shardfx." in match[0] else package_of(module).removeprefix("shardfx").split(".")
            above = [*filter(None, package)][: len(package) + 1 - len(dots)]
            if not {".".join([*above, *parts[: i + 1]]) for i in range(len(parts))} & {*MODULES}:
                wrong.append(f"{path.relative_to(ROOT)} names {match[0]}")
    assert not wrong, "\n".join(wrong)


def test_the_packaged_folders_are_those_on_disk() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    on_disk = set()
    for init in (path for path in python_files(*FOLDERS) if path.name == "__init__.py"):
        parts = init.parent.relative_to(ROOT).parts
        on_disk.add(".".join(parts if parts[0] == "shardfx" else ("shardfx", *parts)))
    without_init = {path.parent for path in python_files(*FOLDERS) if not (path.parent / "__init__.py").exists()}
    assert set(tool["packages"]) == on_disk
    assert tool["package-dir"] == {"shardfx": "shardfx", **{f"shardfx.{name}": name for name in TOP}}
    assert not without_init


def test_files_that_saved_programs_take_along_import_torch_alone() -> None:
    graph = fx.Graph()
    for target in (*SOURCES, *BY_FUNCTION):
        graph.call_function(target)
    files = own_files(graph)
    assert {"memory_ops", "loop_ops", "fused_attention"} <= {*files}
    ours = re.compile(r"^\s*(?:from|import) shardfx\b", re.MULTILINE)
    assert not [name for name, path in files.items() if ours.search(Path(path).read_text(encoding="utf-8"))]


@pytest.mark.long
def test_a_checkout_imports_without_being_installed(tmp_path: Path) -> None:
    """And without what reports and pictures alone need."""
    absent = "sys.modules['rich'] = sys.modules['pygraphviz'] = None"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {absent}; import shardfx.ir; print(shardfx.ir.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == ROOT / "ir" / "__init__.py"
