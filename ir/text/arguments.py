"""Arguments of nodes, types and placements as text, both ways: what ``write_x`` writes, ``read_x`` reads back.

%2, [64, 512], None, -0.5, torch.float32, device("cpu")      arguments; a list stays a list, a tuple a tuple
axes=[dp, tp], reduce=sum                                    keywords of our own ops: axes and words are bare
bf16[8{dp}, (3 64{tp})] +{cp}                                a type and its placement; ``?`` says: not placed yet
f32[64 for 32{h} by 2o-1 to 2o+1]                            rows that overlap, and what they are needed for
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import fx

from shardfx.ir.dim_sharding import DimSharding, Part, Window
from shardfx.ir.errors import Error
from shardfx.ir.graph import Value
from shardfx.ir.spec import Spec, TensorType

from .lexer import TextLine
from .scope import PrintScope, ReadScope, checked

DTYPES: dict[str, torch.dtype] = {
    **{f"f{n}": getattr(torch, f"float{n}") for n in (16, 32, 64)},
    **{f"{s}{n}": getattr(torch, f"{w}int{n}") for s, w in (("i", ""), ("u", "u")) for n in (8, 16, 32, 64)},
    "bf16": torch.bfloat16,
    "c64": torch.complex64,
    "c128": torch.complex128,
    "bool": torch.bool,
}
"""The short names of dtypes; any other is called as torch calls it."""
SHORT = {dtype: name for name, dtype in DTYPES.items()}
CONSTANTS: dict[str, Any] = {"None": None, "True": True, "False": False, "inf": math.inf, "nan": math.nan}
"""The words that stand for themselves as arguments."""
TORCH_CONSTANTS = (torch.dtype, torch.layout, torch.memory_format)
ARGUMENT = "a value, a number, a string, a list, None, True, torch.float32, ..."


# ---- arguments ---------------------------------------------------------------------------------------------


class ValueNames(Protocol):
    """What values are called where they are used."""

    def use(self, value: Any) -> str:
        """The name of a value."""


class NamedValues(Protocol):
    """What names stand for."""

    def use(self, line: TextLine) -> Any:
        """The value that the token at hand stands for."""


def write_argument(arg: Any, scope: ValueNames) -> str:
    """An argument of a node, of a graph or of a rank's program.

    Raises:
        Error: it has no text (a dict, say).
    """
    if isinstance(arg, (Value, fx.Node)):
        return scope.use(arg)
    if isinstance(arg, list):
        return f"[{', '.join(write_argument(each, scope) for each in arg)}]"
    if isinstance(arg, tuple):
        return f"({', '.join(write_argument(each, scope) for each in arg)}{',' if len(arg) == 1 else ''})"
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
    expected = "a Value, number, string, None, list, tuple, dtype, layout, memory format or device"
    raise Error("an argument of a node has no text", expected=expected, got=f"{arg!r} of type {type(arg).__name__}")


def read_argument(line: TextLine, scope: NamedValues) -> Any:
    """An argument of a node: a value, number, string or constant of torch, a list or a tuple of them."""
    if line.kind == "value":
        return scope.use(line)
    if line.kind == "string":
        return json.loads(line.next())
    if line.kind == "number":
        text = line.next()
        return int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    if line.accept("["):
        return line.many(lambda: read_argument(line, scope), "]")
    if line.accept("("):
        return tuple(line.many(lambda: read_argument(line, scope), ")"))
    word = line.word(ARGUMENT)
    if word in CONSTANTS:
        return CONSTANTS[word]
    if word in ("device", "complex"):
        line.expect("(")
        content = line.many(lambda: read_argument(line, scope), ")")
        return (torch.device if word == "device" else complex)(*content)
    found = getattr(torch, word.removeprefix("torch."), None)
    if not isinstance(found, TORCH_CONSTANTS):
        line.fail(ARGUMENT, word)
    return found


def write_keyword(key: str, arg: Any, scope: PrintScope) -> str:
    """The keyword's value in a comm op, whose strings are plain words: ``axes=[dp, tp], reduce=sum``."""
    if key == "axes":
        return f"[{', '.join(arg)}]"
    if key == "rows":
        return f"[{', '.join(f'{dim} for {window.size} by {window}' for dim, window in arg)}]"
    if isinstance(arg, str) and arg not in CONSTANTS and arg.isidentifier():
        return arg
    return write_argument(arg, scope)


def read_keyword(line: TextLine, key: str, scope: ReadScope) -> Any:
    """The argument behind ``key=``: of ``axes`` mesh axes, otherwise also a bare word."""
    if key == "axes":
        line.expect("[")
        return line.many(lambda: scope.mesh_axis(line), "]")
    if key == "rows":
        line.expect("[")
        return tuple(line.many(lambda: _rows_of_dim(line), "]"))
    if line.kind == "word" and line.token not in CONSTANTS:
        return line.next()
    return read_argument(line, scope)


