"""A program that somebody changed, rewritten as the plan's own program computes the same.

    own:        gelu = aten.gelu(mm)                        changed:  erf = aten.erf(...)   product = aten.mul(mm, erf)
    rewritten:  gelu = aten.gelu(mm)

Each call that gives what a call of the own program gives, by :mod:`.normal_form`, is written as that one; any other
stays as it is. Collectives and messages stay, with their arguments, in their order: their results are taken for
something of which nothing is known. So what is written gives what the changed program gives, on every rank and whatever
the other ranks do, and is proven in its place.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.cost.replay import values
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.pack import IDENTITY
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.verify.data_movement import COLLECTIVES, MESSAGES, PACKING

from .normal_form import NormalForms, Unfollowed, key_of, values_in

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FREE = {*PACKING, *IDENTITY, operator.getitem}
"""Functions that are no ops of torch, and have no effects."""


@cache
def _functions() -> frozenset[Any]:
    """torch's functions of tensors, and Python's operators, that :func:`as_aten_calls` traces."""
    of_torch = (each for each in torch.overrides.get_overridable_functions().values())
    return frozenset(each for each in (*chain(*of_torch), *vars(operator).values()) if callable(each)) - FREE


def as_aten_calls(program: RankProgram) -> RankProgram:
    """The same program with the ATen calls that ``F.gelu``, ``torch.sigmoid`` or ``operator.add`` dispatch to in their
    place."""
    if not any(isinstance(each.target, Hashable) and each.target in _functions() for each in program.graph.nodes):
        return program
    made = program.copy()
    try:
        known = values(program)
        for node in list(made.graph.nodes):
            if node.op == "call_function" and node.target in _functions() and row_of(node.target) is None:
                _trace(made.graph, node, known)
    except (Error, *DOES_NOT_RUN):  # which is said where the program is run on shapes
        return program
    return made


def _trace(graph: fx.Graph, node: fx.Node, known: dict[str, Any]) -> None:
    operands = node.all_input_nodes

    def function(*tensors: torch.Tensor) -> Any:
        of = dict(zip(operands, tensors, strict=True))
        return node.target(*fx.map_arg(node.args, of.__getitem__), **fx.map_arg(node.kwargs, of.__getitem__))  # type: ignore[operator]

    traced = make_fx(function)(*(known[each.name] for each in operands)).graph
    inside = dict(zip((each for each in traced.nodes if each.op == "placeholder"), operands, strict=True))
    with graph.inserting_before(node):
        result = graph.graph_copy(traced, inside)
    if not isinstance(result, fx.Node):
        raise TypeError(f"{node.target} gives several tensors")
    if "shardfx" in node.meta:
        result.meta["shardfx"] = node.meta["shardfx"]
    known[result.name] = known[node.name]
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def as_planned(own: RankProgram, changed: RankProgram, fakes: FakeCalls) -> RankProgram:
    """A plain program, rewritten as the plan's own, plain, program of the same rank."""
    forms = NormalForms(fakes)
    mine, theirs = (_ProgramValues(forms, program) for program in (own, changed))
    try:
        mine.read()
        theirs.read()
    except Unfollowed:
        return changed
    return replace(changed, graph=_Rewriting(mine, theirs).graph(), constants=dict(changed.constants))


@dataclass
class _ProgramValues:
    """The values of a program's nodes."""

    forms: NormalForms
    program: RankProgram
    of: dict[fx.Node, Any] = field(default_factory=dict)
    pending: set[fx.Node] = field(default_factory=set)
    """What may be used only after it was waited for, and what is made of it before."""
    asked: Counter[Any] = field(default_factory=Counter)

    def read(self) -> None:
        """Read the whole program."""
        inputs = iter(self.program.inputs)
        coords = self.program.mesh.coords(self.program.rank)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value = next(inputs).value
                assert value.spec is not None
                shape = value.spec.local_shape(value.type.shape, self.program.mesh, coords)
                self.of[node] = self.forms.atom(("input", value.name), shape, value.type.dtype)
            elif node.op == "get_attr":
                constant = self.program.constants[str(node.target)]
                if not isinstance(constant, torch.Tensor):
                    raise Unfollowed
                self.of[node] = self.forms.another((constant.shape, constant.dtype))
            elif node.op == "call_function":
                self.of[node] = self._call(node)

    def _call(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(node.args, self.of.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, self.of.__getitem__)
        types = partial(self.forms.types, node.target, args, kwargs)
        if node.target in COLLECTIVES | MESSAGES:
            self.pending.add(node)
            key = node.target, key_of(args), key_of(kwargs)
            self.asked[key] += 1
            type = types()
            return None if type is None else self.forms.atom(("received", key, self.asked[key]), *type)
        early = any(each in self.pending for each in node.all_input_nodes)
        if early and node.target is not c10d.wait_tensor.default:
            self.pending.add(node)
        if node.target in IDENTITY and node not in self.pending:
            return args[0]
        if node in self.pending or not (isinstance(node.target, torch._ops.OpOverload) or node.target in FREE):
            return self.forms.another(types())
        return self.forms.call(node.target, args, kwargs, types)


class _Rewriting:
    """Writes a changed program anew."""

    def __init__(self, own: _ProgramValues, changed: _ProgramValues) -> None:
        self.own, self.changed = own, changed
        self.there: dict[Any, fx.Node] = {}
        """What is written, by what it gives."""
        self.places = {node: place for place, node in enumerate(own.of)}
        self.known: dict[Any, fx.Node] = {}
        for node, value in own.of.items():
            if node not in own.pending:
                self.known.setdefault(key_of(value), node)
        self.made = fx.Graph()

    def graph(self) -> fx.Graph:
        """The graph that is written."""
        env: dict[fx.Node, fx.Node] = {}
        for node in self.changed.program.graph.nodes:
            env[node] = self._node(node, env)
        return self.made

    def _node(self, node: fx.Node, env: Mapping[fx.Node, fx.Node]) -> fx.Node:
        value = self.changed.of.get(node)
        key, is_value = key_of(value), any(True for _ in values_in(value))
        if node.op == "call_function" and node not in self.changed.pending and is_value:
            if key in self.there:
                return self.there[key]
            if key in self.known and (calls := self._needed(self.known[key])) is not None:
                for each in calls:
                    self.there[key_of(self.own.of[each])] = self.made.node_copy(each, self._written)
                return self.there[key]
        copy = self.made.node_copy(node, env.__getitem__)
        if node.op == "placeholder" or is_value:
            self.there.setdefault(key, copy)
        return copy

    def _written(self, node: fx.Node) -> fx.Node:
        return self.there[key_of(self.own.of[node])]

    def _needed(self, node: fx.Node) -> list[fx.Node] | None:
        """The calls of the own program that must be written for one of it, in order; None where they need what the
        changed program has not received so far."""
        found: dict[Any, fx.Node] = {}
        front = [node]
        while front:
            each = front.pop()
            key = key_of(self.own.of[each])
            if key in self.there or (key in found and self.places[found[key]] <= self.places[each]):
                continue
            if each in self.own.pending or each.op != "call_function":
                return None
            found[key] = each
            front += each.all_input_nodes
        return sorted(found.values(), key=self.places.__getitem__)
