"""One rank's program: what is shown, proven, priced and run.

A torch.fx graph of calls on plain local tensors, with what goes in and what comes out. ``str(program)`` is its text
(:mod:`.program_text`); ``program.module()`` its picture in Python, a ``GraphModule``. While a program is made and
changed by rank passes, ``node.meta["shardfx"]`` is the planned node that a call comes from.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Input, Node, Output
from shardfx.ir.mesh import Mesh

from .rank_module import NodeOrigin, RankModule, attribute, inlined


@dataclass(eq=False)
class RankProgram:
    """The program of one rank: calls of torch's ops and of rows of :mod:`shardfx.ir.registry` in order, with an
    input of the planned graph for each placeholder, and an output for each result. ``constants`` are tensors of a
    module that somebody changed, by attribute name."""

    rank: int
    mesh: Mesh
    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    constants: Mapping[str, Any] = field(default_factory=dict)

    def module(self) -> RankModule:
        """The program as a new ``GraphModule`` at each call: for people, ``torch.compile`` and export."""
        return self.copy().into_module()

    def into_module(self) -> RankModule:
        """The program as a ``GraphModule`` that takes over its graph, which nobody else may use."""
        return RankModule.of(self.graph, self.comments(), self.constants, self.rank)

    def comments(self) -> dict[str, str]:
        """Comments of code lines: the origin of each call, the placement of an input."""
        found: dict[str, str] = {}
        inputs = iter(self.inputs)
        for node in self.graph.nodes:
            if node.op == "placeholder":
                inp = next(inputs, None)
                if inp is not None and inp.value.spec is not None:
                    found[node.name] = f"{inp.name}: {inp.value.spec.text(inp.value.shape)}"
            elif isinstance(made := node.meta.get("shardfx"), Node) and (where := str(made.where)):
                found[node.name] = where
        return found

    def changed(self, module: fx.GraphModule) -> RankProgram:
        """The program of a modified module of this one; modules that it calls are inlined."""
        if not isinstance(module, fx.GraphModule):
            raise Error(
                "this is not a program",
                where=f"rank {self.rank}",
                expected=f"a torch.fx.GraphModule, as pm.rank_module({self.rank}) gives",
                got=type(module).__name__,
            )
        planned = {node.outs[0].name: node for node in self.planned().values() if node.outs}
        graph = fx.Graph()
        graph.output(inlined(graph, module, {}))
        for node in graph.nodes:
            origin = node.meta.pop("shardfx", None)
            if isinstance(origin, NodeOrigin):
                origin = planned.get(origin.value)
            if origin is not None:
                node.meta["shardfx"] = origin
        self._check(graph)
        names = [str(node.target) for node in graph.nodes if node.op == "get_attr"]
        return replace(self, graph=graph, constants={name: attribute(module, name) for name in names})

    def planned(self) -> dict[fx.Node, Node]:
        """The planned node of each call."""
        found = {node: node.meta.get("shardfx") for node in self.graph.nodes}
        return {node: made for node, made in found.items() if isinstance(made, Node)}

    def copy(self) -> RankProgram:
        """A copy of the program."""
        graph, env = fx.Graph(), dict[fx.Node, Any]()
        for node in self.graph.nodes:
            env[node] = graph.node_copy(node, env.__getitem__)
        return replace(self, graph=graph)

    def result(self) -> fx.Node:
        """The output node."""
        found: fx.Node = next(node for node in reversed(self.graph.nodes) if node.op == "output")
        return found

    def _check(self, graph: fx.Graph) -> None:
        takes = sum(node.op == "placeholder" for node in graph.nodes)
        ends = [node for node in graph.nodes if node.op == "output"]
        gives = ends[0].args[0] if ends and ends[0].args else ()
        count = len(gives) if isinstance(gives, (tuple, list)) else 1
        if takes != len(self.inputs) or count != len(self.outputs):
            raise Error(
                "this module is not a program of this plan",
                where=f"rank {self.rank}",
                expected=f"{len(self.inputs)} inputs and {len(self.outputs)} results, as pm.rank_module({self.rank})",
                got=f"{takes} inputs and {count} results",
                remedy="change what pm.rank_module(rank) of this plan gives",
            )

    def __str__(self) -> str:
        from .program_text import print_program  # which knows programs

        return print_program(self)


def planned_node(call: fx.Node) -> Node | None:
    """The planned node that a call was lowered from."""
    planned = call.meta.get("shardfx")
    return planned if isinstance(planned, Node) else None
