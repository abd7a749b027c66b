"""A program that somebody changed, written as the plan's own program writes it.

    own:      gelu = aten.gelu(mm)                           changed:  erf = aten.erf(...)   product = aten.mul(mm, erf)
    written:  gelu = aten.gelu(mm)

Each call that gives what a call of the own program gives, by the laws of :mod:`.forms`, is written as that one; any
other stands as it does. Collectives and messages stay, with their arguments, in their order: what they give is taken
for something of which nothing is known. So what is written gives what the changed program gives, on every rank and
whatever the other ranks do, and is proven in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from shardfx.ir.cost.fake_calls import FakeCalls
from shardfx.ir.ops.pack import IDENTITY
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.verify.data_movement import COLLECTIVES, MESSAGES, PACKING

from .forms import NormalForms, Unfollowed
from .known_ops import empty
from .values import key_of, values_in

aten = torch.ops.aten
c10d = torch.ops._c10d_functional
FREE = {*PACKING, *IDENTITY, operator.getitem}
"""Functions that are no ops of torch, and only give something."""


def as_planned(own: RankProgram, changed: RankProgram, fakes: FakeCalls) -> RankProgram:
    """A plain program, written as the plan's own, plain, program of the same rank writes it."""
    forms = empty(fakes)
    mine, theirs = (_Read(forms, program) for program in (own, changed))
    try:
        mine.all()
        theirs.all()
    except Unfollowed:
        return changed
    written = _Writer(mine, theirs)
    return RankProgram(
        changed.rank, changed.mesh, written.graph(), changed.inputs, changed.outputs, dict(changed.constants)
    )


@dataclass
class _Read:
    """The values of a program's nodes."""

    forms: NormalForms
    program: RankProgram
    of: dict[fx.Node, Any] = field(default_factory=dict)
    pending: set[fx.Node] = field(default_factory=set)
    """What may be used only after it was waited for, and what is made of it before."""
    asked: dict[Any, int] = field(default_factory=dict)

    def all(self) -> None:
        """Read the whole program."""
        given = iter(self.program.inputs)
        coords = self.program.mesh.coords(self.program.rank)
        for node in self.program.graph.nodes:
            if node.op == "placeholder":
                value = next(given).value
                assert value.spec is not None
                shape = value.spec.local_shape(value.type.shape, self.program.mesh, coords)
                self.of[node] = self.forms.given(value.name, shape, value.type.dtype)
            elif node.op == "get_attr":
                held = self.program.constants[str(node.target)]
                if not isinstance(held, torch.Tensor):
                    raise Unfollowed
                self.of[node] = self.forms.another(held.shape, held.dtype)
            elif node.op == "call_function":
                self.of[node] = self._call(node)

    def _call(self, node: fx.Node) -> Any:
        args: Any = fx.map_arg(node.args, self.of.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, self.of.__getitem__)

        def types() -> Any:
            return self.forms.types(node.target, args, kwargs)

        if node.target in COLLECTIVES | MESSAGES:
            self.pending.add(node)
            key = node.target, key_of(args), key_of(kwargs)
            self.asked[key] = self.asked.get(key, 0) + 1
            return self.forms.given((key, self.asked[key]), *types())
        early = any(n in self.pending for n in node.all_input_nodes)
        if early and node.target is not c10d.wait_tensor.default:
            self.pending.add(node)
        if node.target in IDENTITY and node not in self.pending:
            return args[0]
        if node in self.pending or not (isinstance(node.target, torch._ops.OpOverload) or node.target in FREE):
            return self.forms.each_apart(types())
        return self.forms.call(node.target, args, kwargs, types)


class _Writer:
    """Writes the changed program anew."""

    def __init__(self, own: _Read, changed: _Read) -> None:
        self.own, self.changed = own, changed
        self.there: dict[Any, fx.Node] = {}
        """What is written, by what it gives."""
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
        key = key_of(self.changed.of.get(node))
        local = node.op == "call_function" and node not in self.changed.pending and self._is_value(node)
        if local:
            if key in self.there:
                return self.there[key]
            if key in self.known and (calls := self._needed(self.known[key])) is not None:
                for each in calls:
                    self.there[key_of(self.own.of[each])] = self.made.node_copy(each, self._written)
                return self.there[key]
        copy = self.made.node_copy(node, env.__getitem__)
        if node.op == "placeholder" or self._is_value(node):
            self.there.setdefault(key, copy)
        return copy

    def _is_value(self, node: fx.Node) -> bool:
        return any(True for _ in values_in(self.changed.of.get(node)))

    def _written(self, node: fx.Node) -> fx.Node:
        return self.there[key_of(self.own.of[node])]

    def _needed(self, node: fx.Node) -> list[fx.Node] | None:
        """The calls of the own program that must be written for one of it, in order; None where they need what the
        changed program has not received so far."""
        found: dict[fx.Node, None] = {}
        front = [node]
        while front:
            each = front.pop()
            if each in found or key_of(self.own.of[each]) in self.there:
                continue
            if each in self.own.pending or each.op != "call_function":
                return None
            found[each] = None
            front += each.all_input_nodes
        places = {each: i for i, each in enumerate(self.own.program.graph.nodes)}
        distinct = {key_of(self.own.of[each]): each for each in sorted(found, key=places.__getitem__, reverse=True)}
        return sorted(distinct.values(), key=places.__getitem__)
