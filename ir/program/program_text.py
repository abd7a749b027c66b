"""Programs as text: printed, and read back.

    program 1: rank 1 of mesh dp=2, tp=2
    parameter %w "0.weight" : f32[8{tp}, 6]
    argument %x "args.0" : f32[10{dp}, 6]
    %flat = memory.empty([48], torch.float32, "cpu")                from %41
    %part = memory.part(%flat, 1, 0, [8, 6])                        from %41
    %grad = aten.mm.out(%t, %x, out=%part)                          from %38
    %full = memory.join(%flat, [%grad], 1) : [48]                   from %41
    %sent = c10d.all_reduce_(%full, "sum", "dp2.tp2/dp@1") : [48]   from %41
    return gradient "0.weight" = %sent

``from`` names the value of the planned graph that a call comes from; shapes stand where a later pass may ask for them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, OutputKind, Value
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.registry import PROGRAM_OPS
from shardfx.ir.spec import Spec
from shardfx.ir.text.arguments import SHORT, read_argument, write_argument
from shardfx.ir.text.lexer import TextLine

from .rank_program import RankProgram

VERSION = 1
"""Of the text's form: raised when an older reader could not make sense of it."""
WIDTH = 80


def print_program(program: RankProgram) -> str:
    """The text of a program."""
    mesh = ", ".join(f"{axis.name}={axis.size}" for axis in program.mesh.space)
    lines = [f"program {VERSION}: rank {program.rank} of mesh {mesh}"]
    inputs = iter(program.inputs)
    for node in program.graph.nodes:
        if node.op == "placeholder":
            inp = next(inputs)
            lines.append(f"{inp.kind.value} %{node.name} {json.dumps(inp.name)} : {_type(inp.value)}")
        elif node.op == "output":
            pairs = zip(program.outputs, node.args[0], strict=True)
            lines.append("return " + ", ".join(f"{o.kind.value} {json.dumps(o.name)} = {_text(v)}" for o, v in pairs))
        elif node.op == "get_attr":
            lines.append(f"%{node.name} = constant({json.dumps(str(node.target))})")
        else:
            lines.append(call_line(node))
    return "\n".join(lines) + "\n"


def call_line(node: fx.Node) -> str:
    """The line of one call."""
    args = [_text(arg) for arg in node.args] + [f"{key}={_text(arg)}" for key, arg in node.kwargs.items()]
    line = f"%{node.name} = {call_name(node.target)}({', '.join(args)})"
    if "shape" in node.meta:
        line += f" : {_text(list(node.meta['shape']))}"
    made = node.meta.get("shardfx")
    return f"{line.ljust(WIDTH)} from %{made.name}" if isinstance(made, Node) else line


def call_name(target: Any) -> str:
    """The name of a function in a program's text: ``aten.mm.out``, ``memory.part``, ``getitem``."""
    row = row_of(target)
    if row is not None:
        return row.name
    if isinstance(target, torch._ops.OpOverload):
        return str(target).removesuffix(".default")
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__qualname__', target)}"


def _type(value: Value) -> str:
    dtype = SHORT.get(value.type.dtype, str(value.type.dtype).removeprefix("torch."))
    return (value.spec or Spec.replicated(value.type.ndim)).text(value.shape, dtype)


class _NodeNames:
    def use(self, node: fx.Node) -> str:
        return f"%{node.name}"


def _text(arg: Any) -> str:
    return write_argument(arg, _NodeNames())


def parse_program(text: str, graph: Graph, functions: Mapping[str, Callable[..., Any]] | None = None) -> RankProgram:
    """Parse the text of a program, of the planned ``graph``: the inverse of :func:`print_program`.

    ``functions``: by name, those that the text calls beside torch's ops and our own.
    """
    return _ProgramReader(graph, functions or {}).read(text)


