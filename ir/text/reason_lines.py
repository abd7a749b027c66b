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
from shardfx.ir.reasons import Carrier, Reasons, Refused, ShardingDecision
from shardfx.ir.spec import Spec

from .arguments import read_spec, read_type, write_spec, write_type
from .attributes import Attribute, read_attributes, said, source, write_attributes
from .lexer import TextLine
from .scope import PrintScope, ReadScope


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
        self.made: list[ShardingDecision] = []
        self._scope = ReadScope()

    def read(self, line: TextLine, scope: ReadScope) -> None:
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
        made = ShardingDecision(value, dim, spec.dims[0], level)
        read_attributes(DECISION, made, line, scope)
        self.made.append(made)

    def reasons(self) -> Reasons:
        """The decisions that were read.

        Raises:
            Error: a decision is behind one that is not there.
        """
        for made, line, numbers in self._scope.behind:
            missing = next((number for number in numbers if not 0 <= number < len(self.made)), None)
            if missing is not None:
                line.fail("the number of a decision", missing)
            made.causes = tuple(self.made[number] for number in numbers)
        found: dict[Value, list[ShardingDecision]] = {}
        for made in self.made:
            found.setdefault(made.value, []).append(made)
        return Reasons(found)


# ---- what a line may say ---------------------------------------------------------------------------------------


def _write_carriers(made: ShardingDecision, scope: PrintScope) -> str | None:
    said = ", ".join(f"{axis} {scope.use(value)} {dim}" for axis, value, dim in made.carriers)
    return f" {said}" if said else None


def _read_carriers(made: ShardingDecision, line: TextLine, scope: ReadScope) -> None:
    def carrier() -> Carrier:
        return Carrier(scope.mesh_axis(line), scope.use(line), line.number_of(int, "a dim"))

    made.carriers = tuple(line.many(carrier, ""))


def _write_refused(made: ShardingDecision, scope: PrintScope) -> str | None:
    said = (json.dumps(text) + (f" {scope.use(value)}" if value is not None else "") for text, value in made.refused)
    return f" {', '.join(said)}" if made.refused else None


def _read_refused(made: ShardingDecision, line: TextLine, scope: ReadScope) -> None:
    def refused() -> Refused:
        text = json.loads(line.take("string", "in quotes what was rejected"))
        return Refused(text, scope.use(line) if line.kind == "value" else None)

    made.refused = tuple(line.many(refused, ""))


def _write_causes(made: ShardingDecision, scope: PrintScope) -> str | None:
    return f" {', '.join(str(scope.numbers[each]) for each in made.causes)}" if made.causes else None


def _read_causes(made: ShardingDecision, line: TextLine, scope: ReadScope) -> None:
    numbers = line.many(lambda: line.number_of(int, "the number of a decision"), "")
    scope.behind.append((made, line, numbers))  # which may be of a line below


DECISION: tuple[Attribute[ShardingDecision], ...] = (
    said("hint", "hint", "the hint in quotes", gap=" "),
    Attribute("from", _write_carriers, _read_carriers, gap=" "),
    Attribute("behind", _write_causes, _read_causes, gap=" "),
    Attribute("down", _write_refused, _read_refused, gap=" "),
    said("through", "op", "an op such as aten.mm", quotes=False, gap=" "),
    source(),
)
