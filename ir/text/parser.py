"""The reader of a graph's text; :mod:`shardfx.ir.text.printer` writes it, and describes the form.

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
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from shardfx.ir.cut import Cut, Part
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Strategy, Value, Where, op_name
from shardfx.ir.mesh import Link, Mesh, Time
from shardfx.ir.ops.comm import COMM_OPS, CommOp
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.repeat import Repeat
from shardfx.ir.spec import Spec, TensorType

from .arguments import CONSTANTS, DTYPES, TORCH_CONSTANTS
from .lexer import Line, T

OWN_OPS: dict[str, Any] = {op_name(op): op for op in (*COMM_OPS.values(), dropout)}

RANGE = re.compile(r"\s*(\d+)\.\.(\d+)")
WHERE = re.compile(r'("(?:[^"\\]|\\.)*"|[^\s"#:]+)(?::(\d+))?(?:\s+|$)')


def parse_graph(text: str, *, ops: Mapping[str, Any] | None = None) -> Graph:
    """Read the text that :func:`~shardfx.ir.text.printer.print_graph` wrote.

    Args:
        ops: ops that are neither torch's nor the IR's own, by the name in the text.

    Raises:
        Error: the text is not a graph's; says the line, what was expected there and what was found.
    """
    reader = _Reader({**OWN_OPS, **(ops or {})})
    for number, line in enumerate(text.splitlines(), 1):
        tokens = Line(line, number)
        if tokens.kind:
            reader.read(tokens)
    if reader.mesh is None:
        raise Error("the text has no mesh", where="line 1", expected="a line such as 'mesh dp=2, tp=2'", got=text[:60])
    return reader.graph()


def parse_spec(text: str, mesh: Mesh) -> tuple[tuple[int, ...], Spec]:
    """The shape and the placement that :meth:`Spec.text` wrote: ``[64{dp}, (3 64{tp})] +{cp}``.

    Raises:
        Error: the text is not a placement's, or names an axis that the mesh does not have.
    """
    reader = _Reader({}, mesh, {axis.name: axis.size for axis in mesh.axes})
    line = Line(text, 1)
    found = reader._spec(line)
    if line.kind:
        line.fail("the end of the placement")
    return found


@dataclass
class _Reader:
    """What was read so far."""

    ops: dict[str, Any]
    mesh: Mesh | None = None
    sizes: dict[str, int | Time] = field(default_factory=dict)
    links: dict[str, Link] = field(default_factory=dict)
    placed: bool = True
    established: frozenset[str] = frozenset()
    repeats: list[Repeat] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    inputs: list[Input] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    section: str = ""

    def graph(self) -> Graph:
        assert self.mesh is not None
        return Graph(self.mesh, self.inputs, self.nodes, self.outputs, self.established, tuple(self.repeats))

    def read(self, line: Line) -> None:
        if line.kind == "word" and line.text.strip().partition("#")[0].rstrip() == f"{line.token}:":
            if line.token not in (*(phase.value for phase in Phase), "outputs"):
                line.fail("forward, backward, update or outputs", line.token)
            self.section = line.token
            return
        if self.section == "outputs":
            self._output(line)
        elif self.section:
            self._node(line)
        else:
            self._header(line)
        if line.kind:
            line.fail("the end of the line")

    def _header(self, line: Line) -> None:
        kinds = [kind.value for kind in InputKind]
        word = line.token
        if word == "mesh":
            line.next()
            self.sizes = dict(line.many(lambda: self._axis(line), ""))
            self.mesh = self._checked(line, lambda: Mesh(links=None, **self.sizes))
        elif word == "link":
            line.next()
            name = line.word("a mesh axis")
            line.expect("bandwidth")
            line.expect("=")
            bandwidth = line.number_of(float, "bytes per second")
            line.expect(",")
            line.expect("latency")
            line.expect("=")
            latency = line.number_of(float, "seconds")
            self.links[name] = self._checked(line, lambda: Link(bandwidth, latency))
            self.mesh = self._checked(line, lambda: Mesh(links=self.links, **self.sizes))
        elif word == "unplaced":
            line.next()
            self.placed = False
        elif word == "established":
            line.next()
            self.established = frozenset(line.many(lambda: line.word("what a pass establishes"), ""))
        elif word == "repeat":
            line.next()
            path = line.name("the path of a list of blocks")
            match = RANGE.match(line.text, line.start)
            if match is None:
                line.fail("the first and the last block that is left out, such as 2..77", line.text[line.start :])
            line.at = match.end()
            line.next()
            first, last = int(match[1]), int(match[2])
            self.repeats.append(self._checked(line, lambda: Repeat(path, first, last)))
        elif word == "source":
            match = WHERE.match(line.text, line.at + 1)
            if match is None:
                line.fail("a file's short name and its path in quotes", line.text[line.at :])
            line.at = match.end()
            line.next()
            self.files[_unquote(match[1])] = json.loads(line.take("string", "the file's path in quotes"))
        elif word in kinds:
            self._input(line)
        else:
            line.fail(f"mesh, link, unplaced, established, repeat, source, {', '.join(kinds)} or forward:")

    def _axis(self, line: Line) -> tuple[str, int | Time]:
        name = line.word("a mesh axis such as dp=2")
        line.expect("=")
        if not line.accept("Time"):
            return name, line.number_of(int, "a number of ranks, or Time(turns)")
        line.expect("(")
        turns = line.number_of(int, "a number of turns")
        line.expect(")")
        return name, Time(turns)

    def _checked(self, line: Line, make: Callable[[], T]) -> T:
        """Make something that checks itself; its error says the line too."""
        try:
            return make()
        except Error as error:
            where = f"line {line.number}: {line.text.strip()}"
            raise Error(error.what, where=where, expected=error.expected, got=error.got, remedy=error.remedy) from None

    def _define(self, line: Line, token: str, value: Value) -> None:
        if token in self.values:
            line.fail("a name that is new", f"{token}, which is defined already")
        value.name = _unquote(token[1:])
        self.values[token] = value

    def _use(self, line: Line) -> Value:
        found = self.values.get(line.token)
        if found is None:
            line.fail("a value that is defined above", line.token)
        line.next()
        return found

    def _input(self, line: Line) -> None:
        kind = InputKind(line.next())
        token = line.take("value", "the input's name, such as %args.0")
        line.expect(":")
        type, spec = self._type(line)
        value = Value(type, spec=spec)
        self._define(line, token, value)
        constant = None
        if line.accept("="):
            content = self._argument(line)
            try:
                constant = torch.tensor(content, dtype=type.dtype).reshape(type.shape)
            except (RuntimeError, TypeError, ValueError) as error:
                line.fail(f"{type.numel} numbers for shape {type.shape}", error)
        self.inputs.append(Input(kind, value.name, value, constant))

    def _output(self, line: Line) -> None:
        kinds = [kind.value for kind in OutputKind]
        if line.token not in kinds:
            line.fail(f"one of {', '.join(kinds)}")
        kind = OutputKind(line.next())
        name = line.name("the output's name")
        line.expect("=")
        self.outputs.append(Output(kind, name, self._use(line)))

    def _node(self, line: Line) -> None:
        targets = []
        if line.kind == "value" or line.token == "_":
            targets = line.many(lambda: self._target(line), "=")
        word = line.word("an op such as aten.mm")
        op = self._op(line, word)
        line.expect("(")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        comm = word.startswith("comm.")
        line.many(lambda: self._place_argument(line, comm, args, kwargs), ")")
        node = Node(op, tuple(args), kwargs, phase=Phase(self.section))
        if targets:
            line.expect(":")
            types = line.many(lambda: None if line.accept("_") else self._type(line), "")
            if [t is None for t in targets] != [t is None for t in types]:
                line.fail(f"a type for each of {len(targets)} results, and _ for _", f"{len(types)} types")
            for index, (target, found) in enumerate(zip(targets, types, strict=True)):
                node.results.append(None if found is None else Value(found[0], node, index, spec=found[1]))
                if target is not None and node.results[-1] is not None:
                    self._define(line, target, node.results[-1])
        self._strategy(line, node)
        if line.accept("stage"):
            line.expect("=")
            node.stage = line.number_of(int, "a stage's number")
        if line.token == "@":
            node.where = self._where(line)
        self.nodes.append(node)

    def _target(self, line: Line) -> str | None:
        return None if line.accept("_") else line.take("value", "a result such as %3, or _")

    def _op(self, line: Line, name: str) -> Any:
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

    def _place_argument(self, line: Line, comm: bool, args: list[Any], kwargs: dict[str, Any]) -> None:
        if line.kind == "word" and line.text[line.at :].lstrip().startswith("="):
            key = line.next()
            line.expect("=")
            if comm and key == "axes":
                line.expect("[")
                kwargs[key] = line.many(lambda: self._mesh_axis(line), "]")
            elif comm and line.kind == "word" and line.token not in CONSTANTS:
                kwargs[key] = line.next()
            else:
                kwargs[key] = self._argument(line)
        else:
            args.append(self._argument(line))

    def _argument(self, line: Line) -> Any:
        what = "a value, a number, a string, a list, None, True, torch.float32, ..."
        if line.kind == "value":
            return self._use(line)
        if line.kind == "string":
            return json.loads(line.next())
        if line.kind == "number":
            text = line.next()
            return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
        if line.accept("["):
            return line.many(lambda: self._argument(line), "]")
        if line.accept("("):
            return tuple(line.many(lambda: self._argument(line), ")"))
        word = line.word(what)
        if word in CONSTANTS:
            return CONSTANTS[word]
        if word in ("device", "complex"):
            line.expect("(")
            content = line.many(lambda: self._argument(line), ")")
            return (torch.device if word == "device" else complex)(*content)
        found = getattr(torch, word.removeprefix("torch."), None)
        if not isinstance(found, TORCH_CONSTANTS):
            line.fail(what, word)
        return found

    def _type(self, line: Line) -> tuple[TensorType, Spec | None]:
        """``f32[64{dp}, (3 64{tp})] +{tp}``; a ``?`` at the end says that nothing is placed yet."""
        word = line.word("a type such as f32[64{dp}, 256]")
        dtype = DTYPES.get(word) or getattr(torch, word, None)
        if not isinstance(dtype, torch.dtype):
            line.fail(f"a dtype such as {', '.join(DTYPES)}", word)
        shape, spec = self._spec(line)
        return TensorType(shape, dtype), None if line.accept("?") or not self.placed else spec

    def _spec(self, line: Line) -> tuple[tuple[int, ...], Spec]:
        line.expect("[")
        dims = line.many(lambda: self._dim(line), "]")
        partial: list[tuple[str, str]] = []
        while line.token in ("+", "max", "min", "avg", "product"):
            reduce = "sum" if line.token == "+" else line.token
            line.next()
            partial += [(axis, reduce) for axis in self._axes(line)]
        spec = self._checked(line, lambda: Spec(tuple(cut for _, cut in dims), tuple(partial)))
        return tuple(size for size, _ in dims), spec

    def _dim(self, line: Line) -> tuple[int, Cut]:
        if not line.accept("("):
            part = self._part(line)
            return part.size, Cut(part.axes)
        parts = []
        while not line.accept(")"):
            parts.append(self._part(line))
        return math.prod(p.size for p in parts), Cut(tuple(a for p in parts for a in p.axes), tuple(parts))

    def _part(self, line: Line) -> Part:
        size = line.number_of(int, "a dim's size")
        return Part(size, self._axes(line) if line.token == "{" else ())

    def _axes(self, line: Line) -> tuple[str, ...]:
        line.expect("{")
        return tuple(line.many(lambda: self._mesh_axis(line), "}"))

    def _mesh_axis(self, line: Line) -> str:
        if line.token not in self.sizes:
            line.fail(f"a mesh axis: {', '.join(self.sizes) or 'none, for there is no mesh line above'}")
        return line.next()

    def _strategy(self, line: Line, node: Node) -> None:
        """``cuts m{dp} k{tp}  needs [...], [...]``: what is not said is as the values are."""
        if not line.accept("cuts"):
            needs, gives = (tuple(value.spec for value in values) for values in (node.operands, node.outs))
            if isinstance(node.op, CommOp) and None not in (*needs, *gives):
                node.strategy = Strategy(needs, gives)  # type: ignore[arg-type]
            return
        cuts = []
        if not line.accept("-"):
            while line.token not in ("needs", "gives", "stage") and line.kind in ("word", "string"):
                cuts.append((line.name("a factor"), self._axes(line)))
        given: dict[str, tuple[Any, ...]] = {}
        for word, values in (("needs", node.operands), ("gives", node.outs)):
            given[word] = tuple(value.spec for value in values)
            if line.accept(word):
                given[word] = () if line.accept("-") else tuple(line.many(lambda: self._spec(line)[1], ""))
        node.strategy = Strategy(given["needs"], given["gives"], tuple(cuts))

    def _where(self, line: Line) -> Where:
        module, file, number = "", "", 0
        line.at += len(line.text) - line.at - len(line.text[line.at :].lstrip())
        while match := WHERE.match(line.text, line.at):
            line.at = match.end()
            name = _unquote(match[1])
            if match[2] is None:
                module = name
            else:
                file, number = self.files.get(name, name), int(match[2])
        line.next()
        return Where(module, file, number)


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text
