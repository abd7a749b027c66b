"""Python code generation: a program as the source of a function, in which each value is freed after its last use.

What a call does is the program's; *how* it is done may be an engine's (:class:`CallOverrides`): which memory pool is
behind ``memory.empty``, how a backend reduces and scatters, that a virtual rank yields at its collectives.

    def program(x, w):
        mm = _mm(x, w)
        x = None
        all_reduce = (yield _Request, mm, None).pop()
        return (all_reduce,)

Iterations are a loop; loops in schedule actions one over the words of their order, with a branch for each action. What
an action makes for another of the same iteration is kept by the number of the iteration, and memory that all collect
into is made by the first.
"""

from __future__ import annotations

import linecache
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from .aliasing import destination
from .loops.loop_regions import (
    DELIMITERS,
    ActionOrder,
    Lifetimes,
    action_name,
    action_order,
    is_induction_variable,
    loop_of,
    loop_role,
)
from .rank_program import RankProgram

Watch = Callable[[fx.Node, Any, tuple[Any, ...]], None]
"""Looks at what a call made of its operands."""
_number = count()
aten = torch.ops.aten
QUICK_OPS = """
    add.Tensor add.out addmm.default bmm.default cat.default clone.default contiguous.default div.Tensor
    embedding.default expand.default mm.default mm.out mul.Tensor mul.out native_layer_norm.default permute.default
    relu.default reshape.default sub.Tensor sum.dim_IntList t.default transpose.int unsqueeze.default view.default
"""
QUICK: dict[object, Callable[..., Any]] = {
    getattr(getattr(aten, name), overload): getattr(torch, name, None) or getattr(torch.Tensor, name)
    for name, overload in (op.split(".") for op in QUICK_OPS.split())
}
"""Functions of torch that call the same ops with the same arguments: in half of the time, for their arguments are not
matched with a schema. Of other ops that matters less, for they are seldom called, or take long."""


@dataclass(frozen=True)
class CallOverrides:
    """How an engine does some calls: functions ``instead`` of others, and for which nodes it is ``ask``-ed: what a
    coroutine yields beside the first operand and the destination, before it takes the result out of the list that it is
    sent (``of_iteration`` where induction variables are among the arguments)."""

    instead: Mapping[Any, Callable[..., Any]] = field(default_factory=dict)
    ask: Callable[[fx.Node], Any | None] | None = None


@dataclass(frozen=True)
class ProgramSource:
    """A program's source, compiled, which knows the node of each of its lines."""

    text: str
    start: Callable[..., Any]
    lines: tuple[fx.Node | None, ...]
    file: str

    def __call__(self, *inputs: torch.Tensor) -> Any:
        return self.start(*inputs)

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node that raised; None if it was none of the program's."""
        trace, line = error.__traceback__, None
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == self.file:
                line = trace.tb_lineno
            trace = trace.tb_next
        return self.lines[line - 1] if line is not None and line <= len(self.lines) else None


def write_source(program: RankProgram, forms: CallOverrides | None = None, watch: Watch | None = None) -> ProgramSource:
    """The Python source of a program. ``watch`` is called with every result."""
    return _SourceWriter(program, forms or CallOverrides(), watch).source()


