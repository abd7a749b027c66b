"""What the source tree holds to: the budget of each part, the order of layers, names that are unique. ::

    python -m tests.house       lines per part beside the budget, and each rule with what breaks it

``tests/unit/test_layout.py`` asserts the same.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = ("shardfx", "ir", "passes", "runtime", "visualize")
TOP = {"ir": {"ir"}, "passes": {"ir", "passes"}, "runtime": {"ir", "runtime"}, "visualize": {"ir", "visualize"}}
"""What a folder at the top may import; ``shardfx`` may import all."""

LAYERS = (
    ("ir.errors",),
    ("ir.schedule",),
    ("ir", "ir.unfolding", "ir.text"),
    ("ir.ops",),
    ("ir.rules",),
    ("ir.rulebook",),
    ("ir.validate",),
    ("ir.context",),
    ("ir.capture", "ir.program"),
    ("ir.cost",),
    ("ir.timing",),
    ("ir.oracle",),
)
"""Within ``ir``, a folder (with its own sub-packages) imports from those before it. Two in one row do not import one
another, except that ``ir``, ``ir.unfolding`` and ``ir.text`` are one layer, the core. Errors are before all."""
SMALL, LONG, MOST_FILES = 60, 800, 16


class Part(NamedTuple):
    """A part of the tree with a budget: lines of source, blank lines and docstrings included."""

    name: str
    folders: tuple[str, ...]
    budget: int
    without: tuple[str, ...] = ()


CONTEXT = (
    "ir/rulebook/arithmetic/ring.py",
    "passes/context_parallel.py",
    "passes/ring_attention.py",
    "runtime/verify/proof/step_laws.py",
    "runtime/verify/proof/head_copies.py",
)
"""The files of context parallelism in folders of other parts."""
TABLES = (
    "ir/capture/canonical/embedding_bags.py",
    "ir/capture/optimizer/sparse_rows.py",
    "passes/embedding_tables.py",
    "passes/rank/touched_rows.py",
    "ir/ops/computing/row_update.py",
    "ir/ops/computing/table_ids.py",
    "ir/rulebook/movement/table_lookups.py",
    "passes/row_exchange.py",
    "runtime/verify/proof/table_laws.py",
    "shardfx/module/sparse_steps.py",
)
"""The files of embedding tables in folders of other parts."""
EXPERTS = (
    "ir/rulebook/movement/experts.py",
    "ir/capture/frontend/routed_experts.py",
    "ir/capture/canonical/sorted_rows.py",
    "passes/expert_parallel.py",
    "passes/rank/check_room.py",
    "passes/token_blocks.py",
    "runtime/verify/proof/expert_laws.py",
    "runtime/expert_load.py",
)
"""The files of expert parallelism in folders of other parts."""
PARTS = (
    Part("core", ("ir/*.py", "ir/text", "ir/validate", "ir/unfolding"), 4800),
    Part(
        "ops, rules, rule book",
        ("ir/ops", "ir/rules", "ir/rulebook"),
        7405,
        ("ir/ops/context", "ir/ops/experts", CONTEXT[0], EXPERTS[0], *TABLES[4:7]),
    ),
    Part("oracle", ("ir/oracle",), 2200),
    Part("capture", ("ir/capture",), 7920, (*EXPERTS[1:3], *TABLES[:2])),
    Part("rank programs, cost, timing, schedules", ("ir/program", "ir/cost", "ir/timing", "ir/schedule"), 7875),
    Part("passes", ("passes",), 7990, (*CONTEXT[1:3], *EXPERTS[3:6], *TABLES[2:4], TABLES[7])),
    Part("proof", ("runtime/verify",), 4500, (*CONTEXT[3:], EXPERTS[6], TABLES[8])),
    Part("engines, agreement, debugging, export, transport", ("runtime",), 3935, ("runtime/verify", EXPERTS[7])),
    Part("pictures", ("visualize",), 2750),
    Part("large images", ("shardfx/images",), 1600),
    Part("front", ("shardfx",), 9962, ("shardfx/images", TABLES[9])),
    Part("attention and context parallelism", ("ir/context", "ir/ops/context", *CONTEXT), 4120),
    Part("embedding tables", TABLES, 1400),
    Part("experts", ("ir/ops/experts", *EXPERTS), 1900),
)
SUM = 68_270
TESTS = 32_000
WING_TESTS = "attention_(masks|steps|windows)|context_|relative_bias|flex_|eager_dec|written_att|expert_|tables"
"""The tests of wings, by the names of their files."""


def python_files(*folders: str) -> list[Path]:
    """The Python files below some folders, sorted."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def length(path: Path) -> int:
    """The lines of a file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def lines_of(part: Part) -> int:
    """The lines of a part."""
    names = [name if name.endswith(".py") else f"{name}/**/*.py" for name in part.folders]
    found = {path for name in names for path in ROOT.glob(name)}
    apart = tuple(str(ROOT / name) + ("" if name.endswith(".py") else "/") for name in part.without)
    return sum(length(path) for path in found if not str(path).startswith(apart or ("\0",)))


# ---- imports -------------------------------------------------------------------------------------------------------


class Import(NamedTuple):
    """One import of a module of this project. ``when``: "" at once, "typing" or "function"."""

    line: int
    name: str
    when: str


def statements(node: ast.AST, when: str = "") -> Iterator[tuple[ast.AST, str]]:
    """All nodes below one, each with when it is executed."""
    for child in ast.iter_child_nodes(node):
        yield child, when
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        yield from statements(child, "function" if inside else "typing" if typing else when)


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imported(path: Path) -> list[Import]:
    """Each import of this project in a file, by its absolute name."""
    package = ["shardfx", *path.relative_to(ROOT).parent.parts]
    if package[:2] == ["shardfx", "shardfx"]:
        del package[0]
    found: list[Import] = []
    for node, when in statements(tree_of(path)):
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
    """The package that a module is in; an ``__init__`` is its own."""
    if MODULES[module].name == "__init__.py":
        return module
    return module.rpartition(".")[0] or "shardfx"


def module_of(name: str) -> str:
    """The module that an imported name is, or is defined in."""
    parts = name.split(".")[1:]
    while parts and ".".join(parts) not in MODULES:
        parts.pop()
    return ".".join(parts) or "shardfx"


def imports() -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Each module, with those that it imports and when."""
    for module, path in MODULES.items():
        yield module, [(module_of(name), when) for _, name, when in imported(path) if module_of(name) != module]


