"""In-place updates: the memory of new contents of parameters, optimizer states and buffers, and of gradients.

overwrite: an optimizer's step is computed in the memory of what it updates, or of what nothing else needs::

    mul = aten.mul(w, scale)                      mul = aten.mul.out(w, scale, out=w)
    lerp = aten.lerp(m, grad, 0.1)                lerp = aten.lerp.Scalar_out(m, grad, 0.1, out=m)
    sqrt = aten.sqrt(v)                           sqrt = aten.sqrt(v)
    add = aten.add(sqrt, 1e-08)            ->     add = aten.add.out(sqrt, 1e-08, out=sqrt)
    new = aten.add(mul, step)                     new = aten.add.out(mul, step, out=mul)
    gathered = getitem(spread, 0)                 kept = memory.write_part(v, buffer, 2, 0, [8, 6])
    away = memory.stored(memory.to_host(m))
    return (new, lerp, gathered, away)            away = memory.stored(memory.put(place, m))
                                                  return (new, lerp, kept, away)

So a step allocates no second copy of parameters and states; nor of the rows that a rank updates of what is replicated.
Where a guard is watched, what is stored may not change before it was looked at, and nothing is done.

own-outputs: results that the caller owns (gradients, new contents) and that share memory are copied::

    return (t, t)                          ->     own = memory.own(t)
                                                  return (t, own)

Parts of one reduced buffer do not overlap, and are given away as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from shardfx.ir.graph import Input, Value
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.computing.segment import CAST
from shardfx.ir.ops.local_ops import OVERWRITING
from shardfx.ir.ops.pools import transfer
from shardfx.ir.program.aliasing import STEPPED, Aliasing, ResultOwnership, renewed
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, call_after, call_before, is_update, origin


@dataclass(frozen=True)
class Overwrite(RankPass):
    """Compute pointwise ops of the step over an operand that is used there last."""

    name: ClassVar[str] = "overwrite"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        steps = any(output.kind.is_stepped for output in program.outputs)
        if not steps or any(output.guard is not None for output in program.outputs):
            return False
        return _Overwriting(program).run()


class _Overwriting:
    def __init__(self, program: RankProgram) -> None:
        self.program, self.coords = program, program.mesh.coords(program.rank)
        self.values: dict[fx.Node, Value] = {}
        """Values whose memory may be overwritten, as planned."""
        self._look()

    def _look(self) -> None:
        self.share = Aliasing(self.program.graph.nodes)
        self.renewed = renewed(self.program, STEPPED)
        """Inputs with new content among the results, and the index of that result."""

    def run(self) -> bool:
        inputs = dict(zip(self.program.graph.find_nodes(op="placeholder"), self.program.inputs, strict=True))
        self.values = {node: inp.value for node, inp in inputs.items() if node in self.renewed}
        changed = self._put()
        for node in self.program.graph.nodes:
            planned = planned_node(node)
            if node.target is pack.take and planned is not None and self.share.root(node) in self.renewed:
                self.values[node] = planned.outs[0]  # a rank's rows of a replicated parameter
            if planned is None or not is_update(node):
                continue
            if node.target is transfer.arrived and self.share.owned(node):
                self.values[node] = planned.outs[0]
            out_form = OVERWRITING.get(node.target) if node.target is planned.op else None
            if out_form is None or len(planned.outs) != 1:
                continue
            into = self._into(node, planned.outs[0])
            self.values[node] = planned.outs[0]
            if into is not None:
                node.target, node.kwargs = out_form, {**node.kwargs, "out": into}
                changed = True
        self.share = Aliasing(self.program.graph.nodes)
        if self._write_rounded():
            changed, self.share = True, Aliasing(self.program.graph.nodes)
        return self._write(inputs) or changed

    def _is_free(self, memory: fx.Node, call: fx.Node) -> bool:
        """Whether some memory is neither used nor being sent behind a call."""
        return self.share.last_use(memory, call) and self.share.sender(memory, call) is None

    def _put(self) -> bool:
        """Write offloaded states to where they are stored, without a second copy there."""
        changed = False
        for place, result in self.renewed.items():
            away: Any = result
            while away.target in (transfer.arrived, transfer.stored):
                away = away.args[0]
            if away.target in (transfer.to_host, transfer.to_disk) and self.share.last_use(place, away):
                away.target, away.args = transfer.put, (place, away.args[0])
                changed = True
        if changed:
            self._look()
        return changed

    def _write_rounded(self) -> bool:
        """Write a parameter's new rows, computed in higher precision and rounded, over the old ones."""
        changed = False
        for node in list(self.program.graph.nodes):
            planned = planned_node(node)
            rows = _rows(node) if node.target is CAST and is_update(node) else None
            if planned is None or rows is None or rows not in self.values:
                continue
            if self._is_free(rows, node) and self._is_like(self.values[rows], planned.outs[0]):
                made = call_after(node, memory_ops.write, rows, node)
                node.replace_all_uses_with(made, lambda user, made=made: user is not made)
                changed = True
        return changed

    def _write(self, inputs: Mapping[fx.Node, Input]) -> bool:
        """Write new content from elsewhere (gathered) into its input at once, so that its memory is freed."""
        end, share = self.program.result(), self.share
        written, spent = dict[str, fx.Node](), list[fx.Node]()
        for place, result in self.renewed.items():
            apart = result.op == "call_function" and share.root(result) is not share.root(place)
            if not apart or not self._is_free(place, result) or _home(result) is place:
                continue
            part = _part(result)
            if part is None:
                made = call_after(result, memory_ops.write, place, result)
            else:
                made = call_after(result, memory_ops.write_part, place, *part)
                spent.append(result)
            written[inputs[place].name] = made
        value: Any = end.args[0]
        named = zip(value, self.program.outputs, strict=True)
        end.args = (tuple(written.get(o.name, r) if o.kind.is_stepped else r for r, o in named),)
        for result in spent:
            _erase_unused(self.program.graph, result)
        return bool(written)

    def _into(self, node: fx.Node, value: Value) -> fx.Node | None:
        """The operand whose memory the result takes: preferably the input that it is the new content of."""
        found = [used for used in node.all_input_nodes if used in self.values and self._may(node, value, used)]
        home = [used for used in found if self.renewed.get(_home(used)) is node]
        return next(iter((*home, *found)), None)

    def _may(self, node: fx.Node, value: Value, used: fx.Node) -> bool:
        if any(other is not used and self.share.meet(other, used) for other in node.all_input_nodes):
            return False
        return self._is_like(value, self.values[used]) and self._is_free(used, node)

    def _is_like(self, a: Value, b: Value) -> bool:
        """Whether two values have the same local shape and dtype."""
        assert a.spec is not None and b.spec is not None
        shapes = (v.spec.local_shape(v.shape, self.program.mesh, self.coords) for v in (a, b) if v.spec is not None)
        return a.type.dtype == b.type.dtype and len({torch.Size(shape) for shape in shapes}) == 1


