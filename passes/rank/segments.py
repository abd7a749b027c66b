"""segments: elementwise optimizer steps of many parameters become one call.

    mul = aten.mul.out(w, scale, out=w)              both = update.segment(["aten.mul.out(c0, s0, out=c0)",
    new = aten.add.out(mul, grad_w, out=mul)                                "aten.add.out(r0, c1, out=r0)"],
    mul_1 = aten.mul.out(b, scale, out=b)      ->                          [0], 2, [w, grad_w, b, grad_b], [scale])
    new_1 = aten.add.out(mul_1, grad_b, out=mul_1)   new, new_1 = both[0], both[1]
    return (new, new_1)                              return (new, new_1)

Calls are deferred until something needs their results, so that those of one wait are packed together; none passes a
wait, so that what arrives is used while the rest is in flight. Only elementwise calls over their operands are packed.
Where torch has a fused kernel for a member's calls, with those that make scalars for it (bias corrections), the segment
runs that one (:mod:`shardfx.ir.ops.computing.fused_update`); then a member may be alone, too.

Members stand in the order of their gradients' buckets, for so stores keep the states: all columns of a segment are then
adjacent in memory, and it is computed as if it were one member.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import networkx as nx
import torch
from torch import fx

from shardfx.ir.graph import Node, Value
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.computing.fused_update import fusion_of, run_of
from shardfx.ir.ops.computing.segment import CAST, COPY, SegmentRef, call_text, segment
from shardfx.ir.ops.local_ops import OVERWRITING, POINTWISE
from shardfx.ir.ops.pools.pool_ops import computed_beside
from shardfx.ir.program.aliasing import Aliasing, destination
from shardfx.ir.program.rank_module import ORIGINS
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import RankContext, RankPass, is_update, waits
from .touched_rows import step_touched_rows

PACKED = frozenset((*POINTWISE, *OVERWRITING.values()))
RESULTS = frozenset((CAST, memory_ops.write))
"""Ops packed behind elementwise calls: casts of their results, or writes into the members' memory."""
FUNCTIONAL = {over: op for op, over in OVERWRITING.items()}
"""The functional op of each ``out`` variant."""
NUMBERS = (bool, int, float)
DEVICES = ("cpu", "cuda")
"""Devices with fused kernels in torch."""


@dataclass(frozen=True)
class Segments(RankPass):
    """Compute the elementwise steps of parameters with equal updates by one call."""

    name: ClassVar[str] = "segments"

    def run(self, program: RankProgram, context: RankContext) -> bool:
        rows = step_touched_rows(program)
        return _Packing(program, computed_beside(context.graph), context.device).run() or rows


@dataclass(eq=False)
class _Member:
    """The calls of one parameter, in order, and the number of deferred ones."""

    nodes: list[fx.Node] = field(default_factory=list)
    deferred: int = 0