# ---- the rules -----------------------------------------------------------------------------------------------------


def over_budget() -> list[str]:
    """Parts over their budget, and the sum."""
    counts = {part: lines_of(part) for part in PARTS}
    total = sum(counts.values())
    found = [f"{part.name}: {n:,} lines, {part.budget:,} at most" for part, n in counts.items() if n > part.budget]
    return found + ([f"sum: {total:,} lines, {SUM:,} at most"] if total > SUM else [])


def imports_against_folders() -> list[str]:
    """Imports of a folder at the top that is not below."""
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for folder, below in TOP.items()
        for path in python_files(folder)
        for line, name, _ in imported(path)
        if name.split(".")[1] not in below
    ]


def layer_of(package: str) -> tuple[int, str] | None:
    """The place of a package in the order of layers, and the folder that the layer names; None outside of ``ir``."""
    rows = {folder: i for i, row in enumerate(LAYERS) for folder in row}
    if package in ("ir", "ir.unfolding", "ir.text"):
        return rows[package], "core"
    parts = package.split(".")
    folder = ".".join(parts[:2])
    return (rows[folder], folder) if folder in rows else None


def imports_against_layers() -> list[str]:
    """Imports within ``ir`` of a layer that is not before; those for types alone count, too."""
    found = []
    for module, others in imports():
        mine = layer_of("ir.errors" if module == "ir.errors" else package_of(module))
        if mine is None or module == "ir":  # the facade of ir
            continue
        for other, _ in others:
            its = layer_of("ir.errors" if other == "ir.errors" else package_of(other))
            if its is not None and its[1] != mine[1] and its[0] >= mine[0]:
                found.append(f"{module} imports {other}")
    return sorted(set(found))


