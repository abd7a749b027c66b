"""The text of a graph: always legal, and what :func:`parse_graph` reads back.

    mesh dp=2, tp=2
    link tp bandwidth=300000000000.0, latency=2e-06
    established SHARDED
    source model.py "/models/model.py"
    parameter %layers.0.w1.weight : f32[512{tp}, 256]
    argument %args.0 : f32[64{dp}, 256]
    constant %constant.2 : i64[2] = [0, 1]
    forward:
      %0 = aten.t(%layers.0.w1.weight) : f32[256, 512{tp}]
      %1 = aten.mm(%args.0, %0) : f32[64{dp}, 512{tp}]    @ layers.0.w1  model.py:42
    outputs:
      result results.0 = %1

A line ``repeat layers 2..77`` leaves out equal blocks (see :mod:`shardfx.ir.unfold`).

A type without braces is whole. Before anything is placed the header says ``unplaced``; a ``?`` marks one value that is
not. A node with a strategy says ``cuts m{dp} k{tp}`` (``cuts -`` for none) and, where they differ from the specs of its
operands and results, what it ``needs`` and ``gives``; a placed comm op always has a strategy, and need not say so. A
comment begins with ``#``. Not in the text: the contents of large constants, the code of a source line, and why a
strategy was chosen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Phase, Strategy, Value, op_name
from shardfx.ir.mesh import Link, Mesh
from shardfx.ir.ops.comm import CommOp
from shardfx.ir.spec import Spec

from .arguments import CONSTANTS, DTYPES, TORCH_CONSTANTS

SHORT = {dtype: name for name, dtype in DTYPES.items()}
INLINE = 16
"""The contents of a constant are written if it has no more elements than this."""
WIDTH = 64
"""The column at which sources begin, where the line is shorter."""
BARE_VALUE = re.compile(r"\w[\w./-]*")
BARE_NAME = re.compile(r"[^\W\d][\w.]*")
BARE_SOURCE = re.compile(r"[\w./<>-]+")


def print_graph(graph: Graph, *, sources: bool = True) -> str:
    """The text of ``graph``; without ``sources`` it leaves out where the files lie (for texts that are kept).

    Raises:
        Error: an argument of a node has no text.
    """
    printer = Printer(graph)
    lines = [*printer.header(sources)]
    lines += [printer.input(given) for given in graph.inputs]
    phase: Phase | None = None
    for node in graph.nodes:
        if node.phase is not phase:
            phase = node.phase
            lines.append(f"{phase.value}:")
        lines.append("  " + printer.node(node))
    if graph.outputs:
        lines.append("outputs:")
        lines += [
            f"  {output.kind.value} {_quoted(output.name, BARE_NAME)} = {printer.use(output.value)}"
            for output in graph.outputs
        ]
    return "\n".join(lines)


class Printer:
    """Writes the lines of one graph; it knows what each value and each file is called.

    Example::

        Printer(graph).node(graph.nodes[3])    # '%3 = aten.mm(%1, %2) : f32[64{dp}, 512{tp}]    @ layers.0.w1'
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.tokens = _value_tokens(graph)
        self.labels = _file_labels([node.where.file for node in graph.nodes])
        self.placed = any(value.spec is not None for value in graph.values())

    def header(self, sources: bool) -> Iterable[str]:
        mesh, established = self.graph.mesh, self.graph.established
        yield "mesh " + ", ".join(f"{a.name}={f'Time({a.size})' if a.time else a.size}" for a in mesh.axes)
        for axis in mesh.axes:
            if axis.link != Link():
                yield f"link {axis.name} bandwidth={axis.link.bandwidth!r}, latency={axis.link.latency!r}"
        if not self.placed:
            yield "unplaced"
        if established:
            yield f"established {', '.join(sorted(established))}"
        for repeat in self.graph.repeats:
            yield f"repeat {_quoted(repeat.path, BARE_NAME)} {repeat.first}..{repeat.last}"
        for file, label in self.labels.items() if sources else ():
            if label != file:
                yield f"source {_quoted(label, BARE_SOURCE)} {json.dumps(file)}"

    def input(self, given: Input) -> str:
        content, constant = "", given.constant
        if constant is not None and constant.numel() <= INLINE and not _is_fake(constant):
            content = f" = {self.argument(constant.detach().tolist())}"
        return f"{given.kind.value} {self.use(given.value)} : {self.type(given.value)}{content}"

    def node(self, node: Node) -> str:
        args = [self.argument(arg) for arg in node.args]
        words = isinstance(node.op, CommOp)
        args += [f"{key}={self.keyword(key, arg) if words else self.argument(arg)}" for key, arg in node.kwargs.items()]
        line = f"{op_name(node.op)}({', '.join(args)})"
        if node.results:
            targets = ", ".join("_" if v is None else self.use(v) for v in node.results)
            types = ", ".join("_" if v is None else self.type(v) for v in node.results)
            line = f"{targets} = {line} : {types}"
        if node.strategy is not None and not (words and _says_nothing(node, node.strategy)):
            line += f"  {self.strategy(node, node.strategy)}"
        if node.stage is not None:
            line += f"  stage={node.stage}"
        where = self.where(node)
        if where:
            line = f"{line.ljust(WIDTH)}  @ {where}"
        if words and node.operands:
            line += f"  # {size_text(sum(_local_bytes(v, self.graph.mesh) for v in node.operands))}"
        return line

    def use(self, value: Value) -> str:
        """What a value is called where it is used; a value that the graph does not define has a name in ``<>``."""
        return self.tokens.get(value) or f"%<{value.name or '?'}>"

    def type(self, value: Value) -> str:
        dtype = SHORT.get(value.type.dtype) or str(value.type.dtype).removeprefix("torch.")
        if value.spec is None:
            return f"{dtype}[{', '.join(map(str, value.shape))}]{'?' if self.placed else ''}"
        if len(value.spec.dims) != len(value.shape):
            return f"{dtype}[{', '.join(map(str, value.shape))}] placed as {value.spec}"
        return value.spec.text(value.shape, dtype)

    def argument(self, arg: Any) -> str:
        if isinstance(arg, Value):
            return self.use(arg)
        if isinstance(arg, list):
            return f"[{', '.join(map(self.argument, arg))}]"
        if isinstance(arg, tuple):
            return f"({', '.join(map(self.argument, arg))}{',' if len(arg) == 1 else ''})"
        if arg is None or isinstance(arg, (bool, int, float)):
            return repr(arg)
        if isinstance(arg, str):
            return json.dumps(str(arg))
        if isinstance(arg, TORCH_CONSTANTS):
            return str(arg)
        if isinstance(arg, torch.device):
            return f"device({json.dumps(str(arg))})"
        if isinstance(arg, complex):
            return f"complex({arg.real!r}, {arg.imag!r})"
        raise Error(
            "an argument of a node has no text",
            expected="a Value, number, string, None, list, tuple, dtype, layout, memory format or device",
            got=f"{arg!r} of type {type(arg).__name__}",
        )

    def keyword(self, key: str, arg: Any) -> str:
        """An argument of a comm op, whose strings are plain words: ``axes=[dp, tp], reduce=sum``."""
        if key == "axes":
            return f"[{', '.join(arg)}]"
        if isinstance(arg, str) and arg not in CONSTANTS and arg.isidentifier():
            return arg
        return self.argument(arg)

    def strategy(self, node: Node, strategy: Strategy) -> str:
        cuts = " ".join(f"{_quoted(factor, BARE_NAME)}{{{','.join(axes)}}}" for factor, axes in strategy.cuts)
        text = f"cuts {cuts or '-'}"
        for word, specs, values in (
            ("needs", strategy.operands, node.operands),
            ("gives", strategy.results, node.outs),
        ):
            if specs != tuple(value.spec for value in values):
                shapes = [value.shape for value in values] + [()] * (len(specs) - len(values))
                said = [_spec_text(spec, shape) for spec, shape in zip(specs, shapes, strict=False)]
                text += f"  {word} {', '.join(said) or '-'}"
        return text

    def where(self, node: Node) -> str:
        where = node.where
        parts = [_quoted(where.module, BARE_SOURCE)] if where.module else []
        if where.file:
            parts.append(f"{_quoted(self.labels[where.file], BARE_SOURCE)}:{where.line}")
        return "  ".join(parts)


