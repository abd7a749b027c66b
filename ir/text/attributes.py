"""Attributes of nodes, values, inputs and outputs in the text form, as one table: word, writer, reader.

    %1 = aten.mm(%x, %0) : f32[8{dp}, 4] hint [8, 4] "layers.*"  shards m{dp}  {lane=1}  at{2}  by "my-pass"  @ layers.0
    parameter %tok.weight : f32[64, 8] also lm_head.weight
    loss loss = %7 : []

An attribute begins with its word and ends before the next one's. To say something new in the text is a row here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.errors import Error
from shardfx.ir.graph import Guard, Input, Node, Output, Pin, Strategy, Value
from shardfx.ir.registry import GraphOp

from .arguments import read_argument, read_axes, read_spec, write_argument, write_axes, write_spec
from .lexer import TextLine
from .scope import BARE_NAME, PrintScope, ReadScope, quoted, read_where, write_where

S = TypeVar("S")
INLINE = 16
"""The contents of a constant are written if it has no more elements than this."""
WIDTH = 64
"""The column at which sources begin, where the line is shorter."""


@dataclass(frozen=True)
class Attribute(Generic[S]):
    """One attribute in the text form of a line.

    ``write`` gives what stands behind the word, None where there is nothing to say; ``read`` stands on the token behind
    the word. What is ``asked`` for is written on request only. ``gap`` is what parts it from what stands before, and
    ``column`` where it begins at least.
    """

    word: str
    write: Callable[[S, PrintScope], str | None]
    read: Callable[[S, TextLine, ReadScope], None]
    asked: bool = False
    gap: str = "  "
    column: int = 0


def write_attributes(
    line: str, table: Sequence[Attribute[S]], subject: S, scope: PrintScope, asked: bool = False
) -> str:
    """The line, and behind it what ``table`` says of the subject; with ``asked`` also what nobody needs to know."""
    for each in table:
        text = each.write(subject, scope) if asked or not each.asked else None
        if text is not None:
            line = f"{line.ljust(each.column)}{each.gap}{each.word}{text}"
    return line


def read_attributes(table: Sequence[Attribute[S]], subject: S, line: TextLine, scope: ReadScope) -> None:
    """Read what ``table`` knows, in any order, as far as the line has it."""
    while line.kind in ("word", "mark"):
        found = next((each for each in table if each.word == line.token), None)
        if found is None:
            return
        line.next()
        found.read(subject, line, scope)


def said(word: str, name: str, what: str, quotes: bool = True, **options: Any) -> Attribute[Any]:
    """The attribute of a subject that is a text: in quotes, or where it is no word."""

    def write(subject: Any, scope: PrintScope) -> str | None:
        text = getattr(subject, name)
        return f" {json.dumps(text) if quotes else quoted(text, BARE_NAME)}" if text else None

    def read(subject: Any, line: TextLine, scope: ReadScope) -> None:
        setattr(subject, name, line.name(what))

    return Attribute(word, write, read, **options)


def source(**options: Any) -> Attribute[Any]:
    """The source location of a subject in the user's code."""

    def read(subject: Any, line: TextLine, scope: ReadScope) -> None:
        subject.where = read_where(line, scope)

    return Attribute("@", lambda subject, scope: write_where(subject.where, scope), read, **options)


# ---- nodes -------------------------------------------------------------------------------------------------


def _write_shardings(node: Node, scope: PrintScope) -> str | None:
    """``shardings m{dp} k{tp}  needs [...], [...]``: what is not said is as the values are placed."""
    strategy = node.strategy
    if strategy is None or (isinstance(node.op, GraphOp) and strategy == strategy_of_comm(node)):
        return None
    text = " ".join(_factor(factor) + write_axes(axes) for factor, axes in strategy.shardings) or "-"
    for word, specs, values in (("needs", strategy.operands, node.operands), ("gives", strategy.results, node.outs)):
        if specs != tuple(value.spec for value in values):
            shapes = [value.shape for value in values] + [()] * (len(specs) - len(values))
            said = [write_spec(spec, shape) for spec, shape in zip(specs, shapes, strict=False)]
            text += f"  {word} {', '.join(said) or '-'}"
    return f" {text}"


