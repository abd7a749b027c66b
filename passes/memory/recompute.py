"""Recomputation of values in the backward, so that they need not be live from the forward on.

recompute::

    forward:                                         forward:
      %1 = aten.mm(%x, %w)       @ layers.0            %1 = aten.mm(%x, %w)
      %2 = aten.gelu(%1)         @ layers.0            %2 = aten.gelu(%1)
      %3 = aten.mm(%2, %v)       @ layers.0     ->     %3 = aten.mm(%2, %v)
    backward:                                        backward:
      %9 = aten.gelu_backward(%8, %1)                  %8 = aten.mm(%x, %w)              once more; %1 is freed
                                                       %9 = aten.gelu_backward(%7, %8)

Values that leave a recomputed module are kept, and it starts from them (Chen et al., Training Deep Nets with Sublinear
Memory Cost, 2016; ``torch.utils.checkpoint``). Of the forward only what the backward needs is repeated, each op once
and as late as possible, and dropout draws the same numbers. ``rematerialize-gathers`` and ``rematerialize-casts`` do so
with all-gathers and casts of stored parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

from shardfx.ir.graph import Graph, InputKind, Node, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.sends import fetched, is_comm
from shardfx.ir.ops.traits import is_view, narrows
from shardfx.ir.rewriter import Rewriter, dead_code
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext
from shardfx.passes.pass_text import check_options

from .module_patterns import joined, matching_modules, matching_ops, successive

WHERE = "Hints(recompute=...)"


@dataclass(frozen=True)
class Recompute(Pass):
    """Recompute activations of modules in the backward (activation checkpointing).

    Args:
        modules: patterns of module paths (``*`` is one part of a path, ``**`` any number).
        save: patterns of ops whose results are saved, such as ``"aten.mm"``; in some modules only:
            ``"layers.*.mlp:aten.mm"``.
        comm: whether collectives are repeated; if not, their results are saved.
        regather: whether stored parameters are gathered again too; if not, they are kept replicated.
        shard_saved: a mesh axis over which saved values are sharded, and gathered at their use.
        count: the maximum number of matching modules, the first ones; 0 for all.
        skip: the number of matching modules to skip before these.
        segment: the number of consecutive modules per region, within which values passed between modules are recomputed
            too (``torch.utils.checkpoint.checkpoint_sequential``).

    Example::

        Hints(recompute=sx.Recompute("layers.*", save="aten.mm"))
        Hints(recompute=sx.Recompute("features.*", segment=4))
    """

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    repeats: ClassVar[bool] = True

    modules: str | Sequence[str] = ()
    save: str | Sequence[str] = ()
    comm: bool = True
    regather: bool = True
    shard_saved: str = ""
    count: int = 0
    skip: int = 0
    segment: int = 1

    def __post_init__(self) -> None:
        check_options(self, WHERE, count=0, skip=0, segment=1)

    def run(self, graph: Graph, context: PassContext) -> bool:
        of = matching_modules(graph, self.modules, self.skip, self.count, where=WHERE)
        if not of:
            return False
        if self.segment > 1:
            of = joined(graph, of, successive(list(dict.fromkeys(of.values())), self.segment))
        kept = self._kept(graph, of)
        again = {v for node in of for v in node.outs if v not in kept}
        if not self.shard_saved:
            return Recomputation(graph, again.__contains__).run()
        of_regions = {value for node in of for value in (*node.outs, *node.operands)}
        return Recomputation(graph, again.__contains__, _Slices(graph, self.shard_saved, of_regions).of).run()

    def _kept(self, graph: Graph, of: dict[Node, str]) -> set[Value]:
        """The values that are not recomputed: those that leave a module or the graph, and those saved by options."""
        kept = {output.value for output in graph.outputs}
        for node in graph.nodes:
            if node.phase is Phase.FORWARD:
                kept |= {v for v in node.operands if v.node in of and of[v.node] != of.get(node)}
        kept |= {value for node in matching_ops(of, self.save, where=WHERE) for value in node.outs}
        gathered = set[Value]() if self.regather else fetched(graph)
        for node in (node for node in of if is_comm(node)):
            kept |= {value for value in node.outs if not self.comm or value in gathered}
        return kept


@dataclass(frozen=True)
class RematerializeGathers(Pass):
    """Gather stored parameters again for the backward (``Hints(zero=3)``), and cast the gathered ones again."""

    name: ClassVar[str] = "rematerialize-gathers"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: PassContext) -> bool:
        return Recomputation(graph, fetched(graph).__contains__).run()


@dataclass(frozen=True)
class RematerializeCasts(Pass):
    """Cast parameters again for the backward (``Hints(mixed_precision=...)``), so that no low-precision copy is kept
    beside the master weights. Gathered parameters are kept, unless ``rematerialize-gathers`` gathers them again."""

    name: ClassVar[str] = "rematerialize-casts"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: PassContext) -> bool:
        known = {inp.value for inp in graph.of_kind(InputKind.PARAMETER)}
        for node in graph.nodes:
            simple = node.phase is Phase.FORWARD and (narrows(node) or is_view(node))
            if simple and all(value in known for value in node.operands):
                known.update(node.outs)
        return Recomputation(graph, known.__contains__).run()


@dataclass
class Recomputation:
    """Inserts copies of forward nodes behind the forward, for values chosen by ``again``; each is made once, as late as
    possible, on each rank that needs it: a parameter of several stages is gathered again in each of them.

    Args:
        again: whether a forward value is recomputed for its uses behind the forward.
        instead: the replacement behind the forward of a value that is not recomputed: called with the value and the
            node that uses it.
    """

    graph: Graph
    again: Callable[[Value], bool]
    instead: Callable[[Rewriter, Value, Node], Value] = lambda rewriter, value, anchor: value
    _made: dict[Value, list[tuple[frozenset[int], Value]]] = field(default_factory=dict)
    """The replacements of a value, each with its coordinates on the stage axis."""

    def run(self) -> bool:
        """Insert the copies; returns whether there are any."""
        rewriter = Rewriter(self.graph)
        for node in self.graph.nodes:
            for value in dict.fromkeys(node.operands) if node.phase is not Phase.FORWARD else ():
                if _is_of_forward(value):
                    new = self._recomputed(value, node, rewriter)
                    if new is not value:
                        rewriter.replace(value, new, users=[node])
        changed = rewriter.apply()
        if changed:
            dead_code(self.graph)
            self.graph.rename()
        return changed

    def _recomputed(self, wanted: Value, anchor: Node, rewriter: Rewriter) -> Value:
        """The replacement of ``wanted`` at ``anchor``: missing copies are inserted just before it."""
        places = self._places(anchor)
        todo = [wanted]  # a walk, for a chain may go through many nodes
        while todo:
            value = todo[-1]
            node = value.node
            assert node is not None
            if self._there(value, places) is not None:
                todo.pop()
            elif node.op is comm.send:  # what came from another stage is kept
                self._note(todo.pop(), places, value)
            elif not self.again(value):
                self._note(todo.pop(), places, self.instead(rewriter, value, anchor))
            else:
                missing = [v for v in node.operands if _is_of_forward(v) and self._there(v, places) is None]
                todo += missing
                if not missing:
                    todo.pop()
                    self._copy(node, anchor, rewriter)
        return self._there(wanted, places) or wanted

    def _there(self, value: Value, places: frozenset[int]) -> Value | None:
        """The replacement of a value at all of ``places``; None if there is none yet."""
        return next((made for at, made in self._made.get(value, ()) if places <= at), None)

    def _note(self, value: Value, places: frozenset[int], made: Value) -> None:
        self._made.setdefault(value, []).append((places, made))

    def _places(self, anchor: Node) -> frozenset[int]:
        """The coordinates on the stage axis at which a node needs its operands."""
        pipeline = self.graph.pipeline
        if pipeline is None:
            return frozenset()
        return frozenset([anchor.kwargs["origin"]] if anchor.op is comm.send else pipeline.places(anchor.at))

    def _copy(self, node: Node, anchor: Node, rewriter: Rewriter) -> None:
        """Copy a node; a view of a kept value is taken of that value."""
        places = self._places(anchor)

        def there(value: Value) -> Value:
            return self._there(value, places) or value

        if is_view(node) and all(there(value) is value for value in node.operands):
            for value in node.outs:
                self._note(value, places, value)
            return
        copy = node.copied(there)
        copy.phase, copy.why = anchor.phase, f"recomputed for {anchor.name}"
        if node.at and anchor.at:  # another stage of the same rank may need it first
            pipeline = self.graph.pipeline
            assert pipeline is not None
            here = tuple(stage for stage in node.at if places.issuperset(pipeline.places((stage,))))
            copy.at = anchor.at if anchor.op is not comm.send else here
        rewriter.before(anchor, copy)
        for value, made in zip(node.outs, copy.outs, strict=True):
            self._note(value, places, made)


def _is_of_forward(value: Value) -> bool:
    return value.node is not None and value.node.phase is Phase.FORWARD


@dataclass
class _Slices:
    """Stores ``values`` sharded over ``axis`` (Korthikanti et al., Reducing Activation Recomputation, 2022).

    %1 = aten.add(%x, %0)                              %1 = aten.add(%x, %0) : [8, 6]
                                                 ->    %2 = comm.slice(%1, axes=[tp], dim=0) : [8{tp}, 6]
    %9 = aten.mul(%8, %1)                              %9 = comm.all_gather(%2, axes=[tp], dim=0) : [8, 6]
                                                       %10 = aten.mul(%8, %9)
    """

    graph: Graph
    axis: str
    values: Container[Value]
    _gathered: dict[Value, Value] = field(default_factory=dict, init=False)

    def of(self, rewriter: Rewriter, value: Value, anchor: Node) -> Value:
        """The replacement of ``value`` at ``anchor``."""
        dim = self._dim(value) if value in self.values else None
        if dim is None or value.node is None or not _is_of_forward(value) or value in self._outputs:
            return value
        if value not in self._gathered:
            shard = rewriter.comm(comm.shard, value, axes=[self.axis], dim=dim, why="kept for the backward in slices")
            rewriter.after(value.node, shard)
            gathered = rewriter.comm(comm.all_gather, shard.outs[0], axes=[self.axis], dim=dim)
            gathered.phase = anchor.phase
            rewriter.before(anchor, gathered)
            self._gathered[value] = gathered.outs[0]
        return self._gathered[value]

    @cached_property
    def _outputs(self) -> set[Value]:
        return {output.value for output in self.graph.outputs}

    def _dim(self, value: Value) -> int | None:
        """The first dim that the axis divides; None where the value is sharded over it already, or there is none."""
        spec, mesh = value.spec, self.graph.mesh
        if spec is None or spec.partial or self.axis in spec.axes:
            return None
        for dim, (sharding, size) in enumerate(zip(spec.dims, value.shape, strict=True)):
            n = mesh.extent((*sharding.axes, self.axis))
            if not sharding.parts and size % n == 0 and size >= n:
                return dim
        return None
