"""A rank's program as a generator that yields at its collectives, so that somebody else may do them.

    all_reduce = c10d.all_reduce.default(mm, 'sum', 'tp2/tp@0')      all_reduce = yield request, mm
    wait = c10d.wait_tensor.default(all_reduce)                 ->   wait = all_reduce

Virtual ranks run so, and a real rank whose every node is watched (:mod:`.watch`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.program.source import argument_text, raised_at

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor

FILE = "<shardfx program>"


@dataclass(frozen=True)
class Request:
    """What a rank asks of its group: the collective and its arguments behind the tensor."""

    op: Any
    args: tuple[Any, ...]
    group: str
    node: str
    where: str

    def same(self, other: Request) -> bool:
        return self.op is other.op and (self.op is c10d.all_to_all_single.default or self.args == other.args)

    def __str__(self) -> str:
        return f"{op_name(self.op)}{self.args} on {self.group} at node {self.node!r} ({self.where})"


def op_name(op: Any) -> str:
    return str(op).removeprefix("_c10d_functional.").removesuffix(".default")


RankCoroutine = Generator[tuple[Request, Tensor], Tensor, Sequence[Tensor]]
COLLECTIVES = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}


@dataclass(frozen=True)
class Steps:
    """A program that is run up to its next collective, and knows which node each of its lines is."""

    start: Callable[..., RankCoroutine]
    nodes: tuple[fx.Node, ...]
    lines: tuple[fx.Node | None, ...]

    def __call__(self, *inputs: Tensor) -> RankCoroutine:
        return self.start(*inputs)

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node that raised; None if it was none of the program's."""
        line = raised_at(error, FILE)
        return self.lines[line - 1] if line is not None and line <= len(self.lines) else None

    def position(self, node: fx.Node | None) -> int:
        """How many ops of the plan stand before a node: the same on all ranks, whatever helps stand between."""
        made = [each.meta.get("shardfx") for each in self.nodes[: self.nodes.index(node)]] if node is not None else []
        return len({id(op) for op in made})


Watch = Callable[[fx.Node, Any, tuple[Any, ...]], None]
"""Looks at what a node made of its operands."""


def as_generator(module: fx.GraphModule, watch: Watch | None = None) -> Steps:
    """The module's graph as a generator function that yields at collectives; ``watch`` is shown every result."""
    return _Writer(module, watch).steps()


class _Writer:
    def __init__(self, module: fx.GraphModule, watch: Watch | None) -> None:
        self.module, self.watch = module, watch
        self.scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan"), "_watch": watch}
        self.nodes = tuple(module.graph.nodes)
        self.inputs = [node.name for node in self.nodes if node.op == "placeholder"]

    def steps(self) -> Steps:
        lines: list[str] = [f"def program({', '.join(self.inputs)}):"]
        owners: list[fx.Node | None] = [None]
        dying = self._dying()
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            body = [self._statement(node)]
            if self.watch is not None and node.op == "call_function":
                self.scope[f"_n_{node.name}"] = node
                operands = "".join(f"{used.name}, " for used in node.all_input_nodes)
                body.append(f"_watch(_n_{node.name}, {node.name}, ({operands}))")
            gone = [n for n in dying.get(node, ()) if n not in self.inputs]
            if gone and node.op != "output":
                body.append(f"{' = '.join(gone)} = None")
            lines += [f"    {line}" for line in body]
            owners += [node] * len(body)
        source = "\n".join([*lines, "    yield"])
        exec(compile(source, FILE, "exec"), self.scope)
        return Steps(self.scope["program"], self.nodes, tuple(owners))

    def _dying(self) -> dict[fx.Node, list[str]]:
        """After which node each value is let go."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.nodes:
            for used in node.all_input_nodes:
                last[used] = node
        dying: dict[fx.Node, list[str]] = {}
        for used, user in last.items():
            dying.setdefault(user, []).append(used.name)
        return dying

    def _statement(self, node: fx.Node) -> str:
        name, scope = node.name, self.scope
        if node.op == "output":
            return f"return {self._text(node.args[0])}"
        if node.op == "get_attr":
            scope[f"_a_{name}"] = getattr(self.module, str(node.target))
            return f"{name} = _a_{name}"
        if node.op != "call_function":
            raise Error(
                f"a rank's program has a {node.op} node, which virtual ranks do not run", got=node.format_node()
            )
        if node.target is c10d.wait_tensor.default:
            return f"{name} = {self._text(node.args[0])}"
        if node.target in COLLECTIVES:
            made = node.meta.get("shardfx")
            args = tuple(map(_frozen, node.args[1:-1]))
            where = str(made and made.where)
            scope[f"_r_{name}"] = Request(node.target, args, str(node.args[-1]), name, where)
            return f"{name} = yield _r_{name}, {self._text(node.args[0])}"
        scope[f"_f_{name}"] = getattr(node.target, "_op", node.target)
        parts = [self._text(a) for a in node.args] + [f"{k}={self._text(a)}" for k, a in node.kwargs.items()]
        return f"{name} = _f_{name}({', '.join(parts)})"

    def _text(self, arg: Any) -> str:
        return argument_text(arg, self._name)

    def _name(self, arg: Any) -> str:
        name = f"_c{len(self.scope)}"
        self.scope[name] = arg
        return name


def _frozen(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, (list, tuple)) else arg
