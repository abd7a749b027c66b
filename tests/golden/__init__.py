"""Golden texts of the built-in passes: text in, text out.

``<pass>/<model>.txt`` is the graph of a model after a pass; what went in is the text of the pass before it (that of
``capture`` for the first one), so that all the state of a plan is in these texts. Hints stand in comments::

    # hint layers.*.fc1.weight: tp, -
    # sharded layers.*.fc1: n{tp}

Other files are small cases written by hand: the graph that goes in, a line ``becomes:``, and what comes out. They may
name their pass with options (``# pass bucket-comm{mb=1}``) and hints. ``python -m tests.golden`` writes all of it anew;
the texts of ``capture`` only with ``--capture``, for they take the models, and change with torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shardfx.ir.graph import Graph, Where
from shardfx.ir.ops.redistribute import Redistribution
from shardfx.ir.rulebook import default_rules
from shardfx.ir.text import parse_graph, print_graph
from shardfx.passes import BUILT_IN, ON_REQUEST, Context, Pass, PassContext
from shardfx.passes.pass_text import parse_pass

FOLDER = Path(__file__).parent
CAPTURE = "capture"
BECOMES = "\nbecomes:\n"
HINT = re.compile(r"^# hint (\S+): (.*)$", re.MULTILINE)
SHARDING = re.compile(r"^# strategy (\S+): (.*)$", re.MULTILINE)
PASS = re.compile(r"^# pass (.*)$", re.MULTILINE)
ALWAYS = tuple(name for name in BUILT_IN if name not in ON_REQUEST)
ORDER = (CAPTURE, *ALWAYS)


@dataclass(frozen=True)
class Golden:
    """One file: the pass, the text that goes in, and where what comes out stands."""

    pass_name: str
    path: Path

    def __str__(self) -> str:
        return f"{self.pass_name}/{self.path.stem}"

    @property
    def by_hand(self) -> bool:
        """Whether the file holds both texts."""
        return BECOMES in self.path.read_text(encoding="utf-8")

    @property
    def given(self) -> str:
        """The text that goes in."""
        if self.by_hand:
            return self.path.read_text(encoding="utf-8").partition(BECOMES)[0]
        before = ORDER[ORDER.index(self.pass_name) - 1]
        return (FOLDER / before / self.path.name).read_text(encoding="utf-8")

    @property
    def expected(self) -> str:
        """The file's whole text."""
        return self.path.read_text(encoding="utf-8")

    def made(self) -> str:
        """What the file's text is now."""
        given = self.given
        named = PASS.search(given) if self.by_hand else None
        each = parse_pass(named[1] if named else self.pass_name, BUILT_IN.__getitem__)
        comments = "" if self.by_hand else header(given)
        text = comments + after(each, given) + "\n"
        return f"{given}{BECOMES}{text}" if self.by_hand else text


def goldens() -> Iterator[Golden]:
    """Every file of every pass; those of models in the order of the passes, as each takes what the one before made."""
    for name in BUILT_IN:
        for path in sorted((FOLDER / name).glob("*.txt")):
            yield Golden(name, path)


def header(text: str) -> str:
    """The hints that a text names."""
    return "".join(f"# hint {name}: {spec}\n" for name, spec in HINT.findall(text))


def after(each: Pass, text: str) -> str:
    """The text of a graph after a pass."""
    graph = parse_graph(text)
    context = given(graph, text)
    each.run(graph, context)
    graph.established |= each.establishes
    return printed(graph)


def given(graph: Graph, text: str) -> PassContext:
    """What the passes begin with: the hints that a text names."""
    specs, shardings = (dict(kind.findall(text)) for kind in (HINT, SHARDING))
    specs = {name: Context.of_text(spec) or spec for name, spec in specs.items()}
    return PassContext(default_rules(), Redistribution(graph.mesh), specs=specs, strategies=shardings)


def printed(graph: Graph) -> str:
    """The text of a graph that is kept: without the lines of files, which change with every edit of a model."""
    graph = graph.copy()
    for node in graph.nodes:
        node.where = Where(node.where.module)
    return print_graph(graph, sources=False)
