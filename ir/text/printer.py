"""The printer of a graph's text, which is always legal, and read back by :func:`parse_graph`.

    mesh dp=2, tp=2
    link tp bandwidth=300000000000.0, latency=2e-06
    established SHARDED
    note "3 equal blocks were traced once"
    source model.py "/models/model.py"
    parameter %layers.0.w1.weight : f32[512{tp}, 256] hint [512{tp}, 256] "layers.*.w1.weight"
    argument %args.0 : f32[64{dp}, 256]
    constant %constant.2 : i64[2] = [0, 1]
    forward:
      %0 = aten.t(%layers.0.w1.weight) : f32[256, 512{tp}]
      %1 = aten.mm(%args.0, %0) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42
    outputs:
      result results.0 = %1 : [64{dp}, 512{tp}]

A type without braces is replicated. Before anything is placed the header says ``unplaced``; a ``?`` marks one value
that is not. A node with a strategy says ``shardings m{dp} k{tp}`` (``shardings -`` for none) and, where they differ
from the specs of its operands and results, what it ``needs`` and ``gives``; a placed comm op always has a strategy, and
need not say so. ``hint`` is a requested placement, and by whom; an output's ``: [...]`` the required one. All that a
line may say is the table in :mod:`.attributes`. ``repeat layers 2..77`` leaves out equal blocks (see
:mod:`shardfx.ir.repeat`). ``at{1}`` are the stages of a node or an input, where the header says ``pipeline pp, mb``,
and in a ``row`` for each coordinate what is done when. A comment begins with ``#``. Not in the text: the contents of
large constants and the code of a source line; on request only: which pass made a node (``by``), and ``why``; and at the
end the ``reasons`` of shardings (:mod:`.reason_lines`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from shardfx.ir.graph import Graph, Input, Node, Output, Phase, Value, op_name
from shardfx.ir.mesh import Link, Mesh
from shardfx.ir.registry import GraphOp
from shardfx.ir.schedule.actions import Pipelined

from .arguments import write_argument, write_keyword, write_type
from .attributes import INPUT, NODE, OUTPUT, VALUE, write_attributes
from .reason_lines import write_reasons
from .scope import BARE_NAME, BARE_SOURCE, PrintScope, quoted


def print_graph(graph: Graph, *, sources: bool = True, reasons: bool = False) -> str:
    """The text of ``graph``; without ``sources`` it leaves out where the files lie (for texts that are kept), with
    ``reasons`` it says which pass made each node, and why; and why each value is sharded as it is.

    Raises:
        Error: an argument or attribute of a node has no text.
    """
    printer = Printer(graph)
    lines = [*printer.header(sources)]
    lines += [printer.input(inp) for inp in graph.inputs]
    phase: Phase | None = None
    for node in graph.nodes:
        if node.phase is not phase:
            phase = node.phase
            lines.append(f"{phase.value}:")
        lines.append("  " + printer.node(node, reasons))
    if graph.outputs:
        lines.append("outputs:")
        lines += ["  " + printer.output(output) for output in graph.outputs]
    if reasons and graph.reasons:
        lines.append("reasons:")
        lines += ["  " + line for line in write_reasons(graph.reasons, printer.scope)]
    return "\n".join(lines)


class Printer:
    """Writes the lines of one graph; it knows what each value and each file is called."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.scope = PrintScope(graph)
        self.tokens = self.scope.tokens

    def header(self, sources: bool) -> Iterable[str]:
        """The lines above the inputs."""
        mesh, established = self.graph.mesh, self.graph.established
        yield "mesh " + ", ".join(f"{axis.name}={axis.extent}" for axis in mesh.axes)
        for axis in mesh.axes:
            if axis.link != Link():
                yield f"link {axis.name} bandwidth={axis.link.bandwidth!r}, latency={axis.link.latency!r}"
        if not self.scope.placed:
            yield "unplaced"
        if established:
            yield f"established {', '.join(sorted(established))}"
        for note in self.graph.notes:
            yield f"note {json.dumps(note)}"
        for repeat in self.graph.repeats:
            yield f"repeat {quoted(repeat.path, BARE_NAME)} {repeat.first}..{repeat.last}"
        if self.graph.pipeline is not None:
            yield from write_pipeline(self.graph.pipeline)
        for file, label in self.scope.labels.items() if sources else ():
            if label != file:
                yield f"source {quoted(label, BARE_SOURCE)} {json.dumps(file)}"

    def input(self, inp: Input) -> str:
        """The line of an input."""
        return write_attributes(f"{inp.kind.value} {self.defined(inp.value)}", INPUT, inp, self.scope)

    def node(self, node: Node, reasons: bool = False) -> str:
        """The line of a node; of a comm op with the bytes of its operands as a comment."""
        args = [write_argument(arg, self.scope) for arg in node.args]
        is_comm = isinstance(node.op, GraphOp)
        for key, arg in node.kwargs.items():
            text = write_keyword(key, arg, self.scope) if is_comm else write_argument(arg, self.scope)
            args.append(f"{key}={text}")
        line = f"{op_name(node.op)}({', '.join(args)})"
        if node.results:
            targets = ", ".join("_" if v is None else self.use(v) for v in node.results)
            types = ", ".join("_" if v is None else self._type_and_more(v) for v in node.results)
            line = f"{targets} = {line} : {types}"
        line = write_attributes(line, NODE, node, self.scope, reasons)
        if is_comm and node.operands:
            line += f"  # {size_text(sum(_local_bytes(v, self.graph.mesh) for v in node.operands))}"
        return line

    def output(self, output: Output) -> str:
        """The line of an output."""
        line = f"{output.kind.value} {quoted(output.name, BARE_NAME)} = {self.use(output.value)}"
        return write_attributes(line, OUTPUT, output, self.scope)

    def use(self, value: Value) -> str:
        """The name of a value where it is used; a value that the graph does not define has a name in ``<>``."""
        return self.scope.use(value)

    def type(self, value: Value) -> str:
        """The value's type and placement."""
        return write_type(value, self.scope)

    def defined(self, value: Value) -> str:
        """The value where it is defined: its name, and all that is known of it."""
        return f"{self.use(value)} : {self._type_and_more(value)}"

    def _type_and_more(self, value: Value) -> str:
        return write_attributes(self.type(value), VALUE, value, self.scope)


def write_pipeline(pipeline: Pipelined) -> Iterable[str]:
    """``pipeline pp, mb``, and a line for each row of its schedule: ``row "F0.0 F0.1 B0.0 B0.1"``."""
    yield f"pipeline {', '.join(filter(None, (pipeline.axis, pipeline.microbatches)))}"
    for row in str(pipeline.schedule).splitlines():
        yield f"row {json.dumps(row)}"


def _local_bytes(value: Value, mesh: Mesh) -> int:
    """The bytes of a value on the rank that has most; of all of it, if its spec does not fit it or the mesh."""
    spec = value.spec
    fits = spec is not None and len(spec.dims) == len(value.shape) and all(axis in mesh.names for axis in spec.axes)
    return value.local_bytes(mesh) if fits else value.type.nbytes


def size_text(nbytes: float) -> str:
    """``2.1 MB``: three digits at most, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 999.5:
            return f"{nbytes:.0f} {unit}" if unit == "B" or nbytes >= 99.95 else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.0f} TB" if nbytes >= 99.95 else f"{nbytes:.1f} TB"
