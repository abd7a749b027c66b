"""overwrite: an optimizer's step is computed where what it makes anew lies, or in memory that nothing else needs.

    mul = aten.mul(w, scale)                      mul = aten.mul.out(w, scale, out=w)
    lerp = aten.lerp(m, grad, 0.1)                lerp = aten.lerp.Scalar_out(m, grad, 0.1, out=m)
    sqrt = aten.sqrt(v)                           sqrt = aten.sqrt(v)
    add = aten.add(sqrt, 1e-08)            ->     add = aten.add.out(sqrt, 1e-08, out=sqrt)
    new = aten.add(mul, step)                     new = aten.add.out(mul, step, out=mul)
    gathered = getitem(spread, 0)                 kept = memory.write_part(v, buffer, 2, 0, [8, 6])
    away = memory.stored(memory.to_host(m))
    return (new, lerp, gathered, away)            away = memory.stored(memory.put(place, m))
                                                  return (new, lerp, kept, away)

So a step makes no second copy of parameters and states, and writes none; nor of the rows that a rank steps of what it
has whole. Where a condition is watched (a guard), what is stored may not change before it was looked at, and all stays
as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Input, Node, Phase, Value
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.computing.segment import CAST
from shardfx.ir.ops.local_ops import OVERWRITING
from shardfx.ir.ops.pools import transfer
from shardfx.ir.program.aliasing import STEPPED, Aliasing, renewed
from shardfx.ir.program.rank_program import RankProgram

from .rank_pass import RankContext, RankPass


@dataclass(frozen=True)
class Overwrite(RankPass):
    """MixedPrecision pointwise ops of the step over an operand that is used there last."""

    name: ClassVar[str] = "overwrite"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        """Give results the memory of operands."""
        steps = any(output.kind.is_stepped for output in program.outputs)
        if not steps or any(output.guard is not None for output in program.outputs):
            return False
        return _Overwriting(program).run()


class _Overwriting:
    def __init__(self, program: RankProgram) -> None:
        self.program, self.coords = program, program.mesh.coords(program.rank)
        self.share = Aliasing(program.graph.nodes)
        self.renewed = renewed(program, STEPPED)
        """Inputs whose new content the program gives, and which result that is."""
        self.values: dict[fx.Node, Value] = {}
        """What may be written over, as it was planned."""

    def run(self) -> bool:
        places = (node for node in self.program.graph.nodes if node.op == "placeholder")
        inputs = dict(zip(places, self.program.inputs, strict=True))
        self.values = {node: given.value for node, given in inputs.items() if node in self.renewed}
        changed, share = self._put(), self.share
        for node in self.program.graph.nodes:
            planned = node.meta.get("shardfx")
            if node.target is pack.take and isinstance(planned, Node) and share.root(node) in self.renewed:
                self.values[node] = planned.outs[0]  # a rank's rows of a parameter that is stored whole
            if not isinstance(planned, Node) or planned.phase is not Phase.UPDATE:
                continue
            if node.target is transfer.arrived and share.owned(node):
                self.values[node] = planned.outs[0]
            if node.target is not planned.op:
                continue
            form = OVERWRITING.get(node.target)
            if form is None or len(planned.outs) != 1:
                continue
            into = self._into(node, planned.outs[0])
            self.values[node] = planned.outs[0]
            if into is not None:
                node.target, node.kwargs = form, {**node.kwargs, "out": into}
                changed = True
        self.share = Aliasing(self.program.graph.nodes)
        if self._write_rounded():
            changed, self.share = True, Aliasing(self.program.graph.nodes)
        return self._write(inputs) or changed

    def _put(self) -> bool:
        """What lies beside the device is written there, and no second copy of it is made."""
        changed = False
        for place, result in self.renewed.items():
            away: Any = result
            while away.target in (transfer.arrived, transfer.stored):
                away = away.args[0]
            if away.target not in (transfer.to_host, transfer.to_disk):
                continue
            if self.share.last_use(place, away):
                away.target, away.args = transfer.put, (place, away.args[0])
                changed = True
        if changed:
            self.share, self.renewed = Aliasing(self.program.graph.nodes), renewed(self.program, STEPPED)
        return changed

    def _write_rounded(self) -> bool:
        """New rows of a parameter that were computed in more bits, and rounded, are written where the old ones lie."""
        changed = False
        for node in list(self.program.graph.nodes):
            planned = node.meta.get("shardfx")
            if node.target is not CAST or not isinstance(planned, Node) or planned.phase is not Phase.UPDATE:
                continue
            rows = _rows(node)
            if rows is None or rows not in self.values:
                continue
            free = self.share.last_use(rows, node) and self.share.sender(rows, node) is None
            old, new = self.values[rows], planned.outs[0]
            if not free or old.type.dtype is not new.type.dtype or self._shape(old) != self._shape(new):
                continue
            with self.program.graph.inserting_after(node):
                made = self.program.graph.call_function(memory_ops.write, (rows, node))
            made.meta = {key: value for key, value in node.meta.items() if key == "shardfx"}
            node.replace_all_uses_with(made, lambda user, made=made: user is not made)
            changed = True
        return changed

    def _write(self, inputs: Mapping[fx.Node, Input]) -> bool:
        """What lies elsewhere (it was gathered) is written where it belongs at once, so that its memory is let go."""
        graph, end, share = self.program.graph, self.program.result(), self.share
        written, spent = dict[str, fx.Node](), list[fx.Node]()
        for place, result in self.renewed.items():
            free = share.last_use(place, result) and share.sender(place, result) is None
            apart = result.op == "call_function" and share.root(result) is not share.root(place)
            if not free or not apart or self._home(result) is place:
                continue
            part = _part(result)
            with graph.inserting_after(result):
                if part is None:
                    made = graph.call_function(memory_ops.write, (place, result))
                else:
                    made = graph.call_function(memory_ops.write_part, (place, *part))
                    spent.append(result)
            made.meta = {key: value for key, value in result.meta.items() if key == "shardfx"}
            written[inputs[place].name] = made
        given: Any = end.args[0]
        named = zip(given, self.program.outputs, strict=True)
        end.args = (tuple(written.get(o.name, r) if o.kind.is_stepped else r for r, o in named),)
        for result in spent:
            _erase_unused(graph, result)
        return bool(written)

    def _into(self, node: fx.Node, value: Value) -> fx.Node | None:
        """The operand whose memory the result takes; that of what it is the new content of, where there is one."""
        found = [used for used in node.all_input_nodes if used in self.values and self._may(node, value, used)]
        home = [used for used in found if self.renewed.get(self._home(used)) is node]
        return next(iter((*home, *found)), None)

    def _home(self, node: fx.Node) -> fx.Node:
        """The value at the begin of a chain of calls, each over the one before."""
        while isinstance(into := node.kwargs.get("out"), fx.Node):
            node = into
        return node

    def _may(self, node: fx.Node, value: Value, used: fx.Node) -> bool:
        theirs, share = self.values[used], self.share
        if any(other is not used and share.meet(other, used) for other in node.all_input_nodes):
            return False
        same = self._shape(value) == self._shape(theirs) and value.type.dtype == theirs.type.dtype
        return same and share.last_use(used, node) and share.sender(used, node) is None

    def _shape(self, value: Value) -> tuple[int, ...]:
        assert value.spec is not None
        return torch.Size(value.spec.local_shape(value.shape, self.program.mesh, self.coords))


def _rows(node: fx.Node) -> fx.Node | None:
    """A rank's rows of what it has whole, with which a chain of calls began, each of the one before first of all."""
    found: Any = node
    while isinstance(found, fx.Node) and found.op == "call_function" and found.target is not pack.take:
        found = found.args[0] if found.args else None
    return found if isinstance(found, fx.Node) and found.target is pack.take else None


def _part(result: fx.Node) -> tuple[Any, ...] | None:
    """Where a result, which is nothing but new content, stands in what was gathered: buffer, pieces, offset, shape."""
    arguments: Any = result.args
    if result.target is not operator.getitem or len(result.users) != 1 or arguments[0].target is not memory_ops.spread:
        return None
    (_, buffer, shapes, pieces), number = arguments[0].args, arguments[1]
    before = sum(torch.Size(shape).numel() // pieces for shape in shapes[:number])
    return buffer, pieces, before, [*shapes[number]]


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Take out a call that nobody uses, and those that it alone used and that give memory or several tensors."""
    if node.users or node.target not in (operator.getitem, memory_ops.spread, memory_ops.empty):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for used in inputs:
        _erase_unused(graph, used)
