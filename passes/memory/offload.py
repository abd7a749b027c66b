"""offload: what waits is put away into the host's memory, or a file, and fetched shortly before it is needed.

    forward:                                         forward:
      %1 = aten.mm(%x, %w)                             %1 = aten.mm(%x, %w)
      %2 = aten.gelu(%1)                               %2 = aten.gelu(%1)
                                                       %3 = memory.to_host(%1)         behind its last use
    backward:                                        backward:
                                               ->      %7 = memory.to_device(%3)       so many nodes ahead
      %8 = aten.mm(%6, %v)                             %9 = aten.mm(%8, %v)
      %9 = aten.gelu_backward(%8, %1)                  %10 = aten.gelu_backward(%9, %7)

So are states of the optimizer, which lie there for good: each is fetched for its update, and what that makes is
offloaded again, during the backward of earlier layers (:mod:`.update_order`); and parameters, fetched for each of
forward, backward and update. (Rajbhandari et al., ZeRO-Infinity, 2021.) What the backward recomputes is not offloaded;
what it starts from is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, OutputKind
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass

from .put_away import Pool, put_away_waiting, store_beside
from .regions import of_ops, regions
from .update_order import update_early

ACTIVATIONS, OPTIMIZER, PARAMETERS, ROWS = WHAT = ("activations", "optimizer", "parameters", "rows")
USUAL = (ACTIVATIONS, OPTIMIZER, PARAMETERS)
"""What is put away where nothing is said."""
POOLS = ("host", "disk")
WHERE = "Hints(offload=...)"
STORED = {OPTIMIZER: InputKind.STATE, PARAMETERS: InputKind.PARAMETER}
"""What lies in the other pool for good."""


@dataclass(frozen=True)
class Offload(Pass):
    """Put away what waits, and fetch it before it is needed.

    A parameter with states in the other pool is updated as soon as its gradient is final and the backward reads it no
    more, so that its states travel while the backward of earlier layers is computed. An update that needs all gradients
    (a clip by the norm of all, a loss scale that skips) stays behind the backward.

    Args:
        what: ``"activations"`` (what the forward made for the backward), ``"optimizer"`` (its states),
            ``"parameters"``, ``"rows"`` (of tables that are looked up in: :class:`.TableRows`); or several of them.
        to: ``"host"``: the host's memory (pinned, on CUDA); ``"disk"``: files that are mapped into memory, of the
            ``folder``, or of the system's for temporary files. They have no names, and go with the plan.
        ahead: so many nodes before its first use something is fetched. States are fetched as early as no more bytes of
            them are on the device at a time than of the two largest updates, and at least so many nodes before theirs.
        least: what has fewer elements stays where it is.
        modules: of which modules activations are put away (patterns of paths, as in ``Hints(recompute=...)``); and
            ``only``, of which ops: ``"aten.mm"``, or ``"layers.*.mlp:aten.mm"``.
        count: only so many of the modules that match, the first ones; 0 for all.
        skip: and none of so many before these.

    Raises:
        Error: a word is none of these; a pattern matches nothing.

    Example::

        Hints(offload=[sx.Offload(("activations", "optimizer"), ahead=16)])
        Hints(offload=["activations", sx.Offload("optimizer", to="disk", folder="/scratch")], optimizer=...)
    """

    name: ClassVar[str] = "offload"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    repeats: ClassVar[bool] = True

    what: str | tuple[str, ...] = USUAL
    to: str = "host"
    prefetch: int = 8
    min_numel: int = 2**14
    modules: str | tuple[str, ...] = "**"
    only: str | tuple[str, ...] = ()
    count: int = 0
    skip: int = 0
    directory: str = ""

    def __post_init__(self) -> None:
        if not self.whats:
            raise _unknown("what is put away", WHAT, self.what)
        for what in self.whats:
            if what not in WHAT:
                raise _unknown("what is put away", WHAT, what)
        if self.to not in POOLS:
            raise _unknown("where it is put", POOLS, self.to)
        if ROWS in self.whats and self.to != "host":
            raise Error(
                "rows are looked up in the host's memory",
                where=WHERE,
                expected="to='host'",
                got=f"to={self.to!r}",
                remedy="put them there, and the rest elsewhere: (sx.Offload('rows'), sx.Offload(..., to='disk'))",
            )
        if self.directory and self.to != "disk":
            raise Error(
                "only files lie in a folder", where=WHERE, expected="to='disk'", got=f"folder={self.directory!r}"
            )
        for name in ("prefetch", "min_numel", "count", "skip"):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise Error(f"offload{{{name}=...}} is no number", where=WHERE, expected="0 or more", got=number)

    @property
    def whats(self) -> tuple[str, ...]:
        """What is put away, in words."""
        return (self.what,) if isinstance(self.what, str) else tuple(self.what)

    def without(self, what: str) -> tuple[Offload, ...]:
        """The same without one of the words; none, where it is the only one."""
        left = tuple(each for each in self.whats if each != what)
        return (replace(self, what=left),) if left else ()

    def run(self, graph: Graph, context: Context) -> bool:
        changed, trains = False, any(output.kind is OutputKind.GRADIENT for output in graph.outputs)
        for what in self.whats:
            if what == ROWS:  # a pass of its own, that stands before collectives are joined
                continue
            count = self._activations(graph) if what == ACTIVATIONS else self._stored(graph, what)
            if not count and trains:
                graph.notes.append(f"nothing of {what} is put away: of {self.min_numel} elements and more none waits")
            changed |= bool(count)
        return changed

    def _activations(self, graph: Graph) -> int:
        of = regions(graph, self.modules, self.skip, self.count, where=WHERE, root=True)
        named = set(of_ops(of, self.only, where=WHERE) if self.only else of)
        return put_away_waiting(graph, self._pool, lambda v: v.node in named and v.type.numel >= self.min_numel)

    def _stored(self, graph: Graph, what: str) -> int:
        found = [given for given in graph.of_kind(STORED[what]) if given.value.type.ndim and not given.pool]
        large = [given for given in found if given.value.type.numel >= self.min_numel]
        if large:
            if what == OPTIMIZER:
                update_early(graph, large)
            store_beside(graph, self._pool, large)
        return len(large)

    @property
    def _pool(self) -> Pool:
        return Pool(self.to, self.directory, self.prefetch)


def _unknown(what: str, known: Iterable[str], got: object) -> Error:
    return Error(f"Hints(offload=...) does not know {what}", where=WHERE, expected=f"of {', '.join(known)}", got=got)