def _quoted(name: str, bare: re.Pattern[str]) -> str:
    return name if bare.fullmatch(name) else json.dumps(name)


def _value_tokens(graph: Graph) -> dict[Value, str]:
    """What each value is called: the inputs by name, the rest by name if all have one of their own, else by number."""
    tokens: dict[Value, str] = {}
    for given in graph.inputs:
        bare = BARE_VALUE.fullmatch(given.name) and not given.name.isdigit()
        tokens[given.value] = f"%{given.name}" if bare else f"%{json.dumps(given.name)}"
    made = dict.fromkeys(value for node in graph.nodes for value in node.outs)
    named = {value: f"%{value.name}" for value in made if BARE_VALUE.fullmatch(value.name)}
    if len({*tokens.values(), *named.values()}) < len(tokens) + len(made):
        named = {value: f"%{number}" for number, value in enumerate(made)}
    return {**named, **tokens}


def _file_labels(files: Iterable[str]) -> dict[str, str]:
    """For each file the shortest end of its path that no other has: ``model.py``, or ``vision/model.py``."""
    labels: dict[str, str] = {}
    taken: set[str] = set()
    for file in sorted(dict.fromkeys(files), key=lambda file: "/" in file):
        parts = file.split("/")
        ends = ("/".join(parts[-count:]) for count in range(1, len(parts) + 1))
        labels[file] = next((end for end in ends if end and end not in taken), file)
        taken.add(labels[file])
    labels.pop("", None)
    return labels


def _says_nothing(node: Node, strategy: Strategy) -> bool:
    """Whether the strategy is that of a comm op: no factor is cut, operands and results are as they are placed."""
    needs, gives = (tuple(value.spec for value in values) for values in (node.operands, node.outs))
    return (needs, gives) == (strategy.operands, strategy.results) and not strategy.cuts


def _spec_text(spec: Spec, shape: Sequence[int]) -> str:
    return spec.text(shape if len(shape) == len(spec.dims) else None)


def _is_fake(tensor: torch.Tensor) -> bool:
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _local_bytes(value: Value, mesh: Mesh) -> int:
    """The bytes of a value on the rank that holds most; of all of it, if its spec does not fit it or the mesh."""
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