# ---- types and placements ----------------------------------------------------------------------------------


def write_type(value: Value, scope: PrintScope) -> str:
    """``f32[64{dp}, (3 64{tp})] +{tp}``: type and placement of a value."""
    dtype = SHORT.get(value.type.dtype) or str(value.type.dtype).removeprefix("torch.")
    if value.spec is None:
        return f"{dtype}[{', '.join(map(str, value.shape))}]{'?' if scope.placed else ''}"
    if len(value.spec.dims) != len(value.shape):
        return f"{dtype}[{', '.join(map(str, value.shape))}] placed as {value.spec}"
    return value.spec.text(value.shape, dtype)


def read_type(line: TextLine, scope: ReadScope) -> tuple[TensorType, Spec | None]:
    """A type, and the placement in it: None where the text says ``?``, or the graph is not placed."""
    word = line.word("a type such as f32[64{dp}, 256]")
    dtype = DTYPES.get(word) or getattr(torch, word, None)
    if not isinstance(dtype, torch.dtype):
        line.fail(f"a dtype such as {', '.join(DTYPES)}", word)
    shape, spec = read_spec(line, scope)
    return TensorType(shape, dtype), None if line.accept("?") or not scope.placed else spec


def write_spec(spec: Spec, shape: Sequence[int]) -> str:
    """``[64{dp}, (3 64{tp})] +{cp}``; with dots for sizes where the placement does not fit the shape."""
    return spec.text(shape if len(shape) == len(spec.dims) else None)


def read_spec(line: TextLine, scope: ReadScope) -> tuple[tuple[int, ...], Spec]:
    """The shape and the placement."""
    line.expect("[")
    dims = line.many(lambda: _dim(line, scope), "]")
    partial: list[tuple[str, str]] = []
    while line.token in ("+", "max", "min", "avg", "product"):
        reduce = "sum" if line.token == "+" else line.token
        line.next()
        partial += [(axis, reduce) for axis in read_axes(line, scope)]
    spec = checked(line, lambda: Spec(tuple(sharding for _, sharding in dims), tuple(partial)))
    return tuple(size for size, _ in dims), spec


def _dim(line: TextLine, scope: ReadScope) -> tuple[int, DimSharding]:
    if not line.accept("("):
        part = _part(line, scope)
        if not line.accept("for"):
            return part.size, DimSharding(part.axes)
        other = _part(line, scope)
        return part.size, DimSharding(other.axes, rows=_window(line, other.size))
    parts = []
    while not line.accept(")"):
        parts.append(_part(line, scope))
    return math.prod(p.size for p in parts), DimSharding(tuple(a for p in parts for a in p.axes), tuple(parts))


def _part(line: TextLine, scope: ReadScope) -> Part:
    size = line.number_of(int, "a dim's size")
    return Part(size, read_axes(line, scope) if line.token == "{" else ())


def _rows_of_dim(line: TextLine) -> tuple[int, Window]:
    dim = line.number_of(int, "a dim")
    line.expect("for")
    return dim, _window(line, line.number_of(int, "the size of another dim"))


def _window(line: TextLine, size: int) -> Window:
    """``by 2o-1 to 2o+1``, or ``by o-1 to o-1 wrapped``."""
    line.expect("by")
    step, low, per = _row(line)
    line.expect("to")
    other_step, high, other_per = _row(line)
    if (step, per) != (other_step, other_per):
        line.fail("a first and a last row that go on alike, such as 2o-1 to 2o+1")
    wraps = line.accept("wrapped")
    return checked(line, lambda: Window(size, step, per, low, high, wraps))


def _row(line: TextLine) -> tuple[int, int, int]:
    """``2o-1`` or ``(2o-1)/3``: step, what is added, and what is divided by."""
    divided = line.accept("(")
    step = line.number_of(int, "a step") if line.kind == "number" else -1 if line.accept("-") else 1
    line.expect("o")
    plus = line.accept("+")
    more = line.number_of(int, "a number of rows") if plus or line.kind == "number" else 0
    if not divided:
        return step, more, 1
    line.expect(")")
    line.expect("/")
    return step, more, line.number_of(int, "a divisor")


def write_axes(axes: Sequence[str]) -> str:
    """``{dp,tp}``."""
    return f"{{{','.join(axes)}}}"


def read_axes(line: TextLine, scope: ReadScope) -> tuple[str, ...]:
    """The axes in braces; each must be one of the mesh."""
    line.expect("{")
    return tuple(line.many(lambda: scope.mesh_axis(line), "}"))
