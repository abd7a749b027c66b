"""The table of our own ops: a graph's ``comm.*`` and ``memory.*`` nodes, and the calls of rank programs.

A new op of the graph is an :class:`OwnOp`: its keywords, its effect on placements, what it sends, which op leads back,
how one rank does it, and its shape in pictures. A new call of programs is a :class:`LocalOp`: which argument names the
group it speaks to, which operand's memory its result is written into, whether it may share memory, and which call it
is where every value has memory of its own. Text, validation, lowering, cost, proof and pictures read the rows, and
name no op themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import fx

from shardfx.ir.dim_sharding import Coords
from shardfx.ir.graph import Node, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.registry import GraphOp
from shardfx.ir.spec import Spec

from .sends import Sent, exchanged, sent


class RankEmit(Protocol):
    """The context of a row's ``local``, which writes one rank's version of a node (:mod:`shardfx.ir.program.lower`)."""

    node: Node
    mesh: Mesh
    coords: Coords
    args: tuple[Any, ...]

    @property
    def device(self) -> str:
        """The device type of the program."""

    def call(self, op: Any, *args: Any, gives: Sequence[int] | None = None) -> Any:
        """Write a call; ``gives`` is the shape of its result, for later passes."""

    def shape(self, value: Value, spec: Spec) -> tuple[int, ...]:
        """The local shape of a value with a spec."""

    def group(self, axes: tuple[str, ...]) -> str:
        """The name of this rank's group along some axes."""


@dataclass(frozen=True)
class Keyword:
    """A keyword of an own op: ``kind`` is ``axes`` (of the mesh), ``dim``, ``word`` (a reduction), ``sizes``,
    ``text``, or ``rows`` (dims, and the windows through which other dims need them)."""

    kind: str
    needed: bool = True


Place = Callable[..., Spec]
"""``place(source, shape, mesh, **keywords)``: the resulting placement; an Error if the op does not apply."""


@dataclass(frozen=True, eq=False)
class OwnOp(GraphOp):
    """An op of the graph that is not torch's. Operand k gives result k.

    Args:
        name: as it is printed, ``comm.all_reduce``.
        keywords: which there are, and of which kind.
        place: the effect on placements.
        local: one rank's version; gives what stands for each result.
        factor, full: a rank sends ``factor * (n - 1) / n`` of the local bytes of its ``operands`` or ``results``.
        adjoint: the row that goes back (a law test runs both); none where there is no one such.
        glyph: its shape in pictures: ``join``, ``split``, ``sum`` or ``iteration``; empty where it is a box like
            others.
        pool: what its results lie in, where that is not the device's memory.
        fetches: it takes what lies in such a pool.
        rows: the bytes that a rank sends, where that is no fraction of a full value.
    """

    name: str
    keywords: Mapping[str, Keyword]
    place: Place
    local: Callable[[RankEmit], Sequence[Any]]
    factor: float = 0.0
    full: str = "operands"
    adjoint: str = ""
    glyph: str = ""
    pool: str = ""
    fetches: bool = False
    rows: Callable[[Node, Mesh], float] | None = None

    def __str__(self) -> str:
        return self.name

    @property
    def kind(self) -> str:
        """The name without its namespace: ``all_reduce``."""
        return self.name.partition(".")[2]

    @property
    def sends_nothing(self) -> bool:
        """Whether the op sends no data."""
        return self.factor == 0.0

    def full_bytes(self, node: Node, mesh: Mesh) -> int:
        """The bytes that are gathered, unreduced or exchanged, on the rank with the most."""
        if self.rows is not None:
            return int(self.rows(node, mesh))
        values = node.operands if self.full == "operands" else node.outs
        return sum(value.local_bytes(mesh) for value in values)

    def full_bytes_of(self, put_in: float, ranks: int) -> float:
        """The bytes of the full value, from the bytes of one rank's operands."""
        return put_in if self.full == "operands" else put_in * ranks

    def sends(self, node: Node, mesh: Mesh) -> Sent:
        """The communication of a rank per run of a node."""
        return self.sent(self.full_bytes(node, mesh), mesh.extent(node.kwargs.get("axes", ())))

    def sent(self, nbytes: float, ranks: int) -> Sent:
        """The communication of each of ``ranks``, if ``nbytes`` are gathered, unreduced or exchanged: all of halo rows
        for others."""
        return sent(self.factor, ranks, nbytes) if self.rows is None else exchanged(ranks, nbytes)


def carried(node: Node) -> list[tuple[Value, Value]]:
    """The operands of an own op, each with the result that is the same value in another placement."""
    return list(zip(node.operands, node.outs, strict=True))


Arguments = tuple[Any, ...]
Keywords = dict[str, Any]
Plain = Callable[[Arguments, Keywords], "tuple[Any, Arguments, Keywords] | Any"]
"""Maps a call's arguments to an equivalent call: function, arguments and keywords; or to an operand."""


@dataclass(frozen=True)
class LocalOp:
    """A call of rank programs to a function that is no op of the model.

    Args:
        name: as programs print it, ``memory.part``.
        function: what runs, with torch alone.
        group: where the name of the group stands, for what starts a collective and is waited for.
        into: the operand (or keyword) whose memory the result is written into.
        reads_into: what lies there is read as well.
        rewrites: of the arguments, the operands that are read and written over, where these are several.
        shares: the result may be in an operand's memory, without being written there.
        moves: elements only move: it can be executed on element numbers.
        plain: of the arguments, the call that gives the same value in memory of its own, or the operand that is it
            already; None where this call is such a one.
        memory: the result is memory, and no value. ``filled``: of a content that what is collected goes on from.
        holds: what it sends, or copies, stays in memory until it was waited for.
        adjoins: the result is the operands themselves where they lie one behind the other, and a copy elsewhere.
        pool: what the result lies in, where that is not the device's memory.
        fetches: it takes operands that lie in such a pool; of others they are not to be read.
        copies: it starts a copy between pools, which is done once it was waited for.
        waits: its result is its operand, which was only started.
        message: ``sends`` or ``receives`` one of another rank's, where not all of the group meet.
        iterations: its part in what is done once for each iteration of a loop axis: ``opens`` and ``closes`` them,
            begins a ``unit`` of them, is a ``number`` of the iteration, or ``collects`` what leaves them.
        observes: it is the identity, of an operand that a function of a user's reads.
        adds: of the arguments, the call whose result is added to what is collected, where it is done into that.
    """

    name: str
    function: Callable[..., Any]
    group: int | None = None
    into: int | str | None = None
    reads_into: bool = False
    rewrites: Callable[[Sequence[Any]], list[Any]] | None = None
    shares: bool = False
    moves: bool = False
    plain: Plain | None = None
    memory: bool = False
    filled: bool = False
    holds: bool = False
    adjoins: bool = False
    pool: str = ""
    fetches: bool = False
    copies: bool = False
    waits: bool = False
    loop: str = ""
    message: str = ""
    adds: Plain | None = None
    observes: bool = False

    @property
    def is_number(self) -> bool:
        """Whether its result is an induction variable, which has no memory."""
        return self.loop in ("opens", "number")

    @property
    def starts(self) -> bool:
        """Whether its result is available only after a wait."""
        return (self.group is not None and self.message != "sends") or self.copies

    def destination(self, node: fx.Node) -> fx.Node | None:
        """The operand whose memory is written."""
        if self.into is None:
            return None
        found = node.kwargs.get(self.into) if isinstance(self.into, str) else node.args[self.into]
        return found if isinstance(found, fx.Node) else None