def _home(node: fx.Node) -> fx.Node:
    """The value at the start of a chain of calls, each of which overwrites the one before."""
    while isinstance(into := node.kwargs.get("out"), fx.Node):
        node = into
    return node


def _rows(node: fx.Node) -> fx.Node | None:
    """A rank's rows of a replicated value, at the start of a chain of calls on the first operand."""
    found: Any = node
    while isinstance(found, fx.Node) and found.op == "call_function" and found.target is not pack.take:
        found = found.args[0] if found.args else None
    return found if isinstance(found, fx.Node) and found.target is pack.take else None


def _part(result: fx.Node) -> tuple[Any, ...] | None:
    """The position of a result, used only as new content, in a gathered buffer: buffer, shards, offset, shape."""
    arguments: Any = result.args
    if result.target is not operator.getitem or len(result.users) != 1 or arguments[0].target is not memory_ops.spread:
        return None
    (_, buffer, shapes, shards), number = arguments[0].args, arguments[1]
    before = sum(torch.Size(shape).numel() // shards for shape in shapes[:number])
    return buffer, shards, before, [*shapes[number]]


def _erase_unused(graph: fx.Graph, node: fx.Node) -> None:
    """Erase an unused call, with operands that only it used and that are allocations or tuples."""
    if node.users or node.target not in (operator.getitem, memory_ops.spread, memory_ops.empty):
        return
    inputs = node.all_input_nodes
    graph.erase_node(node)
    for used in inputs:
        _erase_unused(graph, used)


@dataclass(frozen=True)
class OwnOutputs(RankPass):
    """Copy gradients and new contents that share memory with an input, or with another result."""

    name: ClassVar[str] = "own-outputs"
    establishes: ClassVar[frozenset[str]] = frozenset({"OWN_OUTPUTS"})

    def run(self, program: RankProgram, context: RankContext) -> bool:
        end = program.result()
        given_away = ResultOwnership(Aliasing(program.graph.nodes), renewed(program))
        results: list[Any] = list(end.args[0])  # type: ignore[arg-type]
        changed = False
        for i, (planned, result) in enumerate(zip(program.outputs, results, strict=True)):
            if isinstance(result, fx.Node) and not given_away.take(result) and planned.kind.is_given_away:
                results[i] = call_before(end, memory_ops.own, result)
                results[i].meta = origin(result)
                changed = True
        if changed:
            end.args = (tuple(results),)
        return changed