class _SourceWriter:
    def __init__(self, program: RankProgram, forms: CallOverrides, watch: Watch | None) -> None:
        self.program, self.forms, self.watch = program, forms, watch
        self.nodes = tuple(program.graph.nodes)
        self.local = {node.name for node in self.nodes}
        self.scope: dict[str, Any] = {}
        self.lines: list[str] = []
        self.life = Lifetimes(self.nodes)
        self.open = ["program"]
        self.owners: list[fx.Node | None] = []

    def source(self) -> ProgramSource:
        inputs = [node.name for node in self.nodes if node.op == "placeholder"]
        self._add(None, f"def program({', '.join(inputs)}):", indent="")
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            part = loop_role(node)
            if part in DELIMITERS:
                self._frame(node, part)
            elif node in self.life.made_for:
                self._add(node, f"{node.name} = None")
            else:
                self._make_first(node)
                self._call(node, part)
                if (iterations := self.life.kept(node)) is not None:
                    self._add(node, f"{self._kept(node)}[{iterations.name}] = {node.name}")
            gone = [each.name for each in self.life.dying.get(node, ()) if each.name not in inputs]
            if gone and node.op != "output":
                self._add(node, f"{' = '.join(gone)} = None")
        if self.forms.ask is not None:
            self._add(None, "    yield", indent="")  # a coroutine, whether it asks for something or not
        text, file = "\n".join(self.lines) + "\n", f"<shardfx program {next(_number)}>"
        linecache.cache[file] = (len(text), None, text.splitlines(True), file)
        exec(compile(text, file, "exec"), self.scope)
        return ProgramSource(text, self.scope["program"], tuple(self.owners), file)

    def _call(self, node: fx.Node, part: str) -> None:
        self._add(node, self._statement(node))
        if self.watch is not None and node.op == "call_function" and part in ("", "collects"):
            operands = "".join(f"{used.name}, " for used in node.all_input_nodes)
            self._add(node, f"{self._name(self.watch)}({self._name(node)}, {node.name}, ({operands}))")

    def _make_first(self, node: fx.Node) -> None:
        """Allocate the buffer that a call collects into, once for all iterations."""
        for memory in node.all_input_nodes:
            if self.life.made_for.get(memory) is node:
                self._add(memory, f"if {memory.name} is None:")
                self.open.append("made")
                self._call(memory, "")
                self.open.pop()

    def _add(self, node: fx.Node | None, line: str, indent: str | None = None) -> None:
        self.lines.append("    " * len(self.open) + line if indent is None else indent + line)
        self.owners.append(node)

    # ---- iterations -------------------------------------------------------------------------------------------------

    def _frame(self, node: fx.Node, part: str) -> None:
        """The source where iterations begin or end, or one of their actions begins."""
        if part != "opens" and self.open[-1] == "unit":
            self.open.pop()
        if part == "closes":
            self.open.pop()
        elif part == "unit":
            self._unit(node)
        elif order := action_order(node):
            for each in self.nodes:
                if self.life.kept(each) is node:
                    self._add(node, f"{self._kept(each)} = {{}}")
            words = tuple(map(tuple, ActionOrder.of(order.split()).words))
            self._add(node, f"for {self._free(f'{node.name}_unit')}, {node.name} in {words}:")
            self.open.append(part)
        else:
            self._add(node, f"for {node.name} in range({node.args[1]}):")
            self.open.append(part)

    def _unit(self, node: fx.Node) -> None:
        """The source of an action: a branch, with values that others stored for it."""
        iterations, name = loop_of(node), action_name(node)
        word = "if" if ActionOrder.of(action_order(iterations).split()).units[0] == name else "elif"
        self._add(node, f"{word} {self._free(f'{iterations.name}_unit')} == {name!r}:")
        self.open.append("unit")
        takes = self.life.takes.get(node, [])
        for value in takes:
            at, last = f"{self._kept(value)}[{iterations.name}]", self.life.let_go(value, node)
            taken = f"{self._kept(value)}.pop({iterations.name})"
            if len(last) < iterations.args[1]:  # type: ignore[operator]
                taken = f"{taken} if {iterations.name} in {tuple(last)} else {at}" if last else at
            self._add(node, f"{value.name} = {taken}")
        if not takes:
            self._add(node, "pass")

    def _kept(self, value: fx.Node) -> str:
        """The container of values that actions share, by the iteration."""
        return self._free(f"{value.name}_kept")

    def _free(self, name: str) -> str:
        while name in self.local:
            name += "_"
        return name

    def _statement(self, node: fx.Node) -> str:
        if node.op == "output":
            return f"return {self._text(tuple(node.args[0]))}"  # type: ignore[arg-type]
        if node.op == "get_attr":
            return f"{node.name} = {self._name(self.program.constants[str(node.target)])}"
        asked = self.forms.ask(node) if self.forms.ask is not None else None
        if asked is not None:
            into = destination(node)
            at, request = "None" if into is None else into.name, self._name(asked)
            if numbers := [used.name for used in node.all_input_nodes if is_induction_variable(used)]:
                request += ".of_iteration({" + ", ".join(f"{name!r}: {name}" for name in numbers) + "})"
            return f"{node.name} = (yield {request}, {self._text(node.args[0])}, {at}).pop()"
        function = self.forms.instead.get(node.target, node.target)
        parts = [self._text(a) for a in node.args] + [f"{k}={self._text(a)}" for k, a in node.kwargs.items()]
        return f"{node.name} = {self._name(function)}({', '.join(parts)})"

    def _text(self, arg: Any) -> str:
        return argument_text(arg, self._name)

    def _name(self, thing: Any) -> str:
        """A global name for an object. Ops are bound to their cheapest callable."""
        if isinstance(thing, torch._ops.OpOverload):
            name = f"_{thing._opname}_{thing._overloadname}".removesuffix("_default")
            thing = QUICK.get(thing, thing._op)
        else:
            name = f"_{getattr(thing, '__name__', type(thing).__name__)}"
        name = name if name.isidentifier() else "_thing"
        while name in self.local or self.scope.setdefault(name, thing) is not thing:
            name += "_"
        return name


def argument_text(arg: Any, name: Callable[[Any], str]) -> str:
    """An argument of a node as it stands in a program's source; ``name`` gives a name to what cannot be written."""
    if isinstance(arg, fx.Node):
        return arg.name
    if isinstance(arg, (list, tuple)):
        body = ", ".join(argument_text(a, name) for a in arg)
        return f"[{body}]" if isinstance(arg, list) else f"({body}{',' if arg else ''})"
    plain = isinstance(arg, (int, bool, str, type(None))) or (isinstance(arg, float) and math.isfinite(arg))
    return repr(arg) if plain else name(arg)
