"""The parser of a graph's text; :mod:`shardfx.ir.text.printer` writes it, and describes the form.

>>> graph = parse_graph('''
... mesh tp=2
... argument %x : f32[8{tp}, 4]
... forward:
...   %0 = aten.relu(%x) : f32[8{tp}, 4]
... outputs:
...   result results.0 = %0
... ''')
>>> graph.nodes[0].op
<OpOverload(op='aten.relu', overload='default')>
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Value
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.registry import GRAPH_OPS, GraphOp
from shardfx.ir.repeat import Repeat
from shardfx.ir.schedule.actions import Pipelined, Schedule
from shardfx.ir.spec import Spec

from .arguments import read_argument, read_keyword, read_spec, read_type
from .attributes import INPUT, NODE, OUTPUT, VALUE, read_attributes, strategy_of_comm
from .lexer import TextLine
from .reason_lines import ReasonReader
from .scope import ReadScope, checked, unquoted

HEADERS = ("mesh", "link", "unplaced", "established", "note", "repeat", "pipeline", "row")
SECTIONS = (*(phase.value for phase in Phase), "outputs", "reasons")
RANGE = re.compile(r"\s*(\d+)\.\.(\d+)")
LABEL = re.compile(r'"(?:[^"\\]|\\.)*"|[^\s"#:]+')


def parse_graph(text: str, *, ops: Mapping[str, Any] | None = None) -> Graph:
    """Read the text that :func:`~shardfx.ir.text.printer.print_graph` wrote.

    Args:
        ops: ops that are neither torch's nor in the registry, by the name in the text.

    Raises:
        Error: the text is not a graph's; says the line, what was expected there and what was found.
    """
    reader = _Reader({**GRAPH_OPS, **(ops or {})})
    for number, line in enumerate(text.splitlines(), 1):
        tokens = TextLine(line, number)
        if tokens.kind:
            reader.read(tokens)
    mesh = reader.scope.mesh
    if mesh is None:
        raise Error("the text has no mesh", where="line 1", expected="a line such as 'mesh dp=2, tp=2'", got=text[:60])
    repeats, reasons = tuple(reader.repeats), reader.told.reasons()
    stated = reader.inputs, reader.nodes, reader.outputs, reader.established, reader.notes
    return Graph(mesh, *stated, repeats, reasons, reader.pipelined())


def parse_spec(text: str, mesh: Mesh) -> tuple[tuple[int, ...], Spec]:
    """The shape and the placement that :meth:`Spec.text` wrote: ``[64{dp}, (3 64{tp})] +{cp}``.

    Raises:
        Error: the text is not a placement's, or names an axis that the mesh does not have.
    """
    line = TextLine(text, 1)
    found = read_spec(line, ReadScope(mesh, {axis.name: axis.size for axis in mesh.axes}))
    if line.kind:
        line.fail("the end of the placement")
    return found


@dataclass
class _Reader:
    """The graph that was read so far."""

    ops: dict[str, Any]
    scope: ReadScope = field(default_factory=ReadScope)
    established: frozenset[str] = frozenset()
    notes: list[str] = field(default_factory=list)
    repeats: list[Repeat] = field(default_factory=list)
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    told: ReasonReader = field(default_factory=ReasonReader)
    pipeline: tuple[str, ...] = ()
    rows: list[str] = field(default_factory=list)
    section: str = ""

    def read(self, line: TextLine) -> None:
        if line.kind == "word" and line.text.strip().partition("#")[0].rstrip() == f"{line.token}:":
            if line.token not in SECTIONS:
                line.fail(", ".join(SECTIONS), line.token)
            self.section = line.token
            return
        if self.section == "outputs":
            self._output(line)
        elif self.section == "reasons":
            self.told.read(line, self.scope)
        elif self.section:
            self._node(line)
        else:
            self._header(line)
        if line.kind:
            line.fail("the end of the line")

    def pipelined(self) -> Pipelined | None:
        """The pipeline stages of the graph, if it has some."""
        if not self.pipeline:
            return None
        axis, time = (*self.pipeline, "")[:2]
        return Pipelined(axis, time, Schedule.parse("\n".join(self.rows)))

    # ---- above the nodes -----------------------------------------------------------------------------------

    def _header(self, line: TextLine) -> None:
        kinds, word = [kind.value for kind in InputKind], line.token
        if word not in (*kinds, *HEADERS, "source"):
            line.fail(f"{', '.join(HEADERS)}, source, {', '.join(kinds)} or forward:")
        if word not in (*kinds, "source"):  # whose label may be of any form, so that it is no token
            line.next()
        if word in kinds:
            self._input(line)
        elif word == "source":
            self._source(line)
        elif word == "mesh":
            self.scope.sizes = dict(line.many(lambda: self._axis(line), ""))
            self.scope.mesh = checked(line, lambda: Mesh(links=None, **self.scope.sizes))
        elif word == "link":
            self._link(line)
        elif word == "unplaced":
            self.scope.placed = False
        elif word == "established":
            self.established = frozenset(line.many(lambda: line.word("what a pass establishes"), ""))
        elif word == "note":
            self.notes.append(json.loads(line.take("string", "the note in quotes")))
        elif word == "repeat":
            self._repeat(line)
        elif word == "pipeline":
            self.pipeline = tuple(line.many(lambda: line.word("the axis of stages, and that of the loop"), ""))
        else:
            self.rows.append(json.loads(line.take("string", "a row of the schedule in quotes")))

    def _axis(self, line: TextLine) -> tuple[str, int | Loop]:
        name = line.word("a mesh axis such as dp=2")
        line.expect("=")
        if not line.accept("Loop"):
            return name, line.number_of(int, "a number of ranks, or Loop(iterations)")
        line.expect("(")
        iterations, interleave = line.number_of(int, "a number of iterations"), False
        if line.accept(","):
            for each in ("interleave", "=", "True"):
                line.expect(each)
            interleave = True
        line.expect(")")
        return name, Loop(iterations, interleave)

    def _link(self, line: TextLine) -> None:
        name = line.word("a mesh axis")
        line.expect("bandwidth")
        line.expect("=")
        bandwidth = line.number_of(float, "bytes per second")
        line.expect(",")
        line.expect("latency")
        line.expect("=")
        latency = line.number_of(float, "seconds")
        scope = self.scope
        scope.links[name] = checked(line, lambda: Link(bandwidth, latency))
        scope.mesh = checked(line, lambda: Mesh(links=scope.links, **scope.sizes))

    def _repeat(self, line: TextLine) -> None:
        path = line.name("the path of a list of blocks")
        match = RANGE.match(line.text, line.start)
        if match is None:
            line.fail("the first and the last block that is left out, such as 2..77", line.text[line.start :])
        line.at = match.end()
        line.next()
        first, last = int(match[1]), int(match[2])
        self.repeats.append(checked(line, lambda: Repeat(path, first, last)))

    def _source(self, line: TextLine) -> None:
        rest = line.text[line.at :].lstrip()
        match = LABEL.match(rest)
        if match is None:
            line.fail("a file's short name and its path in quotes", rest)
        line.at = len(line.text) - len(rest) + match.end()
        line.next()
        self.scope.files[unquoted(match[0])] = json.loads(line.take("string", "the file's path in quotes"))

    def _input(self, line: TextLine) -> None:
        kind = InputKind(line.next())
        token = line.take("value", "the input's name, such as %args.0")
        line.expect(":")
        type, spec = read_type(line, self.scope)
        value = Value(type, spec=spec)
        self.scope.define(line, token, value)
        inp = Input(kind, value.name, value)
        read_attributes(VALUE, value, line, self.scope)
        read_attributes(INPUT, inp, line, self.scope)
        self.inputs.append(inp)

    def _output(self, line: TextLine) -> None:
        kinds = [kind.value for kind in OutputKind]
        if line.token not in kinds:
            line.fail(f"one of {', '.join(kinds)}")
        kind = OutputKind(line.next())
        name = line.name("the output's name")
        line.expect("=")
        output = Output(kind, name, self.scope.use(line))
        read_attributes(OUTPUT, output, line, self.scope)
        self.outputs.append(output)

    # ---- nodes ---------------------------------------------------------------------------------------------

    def _node(self, line: TextLine) -> None:
        targets: list[str | None] = []
        if line.kind == "value" or line.token == "_":
            targets = line.many(lambda: self._target(line), "=")
        word = line.word("an op such as aten.mm")
        op = self._op(line, word)
        line.expect("(")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        line.many(lambda: self._place_argument(line, isinstance(op, GraphOp), args, kwargs), ")")
        node = Node(op, tuple(args), kwargs, phase=Phase(self.section))
        if targets:
            self._results(line, node, targets)
        read_attributes(NODE, node, line, self.scope)
        if node.strategy is None and isinstance(op, GraphOp):
            node.strategy = strategy_of_comm(node)
        self.nodes.append(node)

    def _target(self, line: TextLine) -> str | None:
        return None if line.accept("_") else line.take("value", "a result such as %3, or _")

    def _results(self, line: TextLine, node: Node, targets: list[str | None]) -> None:
        def result() -> Value | None:
            if line.accept("_"):
                return None
            type, spec = read_type(line, self.scope)
            value = Value(type, node, spec=spec)
            read_attributes(VALUE, value, line, self.scope)
            return value

        line.expect(":")
        node.results = line.many(result, "")
        if [t is None for t in targets] != [v is None for v in node.results]:
            line.fail(f"a type for each of {len(targets)} results, and _ for _", f"{len(node.results)} types")
        for index, (target, value) in enumerate(zip(targets, node.results, strict=True)):
            if target is not None and value is not None:
                value.index = index
                self.scope.define(line, target, value)

    def _op(self, line: TextLine, name: str) -> Any:
        if name in self.ops:
            return self.ops[name]
        space, _, rest = name.partition(".")
        base, _, overload = rest.partition(".")
        try:
            return getattr(getattr(getattr(torch.ops, space), base), overload or "default")
        except AttributeError:
            known = [*self.ops, *(f"{space}.{base}" for base in dir(getattr(torch.ops, space)))]
            near = difflib.get_close_matches(name, known, 3)
            line.fail("an op of torch, of the IR, or of ops=" + (f" (perhaps {', '.join(near)})" if near else ""), name)

    def _place_argument(self, line: TextLine, own: bool, args: list[Any], kwargs: dict[str, Any]) -> None:
        if line.kind == "word" and line.text[line.at :].lstrip().startswith("="):
            key = line.next()
            line.expect("=")
            kwargs[key] = read_keyword(line, key, self.scope) if own else read_argument(line, self.scope)
        else:
            args.append(read_argument(line, self.scope))
