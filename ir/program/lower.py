"""Lowering: one rank's program, written as a ``torch.fx`` graph on plain local tensors.

    %3 = aten.mm(%1, %2) : f32[64{dp}, 512] +{tp}    mm = aten.mm.default(x, w)  # layers.0.w2  model.py:42
    %4 = comm.all_reduce(%3, axes=[tp])          ->  all_reduce = c10d.all_reduce.default(mm, 'sum', 'dp2.tp2/tp@0')
                                                     wait = c10d.wait_tensor.default(all_reduce)

A collective starts as soon as it can (see :mod:`.early`) and is waited for just before its first use. Shapes among
the arguments become the local ones; what else differs between ranks is written by the ``local`` function of an op's
rule.
"""

from __future__ import annotations

import keyword
import operator
import re
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Value, substitute
from shardfx.ir.ops import pack
from shardfx.ir.ops.comm import CommOp, fused
from shardfx.ir.ops.comm_local import LOWER, Pending
from shardfx.ir.rules.book import Contiguous, RuleBook, perform
from shardfx.ir.rules.local import Share, gives_list
from shardfx.ir.spec import Spec

from .devices import CPU, on_device
from .early import start_early
from .rank_program import Code, Program

aten = torch.ops.aten


def select(graph: Graph, kinds: Iterable[OutputKind]) -> tuple[list[Input], list[Node], list[Output]]:
    """The part of the graph that the outputs of some kinds need."""
    wanted = set(kinds)
    outputs = [output for output in graph.outputs if output.kind in wanted]
    needed = {output.value for output in outputs}
    nodes = []
    for node in reversed(graph.nodes):
        if any(value in needed for value in node.outs):
            node = _without(node, needed)
            needed.update(node.operands)
            nodes.append(node)
    return [given for given in graph.inputs if given.value in needed], nodes[::-1], outputs


def _without(node: Node, needed: Container[Value]) -> Node:
    """A fused collective without the values that nobody needs: a target must not travel where there is no loss."""
    kept = [i for i, value in enumerate(node.outs) if value in needed]
    if node.op not in fused.values() or len(kept) == len(node.outs):
        return node
    args, results = tuple(node.operands[i] for i in kept), [node.results[i] for i in kept]
    return replace(node, args=args, results=results, strategy=None)


def generate(
    graph: Graph, rank: int, book: RuleBook, kinds: Iterable[OutputKind], device: torch.device = CPU
) -> Program:
    """The program of one rank, for the outputs of some kinds. Needs no process group and no tensors."""
    code = write(graph, rank, book, kinds, device)
    module = fx.GraphModule(torch.nn.Module(), code.graph, class_name=f"Rank{rank}")
    return Program(module, code.inputs, code.outputs)


def write(graph: Graph, rank: int, book: RuleBook, kinds: Iterable[OutputKind], device: torch.device = CPU) -> Code:
    """What :func:`generate` compiles."""
    inputs, nodes, outputs = select(graph, kinds)
    writer = Writer(graph, rank, book, device=device)
    for given in inputs:
        writer.placeholder(given)
    for node in start_early(nodes, [given.value for given in inputs]):
        writer.node(node)
    results = tuple(writer.use(output.value) for output in outputs)
    writer.fx.output(results)
    writer.fx.on_generate_code(lambda _: writer.annotate)
    return Code(writer.fx, tuple(inputs), tuple(outputs))


