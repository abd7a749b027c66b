"""recompute: what the forward made is made again where the backward needs it, so that it need not wait there.

    forward:                                         forward:
      %1 = aten.mm(%x, %w)       @ layers.0            %1 = aten.mm(%x, %w)
      %2 = aten.gelu(%1)         @ layers.0            %2 = aten.gelu(%1)
      %3 = aten.mm(%2, %v)       @ layers.0     ->     %3 = aten.mm(%2, %v)
    backward:                                        backward:
      %9 = aten.gelu_backward(%8, %1)                  %8 = aten.mm(%x, %w)              once more; %1 is gone
                                                       %9 = aten.gelu_backward(%7, %8)

The values that leave a module that is recomputed stay, and it starts from them: what goes into the next module
(Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016; ``torch.utils.checkpoint``). Of the forward only
what the backward needs is repeated, each op once and as late as it may, and dropout draws the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Phase, Value
from shardfx.ir.ops.sends import fetched, is_comm
from shardfx.passes.base import COMM_EXPLICIT, Context, Pass

from .boundaries import Slices
from .made_again import Repeats
from .regions import joined, of_ops, regions, successive

WHERE = "Hints(recompute=...)"


@dataclass(frozen=True)
class Recompute(Pass):
    """Make again in the backward what modules made in the forward.

    Args:
        modules: patterns of module paths (``*`` is one part of a path, ``**`` any number).
        keep: patterns of ops whose results stay, such as ``"aten.mm"``; those of some modules alone are
            ``"layers.*.mlp:aten.mm"``.
        comm: whether collectives are repeated; if not, their results stay.
        gathers: whether stored parameters are gathered again too; if not, they stay whole.
        slice: a mesh axis: what stays waits sharded over it, and is gathered where it is needed.
        count: only so many of the modules that match, the first ones; 0 for all.
        skip: and none of so many before these.
        together: so many modules that follow one another are one: what they give each other is made again too, and so
            is what is done between them (``torch.utils.checkpoint.checkpoint_sequential``).

    Example::

        Hints(recompute=sx.Recompute("layers.*", keep="aten.mm"))
        Hints(recompute=sx.Recompute("features.*", together=4))
    """

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})
    repeats: ClassVar[bool] = True

    modules: str | tuple[str, ...] = ()
    save: str | tuple[str, ...] = ()
    comm: bool = True
    regather: bool = True
    shard_saved: str = ""
    count: int = 0
    skip: int = 0
    segment: int = 1

    def __post_init__(self) -> None:
        for name in ("modules", "save"):
            given = getattr(self, name)
            if not (isinstance(given, str) or (isinstance(given, (tuple, list)) and all(map(_is_text, given)))):
                raise _of_another_kind(name, given, "a pattern, such as 'layers.*', or a tuple of such")
        for name, least in (("count", 0), ("skip", 0), ("segment", 1)):
            number = getattr(self, name)
            if type(number) is not int or number < least:
                raise _of_another_kind(name, number, f"a number of modules, {least} or more")
        for name in ("comm", "regather"):
            if not isinstance(getattr(self, name), bool):
                raise _of_another_kind(name, getattr(self, name), "True or False")
        if not isinstance(self.shard_saved, str):
            raise _of_another_kind("shard_saved", self.shard_saved, "the name of a mesh axis")

    def run(self, graph: Graph, context: Context) -> bool:
        of = regions(graph, self.modules, self.skip, self.count, where=WHERE)
        if not of:
            return False
        if self.shard_saved and self.shard_saved not in graph.mesh.names:
            raise Error(
                f"unknown mesh axis {self.shard_saved!r}",
                where=f"{WHERE}: slice",
                expected=f"one of {', '.join(graph.mesh.names)}",
                got=self.shard_saved,
                remedy="name the axis over which what stays waits sharded, such as that of tensor parallelism",
            )
        if self.segment > 1:
            of = joined(graph, of, successive(list(dict.fromkeys(of.values())), self.segment))
        stays = self._staying(graph, of)
        again = {v for node in of for v in node.outs if v not in stays}
        if not self.shard_saved:
            return Repeats(graph, again.__contains__).run()
        of_regions = {value for node in of for value in (*node.outs, *node.operands)}
        return Repeats(graph, again.__contains__, Slices(graph, self.shard_saved, of_regions).of).run()

    def _staying(self, graph: Graph, of: dict[Node, str]) -> set[Value]:
        """What is not made again: what leaves a module, or the graph, and what the options say."""
        stays = {output.value for output in graph.outputs}
        for node in graph.nodes:
            if node.phase is Phase.FORWARD:
                stays |= {v for v in node.operands if v.node in of and of[v.node] != of.get(node)}
        stays |= {value for node in of_ops(of, self.save, where=WHERE) for value in node.outs}
        if not self.comm:
            stays |= {value for node in of if is_comm(node) for value in node.outs}
        if not self.regather:
            whole = fetched(graph)
            stays |= {value for node in of if is_comm(node) for value in node.outs if value in whole}
        return stays


def _is_text(given: object) -> bool:
    return isinstance(given, str)


def _of_another_kind(name: str, given: object, expected: str) -> Error:
    return Error(
        f"sx.Recompute({name}=...) is of another kind",
        where=WHERE,
        expected=expected,
        got=f"{given!r:.100} of type {type(given).__name__}",
        remedy="see what help(sx.Recompute) says of it",
    )
