"""One rank's program: an fx graph, what goes in and what comes out."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardfx.ir.graph import Input, Output
from shardfx.ir.mesh import Mesh


@dataclass(frozen=True)
class Program:
    """A rank's module, with what goes in and what comes out, in order."""

    module: fx.GraphModule
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]


@dataclass(frozen=True)
class Code:
    """A rank's program as an fx graph, not compiled: half of a module's time goes into that."""

    rank: int
    mesh: Mesh
    graph: fx.Graph
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
