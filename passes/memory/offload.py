"""offload: idle values are moved to host memory, or a file, and fetched shortly before they are needed.

    forward:                                         forward:
      %1 = aten.mm(%x, %w)                             %1 = aten.mm(%x, %w)
      %2 = aten.gelu(%1)                               %2 = aten.gelu(%1)
                                                       %3 = memory.to_host(%1)         behind its last use
    backward:                                        backward:
                                               ->      %7 = memory.to_device(%3)       so many nodes ahead
      %8 = aten.mm(%6, %v)                             %9 = aten.mm(%8, %v)
      %9 = aten.gelu_backward(%8, %1)                  %10 = aten.gelu_backward(%9, %7)

So are optimizer states, which are stored there: each is fetched for its update, whose result is offloaded again, during
the backward of earlier layers (:mod:`.update_order`); and parameters, fetched for each of forward, backward and update
(Rajbhandari et al., ZeRO-Infinity, 2021). What the backward recomputes is not offloaded; what it starts from is.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, get_args

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Phase, Value
from shardfx.ir.ops.comm import send
from shardfx.ir.ops.pools.pool_ops import moves_pool, to_device, to_disk, to_host
from shardfx.ir.ops.traits import gives_alias
from shardfx.ir.rewriter import Rewriter
from shardfx.passes.base import COMM_EXPLICIT, Pass, PassContext
from shardfx.passes.pass_text import check_options

from .module_patterns import matching_modules, matching_ops
from .recompute import Recomputation
from .update_order import ParameterUpdate, update_early, updates_of

What = Literal["activations", "optimizer", "parameters", "rows"]
ACTIVATIONS, OPTIMIZER, PARAMETERS, ROWS = get_args(What)
WHERE = "Hints(offload=...)"
STORED = {OPTIMIZER: InputKind.STATE, PARAMETERS: InputKind.PARAMETER}
"""The kind of inputs stored in the other pool."""


@dataclass(frozen=True)
class Offload(Pass):
    """Offload idle values to host memory or files, and prefetch them before their use.

    A parameter with offloaded states is updated as soon as its gradient is final and the backward no longer reads it,
    so that its states are copied during the backward of earlier layers. An update that needs all gradients (clipping by
    the norm of all, a loss scale that skips) stays behind the backward.

    Args:
        what: the kinds of values: ``"activations"`` (saved for the backward), ``"optimizer"`` (its states),
            ``"parameters"``, ``"rows"`` (of embedding tables: :class:`.TableRows`); or several of them.
        to: ``"host"``: host memory (pinned, on CUDA); ``"disk"``: memory-mapped files in ``directory``, or the
            system's for temporary files. They are unnamed, and freed with the plan.
        prefetch: the number of nodes before its first use at which a value is fetched. States are fetched at least so
            many nodes ahead, and earlier while the device has no more bytes of them than the two largest updates need.
        min_numel: the minimum number of elements of offloaded values.
        modules: the modules whose activations are offloaded (patterns of paths, as in ``Hints(recompute=...)``); and
            ``only``, the ops: ``"aten.mm"``, or ``"layers.*.mlp:aten.mm"``.
        count: the maximum number of matching modules, the first ones; 0 for all.
        skip: the number of matching modules to skip before these.

    Raises:
        Error: a word is none of these; a pattern matches nothing.

    Example::

        Hints(offload=[sx.Offload(("activations", "optimizer"), prefetch=16)])
        Hints(offload=["activations", sx.Offload("optimizer", to="disk", directory="/scratch")], optimizer=...)
    """

    name: ClassVar[str] = "offload"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    repeats: ClassVar[bool] = True

    what: What | Sequence[What] = ("activations", "optimizer", "parameters")
    to: Literal["host", "disk"] = "host"
    prefetch: int = 8
    min_numel: int = 2**14
    modules: str | Sequence[str] = "**"
    only: str | Sequence[str] = ()
    count: int = 0
    skip: int = 0
    directory: str = ""

    def __post_init__(self) -> None:
        check_options(self, WHERE, prefetch=0, min_numel=0, count=0, skip=0)
        if ROWS in self.whats and self.to != "host":
            what, remedy = "rows are looked up in the host's memory", "(sx.Offload('rows'), sx.Offload(..., to='disk'))"
            raise Error(what, where=WHERE, expected="to='host'", got=f"to={self.to!r}", remedy=remedy)
        if self.directory and self.to != "disk":
            got = f"directory={self.directory!r}"
            raise Error("files are offloaded to the disk alone", where=WHERE, expected="to='disk'", got=got)

    @property
    def whats(self) -> tuple[What, ...]:
        """The offloaded kinds of values, in words."""
        return (self.what,) if isinstance(self.what, str) else tuple(self.what)

    def without(self, what: str) -> tuple[Offload, ...]:
        """The same pass without one of the words; none, where it is the only one."""
        left = tuple(each for each in self.whats if each != what)
        return (replace(self, what=left),) if left else ()

    def run(self, graph: Graph, context: PassContext) -> bool:
        changed, trains = False, any(output.kind is OutputKind.GRADIENT for output in graph.outputs)
        for what in self.whats:
            if what == ROWS:  # a pass of its own, that stands before collectives are bucketed
                continue
            count = self._activations(graph) if what == ACTIVATIONS else self._stored(graph, what)
            if not count and trains:
                graph.notes.append(
                    f"nothing of {what} is offloaded: of {self.min_numel} elements and more none is idle"
                )
            changed |= bool(count)
        return changed

    def _activations(self, graph: Graph) -> int:
        """Offload activations that are idle between forward and backward; returns their number."""
        of = matching_modules(graph, self.modules, self.skip, self.count, where=WHERE, root=True)
        named = set(matching_ops(of, self.only, where=WHERE) if self.only else of)
        uses = _Uses(graph)
        kept = uses.of_parameters() | {uses.source(output.value) for output in graph.outputs}

        def is_idle(value: Value, first: int) -> bool:
            node = value.node
            if node is None or node not in named or moves_pool(node) or value in kept:
                return False
            if value.type.numel < self.min_numel:
                return False
            return uses.ahead(graph.nodes[first], self.prefetch) > max(uses.end_of(value) + 1, uses.begin)

        away = {value for value, first in uses.needed.items() if is_idle(value, first)}
        _Fetches(graph, self, uses, dict.fromkeys(away)).run()
        return len(away)

    def _stored(self, graph: Graph, what: str) -> int:
        found = [inp for inp in graph.of_kind(STORED[what]) if inp.value.type.ndim and not inp.pool]
        large = [inp for inp in found if inp.value.type.numel >= self.min_numel]
        if large:
            if what == OPTIMIZER:
                update_early(graph, large)
            _store_in_pool(graph, self, large)
        return len(large)

    def put(self, rewriter: Rewriter, value: Value) -> Node:
        """The node that offloads a value."""
        folder: dict[str, Any] = {"folder": self.directory} if self.directory else {}
        return rewriter.comm(to_host if self.to == "host" else to_disk, value, why="offloaded", **folder)

    def fetch(self, rewriter: Rewriter, away: Value, user: Node, place: int) -> Value:
        """Fetch a value for its first user, before the node at ``place``; returns it."""
        back = rewriter.comm(to_device, away, like=user, why=f"fetched for {user.name}")
        if away.node is not None:
            back.where = away.node.where
            if user.op is send or not user.at:  # else another stage of the same rank may need it first
                back.at = away.node.at
        else:  # what several stages store, each fetches
            back.at = next(inp.at for inp in rewriter.graph.inputs if inp.value is away)
        rewriter.before(rewriter.graph.nodes[place], back)
        return back.outs[0]


@dataclass
class _Uses:
    """Uses of a graph's values: the last in the forward, and the first behind it."""

    graph: Graph
    shown: dict[Value, Value] = field(default_factory=dict)
    """The base of each view in the forward."""
    last: dict[Value, int] = field(default_factory=dict)
    needed: dict[Value, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        nodes = self.graph.nodes
        self.places = {node: i for i, node in enumerate(nodes)}
        self.begin = next((i for i, node in enumerate(nodes) if node.phase is not Phase.FORWARD), len(nodes))
        self.update = [i for i, node in enumerate(nodes) if node.phase is Phase.UPDATE]
        self.other = [i for i, node in enumerate(nodes) if node.phase is not Phase.UPDATE]
        for i, node in enumerate(nodes):
            forward = node.phase is Phase.FORWARD
            if forward and gives_alias(node.op) and len(node.operands) == 1:
                self.shown.update(dict.fromkeys(node.outs, self.source(node.operands[0])))
            for value in map(self.source, node.operands):
                if forward:
                    self.last[value] = i
                else:
                    self.needed.setdefault(value, i)

    def source(self, value: Value) -> Value:
        """The base of a view; a value itself, if it is none."""
        return self.shown.get(value, value)

    def of_parameters(self) -> set[Value]:
        """Parameters, and values derived from parameters alone: gathered, cast."""
        found = {inp.value for inp in self.graph.of_kind(InputKind.PARAMETER)}
        for node in self.graph.nodes:
            if node.phase is Phase.FORWARD and node.operands and all(self.source(v) in found for v in node.operands):
                found.update(node.outs)
        return found

    def ahead(self, user: Node, count: int) -> int:
        """The place so many nodes before a user; those of the update, which stand among others, count in it alone."""
        places = self.update if user.phase is Phase.UPDATE else self.other
        return places[max(bisect_left(places, self.places[user]) - count, 0)]

    def end_of(self, value: Value) -> int:
        """The position of the last use of a value in the forward."""
        assert value.node is not None
        return self.last.get(value, self.places[value.node])


@dataclass
class _Fetches:
    """Fetches values once for the backward: forward values are offloaded behind the forward, inputs are stored there.
    Views of them are recomputed."""

    graph: Graph
    pool: Offload
    uses: _Uses
    inputs: Mapping[Value, Input | None]
    fetched: dict[Value, Value] = field(default_factory=dict)

    def run(self) -> None:
        """Rewrite the graph."""

        def is_view(value: Value) -> bool:
            return self.uses.source(value) is not value and self.uses.source(value) in self.inputs

        Recomputation(self.graph, is_view, self._instead).run()

    def _instead(self, rewriter: Rewriter, value: Value, anchor: Node) -> Value:
        if value in self.inputs and value not in self.fetched:
            inp = self.inputs[value]
            away = inp.value if inp is not None else None
            if away is None:
                put = rewriter.after(self.graph.nodes[self.uses.end_of(value)], self.pool.put(rewriter, value))
                away = put.outs[0]
            place = max(self.uses.ahead(anchor, self.pool.prefetch), self.uses.begin)
            self.fetched[value] = self.pool.fetch(rewriter, away, anchor, place)
        return self.fetched.get(value, value)


def _store_in_pool(graph: Graph, pool: Offload, stored: Sequence[Input]) -> None:
    """Store inputs in another pool: fetch each for every phase that uses it, and write its new content back."""
    rewriter, uses, users = Rewriter(graph), _Uses(graph), graph.users()
    outputs: dict[str, list[Output]] = {}
    for output in graph.outputs:
        if output.kind.is_given_away:
            outputs.setdefault(output.name, []).append(output)
    forward: dict[Value, Input] = {}
    """Inputs by their fetched values in the forward."""
    updates = updates_of(graph, [inp for inp in stored if inp.kind is InputKind.STATE])
    starts = _starts(updates, uses, pool.prefetch)
    ends = {inp.name: update.nodes[-1] for update in updates for inp in update.states}
    for inp in (*starts, *(inp for inp in stored if inp not in starts)):
        inp.pool = f"{pool.to}:{pool.directory}" if pool.directory else pool.to
        by_phase = {phase: [n for n in users[inp.value] if n.phase is phase] for phase in Phase}
        if by_phase[Phase.FORWARD]:  # the backward takes that as well, and views of it, until it is given its own
            by_phase[Phase.FORWARD] += by_phase.pop(Phase.BACKWARD)
        for phase, mine in by_phase.items():
            if mine:
                place = uses.ahead(mine[0], pool.prefetch)
                if phase is Phase.UPDATE and inp in starts:
                    place = min(starts[inp], uses.places[mine[0]])
                value = pool.fetch(rewriter, inp.value, mine[0], place)
                rewriter.replace(inp.value, value, users=mine)
                if phase is Phase.FORWARD:
                    forward[value] = inp
        for output in outputs.get(inp.name, ()):
            if (made := output.value.node) is not None:
                away = pool.put(rewriter, output.value)
                rewriter.after(max(made, ends.get(inp.name, made), key=uses.places.__getitem__), away)
                rewriter.replace(output.value, away.outs[0], users=[output])
    rewriter.apply()
    graph.rename()
    _Fetches(graph, pool, _Uses(graph), forward).run()


def _starts(updates: Sequence[ParameterUpdate], uses: _Uses, ahead: int) -> dict[Input, int]:
    """The positions at which states are fetched for their updates, in that order: as early as the device holds no more
    bytes of them at a time than of the two largest updates."""
    room, first, there = 2 * max((update.nbytes for update in updates), default=0), 0, 0
    found: dict[Input, int] = {}
    for update in updates:
        there += update.nbytes
        while there > room:
            there -= updates[first].nbytes
            first += 1
        earliest = uses.places[updates[first].nodes[0]]
        place = max(min(earliest, uses.places[update.nodes[0]] - ahead), uses.begin)
        found.update(dict.fromkeys(update.states, place))
    return found