class _ProgramReader:
    def __init__(self, graph: Graph, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.planned, self.functions = graph, functions
        self.graph, self.env = fx.Graph(), dict[str, fx.Node]()
        self.nodes = {node.name: node for node in graph.nodes}
        self.inputs = {(inp.kind, inp.name): inp for inp in graph.inputs}
        self.outputs = {(output.kind, output.name): output for output in graph.outputs}
        self.rank, self.takes, self.gives = -1, list[Any](), list[Any]()

    def read(self, text: str) -> RankProgram:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        for number, each in lines:
            line = TextLine(each, number)
            if self.rank < 0:
                self._head(line)
            elif line.kind == "value":
                self._call(line)
            elif line.accept("return"):
                self._return(line)
            else:
                self._input(line)
            if line.kind:
                line.fail("the end of the line")
        if not self.gives and self.outputs:
            raise Error("the text of a program is cut short", expected="a line: return ...", got=text[-60:])
        return RankProgram(self.rank, self.planned.mesh, self.graph, tuple(self.takes), tuple(self.gives))

    def _head(self, line: TextLine) -> None:
        found = re.fullmatch(r"program (\d+): rank (\d+) of mesh (.*)", line.text.strip())
        if found is None:
            line.fail(f"program {VERSION}: rank ... of mesh ...")
        if int(found[1]) != VERSION:
            raise Error(
                "the text of a program is of another version",
                where=f"line {line.number}",
                expected=f"version {VERSION}",
                got=f"version {found[1]}",
                remedy="print the program anew, with this version of shardfx",
            )
        self.rank = int(found[2])
        mesh = ", ".join(f"{axis.name}={axis.size}" for axis in self.planned.mesh.space)
        if found[3] != mesh or self.rank >= self.planned.mesh.size:
            raise Error("this program is one for another mesh", expected=mesh, got=f"rank {self.rank} of {found[3]}")
        line.at = len(line.text)
        line.next()

    def _input(self, line: TextLine) -> None:
        kind = line.word("an input, a call or return")
        if kind not in [each.value for each in InputKind]:
            line.fail("parameter, buffer, argument, target, constant or seed", kind)
        name, key = line.take("value", "a value such as %w")[1:], json.loads(line.take("string", "its name in quotes"))
        inp = self.inputs.get((InputKind(kind), key))
        line.expect(":")
        said, line.at = line.text[line.start :].strip(), len(line.text)
        line.next()
        if inp is None or _type(inp.value) != said:
            have = "no such input" if inp is None else _type(inp.value)
            raise Error("this program is one of another plan", where=f"line {line.number}", expected=have, got=said)
        self.env[name] = self.graph.create_node("placeholder", name, (), {}, name)
        self.takes.append(inp)

    def _call(self, line: TextLine) -> None:
        name = line.next()[1:]
        line.expect("=")
        word = line.word("a call such as aten.mm")
        target = self._target(line, word)
        line.expect("(")
        args: list[Any] = []
        kwargs: dict[str, Any] = {}

        def item() -> None:
            if line.kind == "word" and line.text[line.at :].lstrip().startswith("="):
                key = line.next()
                line.expect("=")
                kwargs[key] = read_argument(line, self)
            else:
                args.append(read_argument(line, self))

        line.many(item, ")")
        made = self.env[name] = self.graph.create_node("call_function", target, tuple(args), kwargs, name)
        if line.accept(":"):
            made.meta["shape"] = tuple(read_argument(line, self))
        if line.accept("from"):
            value = line.take("value", "a value of the planned graph")[1:]
            if value not in self.nodes:
                raise Error(
                    "this program is one of another plan", where=f"line {line.number}", expected="its values", got=value
                )
            made.meta["shardfx"] = self.nodes[value]

    def _return(self, line: TextLine) -> None:
        results = []

        def item() -> None:
            kind = line.word("what is returned, such as gradient")
            key = json.loads(line.take("string", "its name in quotes"))
            output = self.outputs.get((OutputKind(kind), key)) if kind in list(OutputKind) else None
            if output is None:
                line.fail("an output of the planned graph", f"{kind} {key}")
            line.expect("=")
            self.gives.append(output)
            results.append(read_argument(line, self))

        line.many(item, "")
        self.graph.output(tuple(results))

    def _target(self, line: TextLine, word: str) -> Any:
        if word in PROGRAM_OPS:
            return PROGRAM_OPS[word].function
        if word in self.functions:
            return self.functions[word]
        space, _, rest = word.partition(".")
        base, _, overload = rest.partition(".")
        packet = getattr(getattr(torch.ops, space), base, None) if base else None
        found = getattr(packet, overload or "default", None) if packet is not None else None
        if found is None:
            line.fail("an op of torch, a call of programs, or one of functions=", word)
        return found

    def use(self, line: TextLine) -> fx.Node:
        """The node of an earlier line."""
        name = line.next()[1:]
        if name not in self.env:
            line.fail("a value that an earlier line defines", f"%{name}")
        return self.env[name]
