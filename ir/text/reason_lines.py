"""The reasons of a graph as lines of its text, both ways: why each value is sharded as it is.

reasons:
  gone %gone.0 : f32[512, 256]
  0: %layers.0.w1.weight 0 [512{tp}] "by layers.*.w1.weight" hint "layers.*.w1.weight"
  1: %0 1 [512{tp}] "elementwise" from tp %layers.0.w1.weight 0 behind 0 through aten.t @ layers.0.w1  model.py:42

A line says which dim of which value is sharded how; ``from`` which dims of which tensors an axis came, ``behind`` which
decisions, and what was turned ``down``. What is ``gone`` was taken out of the graph since.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from shardfx.ir.graph import Value
from shardfx.ir.reasons import Carrier, Decision, Reasons, Refused
from shardfx.ir.spec import Spec

from .arguments import read_spec, read_type, write_spec, write_type
from .attributes import Attribute, read_attributes, write_attributes
from .lexer import Line
from .scope import BARE_NAME, PrintScope, ReadScope, quoted
from .where import read_where, write_where


def write_reasons(reasons: Reasons, scope: PrintScope) -> Iterator[str]:
    """The lines; what is gone from the graph has a name of its own."""
    made = list(reasons)
    gone = dict.fromkeys(value for each in made for value in each.values if value not in scope.tokens)
    taken = set(scope.tokens.values())
    for number, value in enumerate(gone):
        name = f"%gone.{number}"
        while name in taken:
            name += "_"
        scope.tokens[value] = name
        yield f"gone {name} : {write_type(value, scope)}"
    scope.numbers = {each: number for number, each in enumerate(made)}
    for each, number in scope.numbers.items():
        sharding = write_spec(Spec((each.sharding,)), (each.value.shape[each.dim],))
        line = f"{number}: {scope.use(each.value)} {each.dim} {sharding} {json.dumps(each.level)}"
        yield write_attributes(line, DECISION, each, scope)


class ReasonReader:
    """Reads the lines one by one."""

    def __init__(self) -> None:
        self.made: list[Decision] = []
        self._scope = ReadScope()

    def read(self, line: Line, scope: ReadScope) -> None:
        """One line.

        Raises:
            Error: it cannot be read, or names what is not there.
        """
        self._scope = scope
        if line.accept("gone"):
            token = line.take("value", "a name for what is gone")
            line.expect(":")
            type, spec = read_type(line, scope)
            scope.define(line, token, Value(type, spec=spec))
            return
        if line.number_of(int, "the number of a decision") != len(self.made):
            line.fail(f"number {len(self.made)}, for the lines are numbered", line.text.strip().partition(":")[0])
        line.expect(":")
        value = scope.use(line)
        dim = line.number_of(int, "a dim")
        if not 0 <= dim < value.type.ndim:
            line.fail(f"a dim of {list(value.shape)}", dim)
        _, spec = read_spec(line, scope)
        level = json.loads(line.take("string", "in quotes how it came about"))
        made = Decision(value, dim, spec.dims[0], level)
        read_attributes(DECISION, made, line, scope)
        self.made.append(made)

    def reasons(self) -> Reasons:
        """All that was read.

        Raises:
            Error: a decision is behind one that is not there.
        """
        for made, line, numbers in self._scope.behind:
            missing = next((number for number in numbers if not 0 <= number < len(self.made)), None)
            if missing is not None:
                line.fail("the number of a decision", missing)
            made.causes = tuple(self.made[number] for number in numbers)
        found: dict[Value, list[Decision]] = {}
        for made in self.made:
            found.setdefault(made.value, []).append(made)
        return Reasons(found)


# ---- what a line may say ---------------------------------------------------------------------------------------


def _write_hint(made: Decision, scope: PrintScope) -> str | None:
    return f" {json.dumps(made.hint)}" if made.hint else None


def _read_hint(made: Decision, line: Line, scope: ReadScope) -> None:
    made.hint = json.loads(line.take("string", "the hint in quotes"))


def _write_carriers(made: Decision, scope: PrintScope) -> str | None:
    said = ", ".join(f"{axis} {scope.use(value)} {dim}" for axis, value, dim in made.carriers)
    return f" {said}" if said else None


def _read_carriers(made: Decision, line: Line, scope: ReadScope) -> None:
    def carrier() -> Carrier:
        return Carrier(scope.mesh_axis(line), scope.use(line), line.number_of(int, "a dim"))

    made.carriers = tuple(line.many(carrier, ""))


def _write_refused(made: Decision, scope: PrintScope) -> str | None:
    said = (json.dumps(text) + (f" {scope.use(value)}" if value is not None else "") for text, value in made.refused)
    return f" {', '.join(said)}" if made.refused else None


def _read_refused(made: Decision, line: Line, scope: ReadScope) -> None:
    def refused() -> Refused:
        text = json.loads(line.take("string", "in quotes what was turned down"))
        return Refused(text, scope.use(line) if line.kind == "value" else None)

    made.refused = tuple(line.many(refused, ""))


def _write_causes(made: Decision, scope: PrintScope) -> str | None:
    return f" {', '.join(str(scope.numbers[each]) for each in made.causes)}" if made.causes else None


def _read_causes(made: Decision, line: Line, scope: ReadScope) -> None:
    numbers = line.many(lambda: line.number_of(int, "the number of a decision"), "")
    scope.behind.append((made, line, numbers))  # which may be of a line below


def _write_op(made: Decision, scope: PrintScope) -> str | None:
    return f" {quoted(made.op, BARE_NAME)}" if made.op else None


def _read_op(made: Decision, line: Line, scope: ReadScope) -> None:
    made.op = line.name("an op such as aten.mm")


def _write_source(made: Decision, scope: PrintScope) -> str | None:
    return write_where(made.where, scope)


def _read_source(made: Decision, line: Line, scope: ReadScope) -> None:
    made.where = read_where(line, scope)


DECISION: tuple[Attribute[Decision], ...] = (
    Attribute("hint", _write_hint, _read_hint, gap=" "),
    Attribute("from", _write_carriers, _read_carriers, gap=" "),
    Attribute("behind", _write_causes, _read_causes, gap=" "),
    Attribute("down", _write_refused, _read_refused, gap=" "),
    Attribute("through", _write_op, _read_op, gap=" "),
    Attribute("@", _write_source, _read_source),
)