def _read_shardings(node: Node, line: TextLine, scope: ReadScope) -> None:
    shardings = []
    if not line.accept("-"):
        while line.kind == "string" or (line.kind == "word" and line.token not in RESERVED):
            shardings.append((line.name("a factor"), read_axes(line, scope)))
    mapping: dict[str, tuple[Any, ...]] = {}
    for word, values in (("needs", node.operands), ("gives", node.outs)):
        mapping[word] = tuple(value.spec for value in values)
        if line.accept(word):
            mapping[word] = () if line.accept("-") else tuple(line.many(lambda: read_spec(line, scope)[1], ""))
    node.strategy = Strategy(mapping["needs"], mapping["gives"], tuple(shardings))


def _write_pin(node: Node, scope: PrintScope) -> str | None:
    """``pinned "fc1" n{tp} m{}``, or ``pinned "fc1:aten.mm" aten.mm: k{tp}`` where it is said of a part of the op."""
    if node.pin is None:
        return None
    pin = node.pin
    shardings = " ".join(_factor(factor) + write_axes(axes) for factor, axes in pin.shardings)
    return f" {json.dumps(pin.by)}{f' {pin.op}:' if pin.op else ''} {shardings}"


def _read_pin(node: Node, line: TextLine, scope: ReadScope) -> None:
    by = json.loads(line.take("string", "in quotes who pins it"))
    op = ""
    shardings: list[tuple[str, tuple[str, ...]]] = []
    while line.kind == "string" or (line.kind == "word" and line.token not in RESERVED):
        name = line.name("a factor")
        if not shardings and not op and line.accept(":"):
            op = name
        else:
            shardings.append((name, read_axes(line, scope)))
    node.pin = Pin(tuple(shardings), by, op)


def _factor(name: str) -> str:
    return json.dumps(name) if name in RESERVED else quoted(name, BARE_NAME)


def strategy_of_comm(node: Node) -> Strategy | None:
    """The strategy of a comm op, which follows from the placements of its values; None while one is not placed."""
    needs, gives = (tuple(v.spec for v in values if v.spec is not None) for values in (node.operands, node.outs))
    complete = len(needs) == len(node.operands) and len(gives) == len(node.outs)
    return Strategy(needs, gives) if complete else None


def _write_attrs(node: Node, scope: PrintScope) -> str | None:
    for key, value in node.attrs.items():
        if type(value) not in (int, float, bool, str):
            what = f"attribute {key!r} of a node has no text"
            expected = "an int, float, bool or str"
            raise Error(what, where=str(node.where), expected=expected, got=f"{value!r} of type {type(value).__name__}")
    said = (f"{quoted(key, BARE_NAME)}={write_argument(value, scope)}" for key, value in node.attrs.items())
    return f"{', '.join(said)}}}" if node.attrs else None


def _read_attrs(node: Node, line: TextLine, scope: ReadScope) -> None:
    def entry() -> tuple[str, Any]:
        key = line.name("an attribute such as lane=1")
        line.expect("=")
        token = line.token
        value = read_argument(line, scope)
        if type(value) not in (int, float, bool, str):
            line.fail("an int, float, bool or string", token)
        return key, value

    node.attrs = dict(line.many(entry, "}"))


def _write_at(subject: Node | Input, scope: PrintScope) -> str | None:
    return f"{{{','.join(map(str, subject.at))}}}" if subject.at else None


def _read_at(subject: Node | Input, line: TextLine, scope: ReadScope) -> None:
    line.expect("{")
    subject.at = tuple(line.many(lambda: line.number_of(int, "a stage's number"), "}"))


NODE: tuple[Attribute[Node], ...] = (
    Attribute("shards", _write_shardings, _read_shardings),
    Attribute("pinned", _write_pin, _read_pin),
    Attribute("{", _write_attrs, _read_attrs),
    Attribute("at", _write_at, _read_at),
    said("by", "made_by", "the name of the pass that made it", asked=True),
    said("why", "why", "the reason in quotes", asked=True),
    source(column=WIDTH),
)
RESERVED = frozenset({"needs", "gives", *(each.word for each in NODE)})
"""The words that end a list of factors; a factor of such a name stands in quotes."""