@dataclass
class Writer:
    """Writes the fx graph of one rank."""

    graph: Graph
    rank: int
    book: RuleBook
    fx: fx.Graph = field(default_factory=fx.Graph)
    env: dict[Value, Any] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)
    current: Node | None = None
    device: torch.device = CPU

    def __post_init__(self) -> None:
        self.mesh = self.graph.mesh
        self.coords = self.mesh.coords(self.rank)
        self._shapes: dict[tuple[Any, Spec], tuple[int, ...]] = {}

    def placeholder(self, given: Input) -> None:
        name = identifier(given.name)
        while name in self.taken:  # "a.b" and "a_b" are two names of a model, and one of Python
            name += "_"
        self.taken.add(name)
        node = self.fx.placeholder(name)
        self.comments[node.name] = (
            f"{given.name}: {given.value.spec.text(given.value.shape) if given.value.spec else ''}"
        )
        self.env[given.value] = node

    def use(self, value: Value) -> Any:
        """The fx node of a value; a collective that is under way is waited for now."""
        held = self.env[value]
        if isinstance(held, Pending):
            held = self.env[value] = held.finish()
        return held

    @cached_property
    def dense(self) -> dict[Contiguous, Callable[[Value], Any]]:
        """How an operand is used, by the layout that the op's kernel takes."""
        return {
            Contiguous.ANY: self.use,
            Contiguous.LAST_DIM: lambda v: self.call(pack.dense_last, self.use(v)) if v.shape else self.use(v),
            Contiguous.ALL: lambda value: self.call(aten.contiguous.default, self.use(value)),
        }

    def call(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        share = Share(self.current, self.mesh, self.coords) if self.current is not None else None
        target, args, kwargs = on_device(share, (target, args, kwargs), self.device)
        name = target._opname if isinstance(target, torch._ops.OpOverload) else None
        made = self.fx.create_node("call_function", target, args, kwargs, name)
        if self.current is not None:
            made.meta["shardfx"] = self.current
            self.comments[made.name] = str(self.current.where)
        return made

    def shape(self, value: Value, spec: Spec | None = None) -> tuple[int, ...]:
        """The local shape of a value on this rank."""
        spec = spec if spec is not None else value.spec
        assert spec is not None
        key = (value.type.shape, spec)
        if key not in self._shapes:
            self._shapes[key] = spec.local_shape(value.shape, self.mesh, self.coords)
        return self._shapes[key]

    def node(self, node: Node) -> None:
        self.current = node
        if isinstance(node.op, CommOp):
            LOWER[node.op.name](self, node)
            return
        entry = self.book.entry(node.op)
        use = self.use if entry is None else self.dense[entry.contiguous]
        args = substitute(node.args, use)
        kwargs = {k: substitute(a, use) for k, a in node.kwargs.items()}
        result = perform(entry, LocalEmit(node, self.mesh, self.coords, self, args, kwargs))
        self.bind(node, result)

    def bind(self, node: Node, result: Any) -> None:
        if len(node.results) == 1 and not gives_list(node.op):
            self.env[node.results[0]] = result  # type: ignore[index]
            return
        for i, value in enumerate(node.results):
            if value is not None:
                self.env[value] = self.fx.call_function(operator.getitem, (result, i))

    def annotate(self, body: list[str]) -> list[str]:
        """Lines of code with their module path and source behind them."""
        statements: list[str] = []
        for text in body:
            if not text.strip():
                continue
            if text.startswith(";") and statements:
                statements[-1] = statements[-1].rstrip("\n") + text
            else:
                statements.append(text)
        lines = []
        for text in statements:
            match = re.match(r"(\w+) = ", text)
            comment = self.comments.get(match.group(1), "") if match else ""
            lines.append(f"{text.rstrip()}  # {comment}\n" if comment else f"{text.rstrip()}\n")
        return lines


@dataclass
class LocalEmit(Share):
    """What a rule's ``local`` function writes with (see :class:`shardfx.ir.rules.local.Emit`)."""

    writer: Writer
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def call(self, op: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        return self.writer.call(op, *args, **kwargs)

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        return self.writer.shape(value, spec)


def identifier(name: str) -> str:
    """A Python name for a dotted one: ``layers.0.weight`` is ``layers_0_weight``, ``0.weight`` is ``_0_weight``."""
    made = re.sub(r"\W", "_", name)
    return f"_{made}" if made[0].isdigit() or keyword.iskeyword(made) else made