class _Packing:
    def __init__(self, program: RankProgram, in_host: Container[Node], device: str) -> None:
        self.in_host, self.device = in_host, device
        self.program, self.coords = program, program.mesh.coords(program.rank)
        self.nodes = list(program.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.share = Aliasing(self.nodes)
        self.values: dict[fx.Node, Value] = {}
        """Operands of calls, as planned values."""
        self.taking = nx.Graph()
        """The graph of elementwise calls that use one another's results."""
        self.members: dict[fx.Node, _Member] = {}
        self.deferred: dict[_Member, None] = {}
        self.order: list[fx.Node] = []
        self.spent: set[fx.Node] = set()
        """Calls that fused kernels compute themselves."""
        self.changed = False

    def run(self) -> bool:
        self._find_members()
        for node in self.nodes:
            member = self.members.get(node)
            if member is not None:
                member.deferred += 1
                self.deferred[member] = None
                continue
            if self.deferred and self._needs(node):
                self._pack([*self.deferred])
            elif waits(node):
                self._pack([each for each in self.deferred if each.deferred == len(each.nodes)])
            self.order.append(node)
        if self.changed:
            self._arrange()
        return self.changed

    def _find_members(self) -> None:
        """Find members: the connected calls that use one another's results."""
        for node in self.nodes:
            if self._is_elementwise(node):
                self.taking.add_node(node)
                self.taking.add_edges_from((used, node) for used in node.all_input_nodes if used in self.taking)
        for calls in nx.connected_components(self.taking):
            member = _Member(sorted(calls, key=self.place.__getitem__))
            self.members.update(dict.fromkeys(calls, member))

    def _needs(self, node: fx.Node) -> bool:
        """Whether a call uses results of deferred ones, or overwrites their operands."""
        deferred = [each for member in self.deferred for each in member.nodes[: member.deferred]]
        if node.op == "output" or not set(deferred).isdisjoint(node.all_input_nodes):
            return True
        into = destination(node)
        read = (self.share.root(used) for each in deferred for used in each.all_input_nodes)
        return into is not None and self.share.root(into) in read

    def _is_elementwise(self, node: fx.Node) -> bool:
        """Whether a call of the step is elementwise, on operands of one shape and numbers."""
        planned = planned_node(node)
        if node.op != "call_function" or planned is None or not is_update(node) or planned in self.in_host:
            return False
        if node.target in RESULTS:
            return self._is_rounding(node, planned)
        if node.target not in PACKED:
            return False
        if OVERWRITING.get(planned.op, planned.op) is not OVERWRITING.get(node.target, node.target):
            return False
        args = (*node.args, *(arg for key, arg in node.kwargs.items() if key != "out"))
        if len(node.args) != len(planned.args) or not all(isinstance(arg, (fx.Node, *NUMBERS)) for arg in args):
            return False
        takes = {arg: value for arg, value in zip(node.args, planned.args, strict=True) if isinstance(arg, fx.Node)}
        shape = self._shape(planned.outs[0])
        if not shape or not all(isinstance(v, Value) and self._shape(v) in ((), shape) for v in takes.values()):
            return False
        self.values |= takes
        return True

    def _is_rounding(self, node: fx.Node, planned: Node) -> bool:
        """Whether a call casts a member's result for another of its calls, or writes it into its own memory."""
        source = node.args[-1]
        if source not in self.taking or planned.op is not CAST:
            return False
        if node.target is CAST:
            self.values[source] = planned.operands[0]  # type: ignore[index]
            return node.kwargs.keys() == {"dtype"} and all(user.target in PACKED | RESULTS for user in node.users)
        self.values |= dict.fromkeys(node.all_input_nodes, planned.outs[0])
        return True

    def _shape(self, value: Value) -> tuple[int, ...]:
        assert value.spec is not None
        return torch.Size(value.spec.local_shape(value.shape, self.program.mesh, self.coords))

    def _pack(self, members: Sequence[_Member]) -> None:
        """Insert deferred calls here: equal members as one call, others unchanged."""
        alike: dict[Any, list[_Recipe]] = {}
        apart = self._are_apart(members)
        for member in members:
            del self.deferred[member]
            made = _recipe(member.nodes, self.values) if apart and member.deferred == len(member.nodes) else None
            if made is not None:
                alike.setdefault(made.key, []).append(made)
                continue
            self.order += member.nodes[: member.deferred]
            rest = _Member(member.nodes[member.deferred :])
            self.members.update(dict.fromkeys(rest.nodes, rest))
        for recipes in alike.values():
            fused = self._fused(recipes)
            if len(recipes) == 1 and not fused:
                self.order += recipes[0].nodes
            else:
                self._segment(fused or recipes)

    def _are_apart(self, members: Sequence[_Member]) -> bool:
        """Whether no member uses a value that another one writes."""
        roots: dict[fx.Node, set[_Member]] = {}
        written: set[fx.Node] = set()
        for member in members:
            for node in member.nodes[: member.deferred]:
                for used in node.all_input_nodes:
                    roots.setdefault(self.share.root(used), set()).add(member)
                into = destination(node)
                written |= {self.share.root(into)} if isinstance(into, fx.Node) else set()
        return all(len(roots[root]) == 1 for root in written)

    def _fused(self, recipes: Sequence[_Recipe]) -> Sequence[_Recipe]:
        """The members with the scalar calls that their fused kernel computes; none if there is no such kernel."""
        first, made_of = recipes[0], self._scalar_calls(recipes[0].scalars)
        if torch.device(self.device).type not in DEVICES or len({self.values[c].type.dtype for c in first.columns}) > 1:
            return ()
        full = _recipe(first.nodes, self.values, made_of)
        found = fusion_of(tuple(full.calls), tuple(full.gives)) if full is not None else None
        if found is None:
            return ()
        inlined = [node for number, node in enumerate(made_of) if number in found.computed]
        made = [each for old in recipes if (each := _recipe(old.nodes, self.values, inlined)) is not None]
        if len(made) != len(recipes) or not run_of(made[0].calls, made[0].gives):
            return ()
        if any(self._is_overwritten(scalar) for scalar in made[0].scalars if scalar not in first.scalars):
            return ()
        self.spent.update(inlined)
        return made

    def _is_overwritten(self, scalar: fx.Node) -> bool:
        """Whether a scalar's memory is overwritten later on."""
        root = self.share.root(scalar)
        writing = (use for use in self.share.uses(root) if (into := destination(use)) and self.share.root(into) is root)
        return any(self.place[use] > self.place[scalar] for use in writing)

    def _scalar_calls(self, scalars: Sequence[fx.Node]) -> list[fx.Node]:
        """The calls of the step that compute scalars from scalars, in memory of their own."""
        found, todo = set[fx.Node](), [*scalars]
        while todo:
            node = todo.pop()
            planned, op = planned_node(node), FUNCTIONAL.get(node.target, node.target)
            if node in found or node.op != "call_function" or planned is None:
                continue
            if not is_update(node) or planned.op is not op or not self.share.owned(node):
                continue
            if torch.Tag.pointwise not in op.tags or any(value.shape for value in (*planned.operands, *planned.outs)):
                continue
            found.add(node)
            todo += node.all_input_nodes
            self.values |= {a: v for a, v in zip(node.args, planned.args, strict=True) if isinstance(a, fx.Node)}
        return sorted(found, key=self.place.__getitem__)

    def _segment(self, recipes: Sequence[_Recipe]) -> None:
        graph, first = self.program.graph, recipes[0]
        recipes = sorted(recipes, key=self._place_in_buckets)
        tensors = [column for recipe in recipes for column in recipe.columns]
        fused = run_of(first.calls, first.gives)
        args = (first.calls, first.gives, len(recipes), tensors, first.scalars, *([fused] if fused else ()))
        made = graph.call_function(segment, args)
        origins = [node.meta["shardfx"] for each in recipes for node in (*each.inlined, *each.nodes)]
        made.meta.update({"shardfx": origins[0], ORIGINS: origins})
        self.order.append(made)
        for number, each in enumerate(recipes):
            inside = set(each.nodes)
            for place, result in enumerate(each.results):
                got = graph.call_function(operator.getitem, (made, number * len(each.results) + place))
                got.meta = dict(result.meta)
                self.order.append(got)
                result.replace_all_uses_with(got, lambda user, inside=inside: user not in inside)  # type: ignore[misc]
            for node in reversed(each.nodes):
                graph.erase_node(node)
        self.changed = True

    def _place_in_buckets(self, recipe: _Recipe) -> tuple[int, int]:
        """The position of a member's column in a reduced bucket: states are stored in that order."""
        for column in recipe.columns:
            source = column.args[0] if column.target is operator.getitem else None
            if isinstance(source, fx.Node) and source.target is pack.unflatten:
                return self.place[source], int(column.args[1])  # type: ignore[arg-type]
        return len(self.place), 0

    def _arrange(self) -> None:
        """Put the graph's nodes into the new order, without scalars that kernels compute themselves."""
        cursor = self.program.graph._root
        for node in self.order:
            if cursor.next is not node:
                cursor.append(node)
            cursor = node
        for node in [node for node in reversed(self.order) if node in self.spent]:
            if not node.users:
                self.program.graph.erase_node(node)
                self.order.remove(node)


@dataclass(frozen=True)
class _Recipe:
    """The calls of a member as a segment has them, behind those that compute its scalars (``inlined``); ``key`` is
    equal for members with equal updates."""

    nodes: Sequence[fx.Node]
    inlined: Sequence[fx.Node]
    calls: list[str]
    gives: list[int]
    columns: list[fx.Node]
    scalars: list[fx.Node]
    results: list[fx.Node]
    key: Any


def _recipe(
    nodes: Sequence[fx.Node], values: Mapping[fx.Node, Value], inlined: Sequence[fx.Node] = ()
) -> _Recipe | None:
    """The recipe of a member; None if a result that others need is not in the memory of a column."""
    refs, home = dict[fx.Node, SegmentRef](), dict[fx.Node, fx.Node]()
    columns, scalars, calls = list[fx.Node](), list[fx.Node](), list[str]()
    last: dict[fx.Node, fx.Node] = {}
    for number, node in enumerate((*inlined, *nodes)):
        for used in node.all_input_nodes:
            if used not in refs:
                group, kind = (columns, "c") if values[used].shape else (scalars, "s")
                refs[used] = SegmentRef(kind, len(group))
                group.append(used)
        target, named = node.target, node.kwargs
        if number < len(inlined):  # its result has memory of its own
            target, named = FUNCTIONAL.get(target, target), {key: arg for key, arg in named.items() if key != "out"}
        target = COPY if target is memory_ops.write else target
        args, kwargs = (
            [refs[a] if isinstance(a, fx.Node) else a for a in each] for each in (node.args, named.values())
        )
        calls.append(call_text(target, args, dict(zip(named, kwargs, strict=True))))
        into = named.get("out") if target is not COPY else node.args[0]
        home[node] = home.get(into, into) if isinstance(into, fx.Node) else node
        refs[node] = SegmentRef("r", number)
        last[home[node]] = node
    inside = set(nodes)
    results = [node for node in nodes if not inside.issuperset(node.users)]
    if any(home[node] not in columns or last[home[node]] is not node for node in results):
        return None
    gives = [columns.index(home[node]) for node in results]
    key = (*calls, *gives, *scalars, tuple([values[column].type.dtype for column in columns]))
    return _Recipe(nodes, inlined, calls, gives, columns, scalars, results, key)