# ---- values, inputs, outputs -------------------------------------------------------------------------------


def _write_hint(value: Value, scope: PrintScope) -> str | None:
    if value.hint is None:
        return None
    return f" {write_spec(value.hint, value.shape)} {json.dumps(value.hinted_by)}"


def _read_hint(value: Value, line: TextLine, scope: ReadScope) -> None:
    value.hint = read_spec(line, scope)[1]
    value.hinted_by = json.loads(line.take("string", "in quotes who hints so"))


VALUE: tuple[Attribute[Value], ...] = (Attribute("hint", _write_hint, _read_hint, gap=" "),)


def _write_aliases(inp: Input, scope: PrintScope) -> str | None:
    return f" {', '.join(quoted(name, BARE_NAME) for name in inp.aliases)}" if inp.aliases else None


def _read_aliases(inp: Input, line: TextLine, scope: ReadScope) -> None:
    inp.aliases = tuple(line.many(lambda: line.name("another name of the input"), ""))


def _read_dim_order(inp: Input, line: TextLine, scope: ReadScope) -> None:
    dims = read_argument(line, scope)
    if not isinstance(dims, list) or sorted(map(str, dims)) != sorted(map(str, range(inp.value.type.ndim))):
        line.fail(f"the dims 0 to {inp.value.type.ndim - 1} in a list, each once")
    inp.dim_order = tuple(dims)


def _write_constant(inp: Input, scope: PrintScope) -> str | None:
    constant = inp.constant
    if constant is None or constant.numel() > INLINE or constant.is_meta or isinstance(constant, FakeTensor):
        return None
    return f" {write_argument(constant.detach().tolist(), scope)}"


def _read_constant(inp: Input, line: TextLine, scope: ReadScope) -> None:
    type = inp.value.type
    content = read_argument(line, scope)
    try:
        inp.constant = torch.tensor(content, dtype=type.dtype).reshape(type.shape)
    except (RuntimeError, TypeError, ValueError) as error:
        line.fail(f"{type.numel} numbers for shape {type.shape}", error)


INPUT: tuple[Attribute[Input], ...] = (
    Attribute("also", _write_aliases, _read_aliases, gap=" "),
    said("in", "pool", "what the input lies in, such as host", quotes=False, gap=" "),
    Attribute("at", _write_at, _read_at, gap=" "),
    Attribute(
        "dim_order", lambda given, _: f" {[*given.dim_order]}" if given.dim_order else None, _read_dim_order, gap=" "
    ),
    Attribute("=", _write_constant, _read_constant, gap=" "),
)


def _write_output_spec(output: Output, scope: PrintScope) -> str | None:
    return None if output.spec is None else f" {write_spec(output.spec, output.value.shape)}"


def _read_output_spec(output: Output, line: TextLine, scope: ReadScope) -> None:
    output.spec = read_spec(line, scope)[1]


def _write_expects(output: Output, scope: PrintScope) -> str | None:
    guard = output.guard or Guard(None)
    more = (f" for {json.dumps(guard.op)}" if guard.op else "") + (" of loss" if guard.of_loss else "")
    return None if output.guard is None else f" {write_argument(guard.expected, scope)}{more}"


def _read_expects(output: Output, line: TextLine, scope: ReadScope) -> None:
    expected = read_argument(line, scope)
    op = json.loads(line.take("string", "in quotes the op that wants it")) if line.accept("for") else ""
    if of_loss := line.accept("of"):
        line.expect("loss")
    output.guard = Guard(expected, of_loss=of_loss, op=op)


def _write_asked(output: Output, scope: PrintScope) -> str | None:
    return None if output.guard is None else write_where(output.guard.where, scope)


def _read_asked(output: Output, line: TextLine, scope: ReadScope) -> None:
    if output.guard is None:
        line.fail("what the guard expects, such as expects True, before its source")
    output.guard = replace(output.guard, where=read_where(line, scope))


OUTPUT: tuple[Attribute[Output], ...] = (
    Attribute(":", _write_output_spec, _read_output_spec, gap=" "),
    Attribute("expects", _write_expects, _read_expects),
    Attribute("@", _write_asked, _read_asked, column=WIDTH),
)
