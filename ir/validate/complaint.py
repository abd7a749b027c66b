"""What is said of a wrong graph: what, at which node of which source line, what was expected, and who left it so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, Value
from shardfx.ir.text.printer import Printer


@dataclass(frozen=True)
class Complaint:
    """Raises the error for what is wrong with ``graph``; ``after`` names the pass that has just run.

    Text is written only then, so that a right graph costs nothing.
    """

    graph: Graph
    after: str | None

    def name(self, value: Value) -> str:
        """What the text of the graph calls a value."""
        return Printer(self.graph).use(value)

    def fail(self, what: str, place: Node | Input | Output, *, expected: object = None, got: object = None) -> NoReturn:
        """Raise; ``place`` is the line that is wrong."""
        printer = Printer(self.graph)
        if isinstance(place, Node):
            where = printer.node(place)
        elif isinstance(place, Input):
            where = printer.input(place)
        else:
            maker = place.value.node
            made = f", made by {printer.node(maker)}" if maker is not None and maker in self.graph.nodes else ""
            where = f"output {place.kind.value} {place.name}{made}"
        raise Error(
            f"the graph is wrong{f' after pass {self.after!r}' if self.after else ''}: {what}",
            where=where,
            expected=expected,
            got=got,
            remedy=f"pass {self.after!r} left it so: mend it there" if self.after else None,
        )
