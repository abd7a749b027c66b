"""The house's rules: who may import whom, how much a folder and a file may hold, what is packaged and documented."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "ir": {"ir"},
    "passes": {"ir", "passes"},
    "runtime": {"ir", "runtime"},
    "visualize": {"ir", "visualize"},
}
"""The folders at the top; ``shardfx`` may import all of them."""
FOLDERS = ("shardfx", *MAY_IMPORT)

RULES, GRAPHS = ("ir", "ir.rules"), ("ir", "ir.ops", "ir.ops.computing", "ir.ops.pools", "ir.ops.loop")
ONE_OP = (*GRAPHS, "ir.rules")
CAPTURE = (*ONE_OP, "ir.capture.canonical", "ir.capture.frontend")
PROGRAMS = (*GRAPHS, "ir.program", "ir.program.loops")
PROOF = (*PROGRAMS, "ir.cost", "ir.rules", "runtime", "runtime.verify.proof")
CLOCKS = ("ir.cost", "ir.rules", "ir.schedule", "ir.timing", "runtime", "visualize")
SUB_PACKAGES: dict[str, tuple[str, ...]] = {
    "ir": ("ir.schedule", "ir.text"),  # a graph has a schedule; ``str(graph)``
    "ir.rules": ("ir",),
    "ir.ops": ("ir", "ir.ops.computing", "ir.ops.pools", "ir.ops.loop"),
    "ir.ops.pools": ("ir", "ir.ops"),
    "ir.schedule": ("ir",),
    "ir.text": ("ir", "ir.schedule"),
    "ir.validate": (*ONE_OP, "ir.schedule", "ir.text"),
    "ir.rulebook": ONE_OP,
    "ir.rulebook.arithmetic": (*ONE_OP, "ir.rulebook"),
    "ir.rulebook.movement": (*ONE_OP, "ir.rulebook", "ir.rulebook.arithmetic"),
    "ir.program": (*ONE_OP, "ir.program.loops", "ir.rulebook", "ir.text"),
    "ir.program.loops": (*GRAPHS, "ir.program", "ir.schedule"),
    "ir.cost": (*PROGRAMS, "ir.rules"),
    "ir.timing": (*PROGRAMS, "ir.cost", "ir.schedule"),
    "ir.unfolding": ("ir",),
    "ir.capture": (*CAPTURE, "ir.capture.optimizer", "ir.capture.python_state", "ir.unfolding"),
    "ir.capture.canonical": (*ONE_OP, "ir.capture"),
    "ir.capture.frontend": (*ONE_OP, "ir.capture", "ir.capture.python_state"),
    "ir.capture.optimizer": (*ONE_OP, "ir.capture", "ir.capture.canonical", "ir.unfolding"),
    "ir.capture.python_state": (*GRAPHS, "ir.capture", "ir.capture.frontend"),
    "ir.oracle": (*ONE_OP,),
    "passes": (
        *ONE_OP,
        "ir.cost",
        "ir.unfolding",
        "ir.validate",
        "passes.communication",
        "passes.memory",
        "passes.sharding",
        "passes.space",
        "passes.stages",
    ),
    "passes.communication": (*ONE_OP, "passes"),
    "passes.memory": (*ONE_OP, "passes"),
    "passes.sharding": (*ONE_OP, "ir.cost", "ir.capture.canonical", "passes"),
    "passes.rank": (*PROGRAMS, "ir.cost", "passes"),
    "passes.space": (*ONE_OP, "ir.cost", "passes"),
    "passes.stages": (*PROGRAMS, "ir.cost", "ir.rules", "ir.schedule", "passes"),
    "runtime": (*PROGRAMS, "ir.cost", "ir.schedule", "ir.timing", "runtime.distributed"),
    "runtime.virtual": (*PROGRAMS, "runtime"),
    "runtime.distributed": (*PROGRAMS, "ir.text", "runtime"),
    "runtime.verify": (*PROOF, "ir.capture", "ir.oracle", "runtime.verify.families", "runtime.virtual"),
    "runtime.verify.families": (*PROGRAMS, "ir.rules", "runtime.verify", "runtime.verify.proof"),
    "runtime.verify.proof": (*PROOF, "ir.capture.canonical", "runtime.verify"),
    "visualize": (*GRAPHS, "ir.cost", "ir.schedule", "ir.text", "ir.timing"),
    "report": ("shardfx", *PROGRAMS, *CLOCKS, "ir.text", "passes.stages", "schedules"),
    "memory": (
        "shardfx",
        *PROGRAMS,
        "ir.cost",
        "ir.schedule",
        "ir.text",
        "module",
        "passes",
        "passes.memory",
        "passes.rank",
        "passes.sharding",
        "passes.stages",
        "report",
        "visualize",
    ),
    "schedules": (
        *("shardfx", *PROGRAMS, *CLOCKS, "ir.capture", "memory", "passes.sharding", "passes.stages", "report"),
        "runtime.distributed",
    ),
    "images": (*RULES, "passes", "visualize", "module", "runtime.distributed"),
    "integrations": ("shardfx", "ir", "module", "runtime"),
}
"""For each sub-package the others whose modules it may import. A facade (``__init__``) may import whatever lies in
its own folder, and the rest of ``shardfx`` anything."""

IN_FUNCTIONS = {
    ("ir.graph", "ir.text.printer"),  # which knows graphs
    ("module.planned_module", "visualize"),  # needs Graphviz, which only pictures do
    ("memory.rank_memory", "visualize"),
    ("schedules.timeline", "visualize"),
    ("images.receptive_field", "visualize"),
    ("report.figures", "report.tables"),  # need rich, which only what is printed does
    ("runtime.module_engine", "runtime.inductor_passes"),  # needs Inductor, which only pm.compile() does
    ("module.execution_target", "runtime.distributed.process_store"),  # nothing of torch.distributed for virtual ranks
    ("module.execution_target", "runtime.distributed.process_engine"),
    ("module.execution_target", "runtime.distributed.process_peers"),
}
"""The imports that stand in a function, and why."""
MOST_FILES = 16
SOURCE_LINES, TEST_LINES = 800, 800


class Import(NamedTuple):
    """One import of ours: where it stands, and what it names. ``when``: "" at once, else "typing" or "function"."""

    line: int
    name: str
    when: str


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def statements(node: ast.AST, when: str = "") -> Iterator[tuple[ast.AST, str]]:
    for child in ast.iter_child_nodes(node):
        yield child, when
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from statements(child, "function" if inside else "typing" if typing else when)


@cache
def imported(path: Path) -> list[Import]:
    """Each import of ours in the file, wherever in the file it stands, by its absolute name."""
    package = ["shardfx", *path.relative_to(ROOT).parent.parts]
    if package[:2] == ["shardfx", "shardfx"]:
        del package[0]
    found: list[Import] = []
    for node, when in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [Import(node.lineno, alias.name, when) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            # `from shardfx import ir` and `from .. import ir` name the folder last.
            found += [Import(node.lineno, f"{module}.{alias.name}", when) for alias in node.names]
    return [each for each in found if each.name.split(".")[0] in FOLDERS]


def dotted(path: Path) -> str:
    """The module of a file, without the ``shardfx`` before it; the top of ``shardfx`` is itself."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts[1:] if parts[0] == "shardfx" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts) or "shardfx"


