"""What ranks must have planned alike, as lines of text by subject.

Each rank captures and plans for itself. A model that is another one on some rank (a loss, an activation, a number in
its code) may send the same, and then gives a mixture of both; so every op is compared, and every constant.
"""

from __future__ import annotations

from shardfx.ir.graph import Graph, InputKind
from shardfx.ir.text import print_graph
from shardfx.runtime.distributed.checksum import checksum
from shardfx.runtime.peers import Subjects

SOURCE = "  @ "
"""What follows in a line is where in the user's code it comes from, which need not be the same."""


def subjects(captured: Graph, planned: Graph, more: Subjects) -> Subjects:
    """Of a plan: the captured graph, as it was planned, and what else there is to it."""
    return {
        "mesh": [str(planned.mesh)],
        "the model and its loss": print_graph(captured, sources=False).splitlines(),
        "constants": _constants(captured),
        **more,
        "the plan": print_graph(planned, sources=False).splitlines(),
    }


def _constants(graph: Graph) -> list[str]:
    found = []
    for given in graph.inputs:
        if given.kind is InputKind.CONSTANT and given.constant is not None:
            known = given.constant.device.type != "meta"
            content = f"{checksum(given.constant) & 0xFFFFFFFF:08x}" if known else "unknown"
            found.append(f"{given.name} : {given.value.type}, content {content}")
    return found


def compared(line: str) -> str:
    """What of a line is compared."""
    return line.split(SOURCE)[0].rstrip()