def class_names_twice() -> list[str]:
    """Classes that share their name with another one."""
    where = defaultdict(list)
    for path in MODULES.values():
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(str(path.relative_to(ROOT)))
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(where.items()) if len(paths) > 1]


def module_names_twice() -> list[str]:
    """Modules that share their name with another one."""
    names = Counter(path.stem for path in MODULES.values() if path.stem not in ("__init__", "__main__"))
    return [name for name, count in names.items() if count > 1]


def small_files() -> list[str]:
    """Files of few lines that one other file imports; a pass, a rule file and an entry point may be small."""
    importers = defaultdict(set)
    for module, others in imports():
        for other, _ in others:
            importers[other].add(module)
    return [
        f"{path.relative_to(ROOT)}: {length(path)} lines, imported by {next(iter(importers[module]))}"
        for module, path in MODULES.items()
        if path.name not in ("__init__.py", "__main__.py")
        and length(path) < SMALL
        and len(importers[module]) == 1
        and not is_pass(path)
        and not module.startswith("ir.rulebook.")
    ]


def is_pass(path: Path) -> bool:
    """Whether a file defines a pass: a class with a ``name``, derived from Pass or RankPass."""
    return any(
        isinstance(node, ast.ClassDef) and {"Pass", "RankPass"} & {ast.unparse(base) for base in node.bases}
        for node in tree_of(path).body
    )


def long_files() -> list[str]:
    """Files over the limit of lines."""
    folders = (*FOLDERS, "tests", "examples", "benchmarks", "docs")
    return [f"{path.relative_to(ROOT)}: {n}" for path in python_files(*folders) if (n := length(path)) > LONG]


def full_folders() -> list[str]:
    """Folders with too many files to be seen at a glance."""
    counts = Counter(path.parent for path in MODULES.values() if path.name != "__init__.py")
    return [f"{folder.relative_to(ROOT)}: {count}" for folder, count in counts.items() if count > MOST_FILES]


RULES = {
    "parts over their budget": over_budget,
    "imports against the order of folders": imports_against_folders,
    "imports against the order of layers": imports_against_layers,
    "class names that stand twice": class_names_twice,
    "module names that stand twice": module_names_twice,
    f"files of fewer than {SMALL} lines with one importer": small_files,
    f"files over {LONG} lines": long_files,
    f"folders with more than {MOST_FILES} files": full_folders,
}


def main() -> int:
    """Print the table and what breaks each rule; 1 where something does."""
    total = 0
    print(f"{'part':<50} {'lines':>7} {'at most':>8}")
    for part in PARTS:
        count = lines_of(part)
        total += count
        print(f"{part.name:<50} {count:>7,} {part.budget:>8,}{'  over' if count > part.budget else ''}")
    print(f"{'sum':<50} {total:>7,} {SUM:>8,}{'  over' if total > SUM else ''}")
    wings = [path for path in python_files("tests") if re.search(WING_TESTS, path.stem)]
    of_wings = sum(map(length, wings))
    count = sum(map(length, python_files("tests"))) - of_wings
    print(f"{'tests':<50} {count:>7,} {TESTS:>8,}{'  over' if count > TESTS else ''}")
    print(f"{'tests of wings':<50} {of_wings:>7,}\n")
    wrong = 0
    for name, rule in RULES.items():
        found = rule()
        wrong += bool(found)
        print(f"{name}: {len(found)}", *(f"    {each}" for each in found[:200]), sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