MODULES = {dotted(path): path for path in python_files(*FOLDERS)}


def package_of(module: str) -> str:
    """The sub-package that a module stands in; a facade is its own."""
    if MODULES[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0] or "shardfx"


def module_of(name: str) -> str:
    """The module that an imported name stands in, or is."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "shardfx"


def imports() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each module, with those that it imports and when."""
    for module, path in MODULES.items():
        yield module, [(module_of(name), when) for _, name, when in imported(path) if module_of(name) != module]


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folders_import_only_what_lies_below(folder: str) -> None:
    allowed = {f"shardfx.{name}" for name in MAY_IMPORT[folder]}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in python_files(folder)
        for line, name, _ in imported(path)
        if ".".join(name.split(".")[:2]) not in allowed
    ]
    assert not wrong, "\n".join(wrong)


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


def test_sub_packages_import_what_the_table_says() -> None:
    """What is imported for types alone counts in the folders at the top, and not here."""
    wrong = [
        f"{module} imports {other}"
        for module, others in imports()
        for other, when in others
        if (package := package_of(module)) in SUB_PACKAGES
        and package_of(other) not in (package, *SUB_PACKAGES[package])
        and when != "typing"
        and not (MODULES[module].name == "__init__.py" and other.startswith(f"{module}."))
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_stand_at_the_top_of_a_file() -> None:
    inside = {(module, other) for module, others in imports() for other, when in others if when == "function"}
    assert inside == IN_FUNCTIONS


def test_no_module_imports_itself_by_way_of_others() -> None:
    edges = [(module, other) for module, others in imports() for other, when in others if not when]
    assert [sorted(group) for group in nx.strongly_connected_components(nx.DiGraph(edges)) if len(group) > 1] == []


def test_a_module_is_found_by_its_name() -> None:
    names = Counter(path.stem for path in MODULES.values() if path.stem not in ("__init__", "__main__"))
    assert not [name for name, count in names.items() if count > 1]


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
    assert tool["package-dir"] == {"shardfx": "shardfx", **{f"shardfx.{name}": name for name in MAY_IMPORT}}
    assert not without_init


def test_no_file_has_two_subjects() -> None:
    most = {
        **dict.fromkeys(FOLDERS, SOURCE_LINES),
        **dict.fromkeys(("tests", "examples", "benchmarks", "docs"), TEST_LINES),
    }
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(*most)}
    long = {path.relative_to(ROOT): length for path, length in lengths.items()}
    assert not {str(path): length for path, length in long.items() if length > most[path.parts[0]]}


def test_a_folder_is_seen_at_a_glance() -> None:
    modules = [path.parent for path in MODULES.values() if path.name != "__init__.py"]
    assert not {str(folder): count for folder, count in Counter(modules).items() if count > MOST_FILES}


def test_a_checkout_imports_without_being_installed(tmp_path: Path) -> None:
    """And without what reports and pictures alone need."""
    absent = "sys.modules['rich'] = sys.modules['pygraphviz'] = None"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); {absent}; import shardfx.ir; print(shardfx.ir.__file__)"
    run = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert Path(run.stdout.strip()) == ROOT / "ir" / "__init__.py"
