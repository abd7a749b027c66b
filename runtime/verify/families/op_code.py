"""The code of one op in a rank's program, and the reading of a program as such code, op by op.

    %5 = comm.all_reduce(%4, axes=[tp])      c10d.all_reduce(operand 0, 'sum', group)
                                             c10d.wait_tensor(call 0)                     result 0

A program is *the planned graph in this code* if each of its calls is the next one of the code of the op that it comes
from, takes what stands for the operands that the planned graph gives this op, and if it returns what stands for the
planned outputs. Then what is proven of the code, op by op, and of the planned graph, is proven of the program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardfx.ir.graph import Input, Node, Output, Value
from shardfx.runtime.verify.proof.interpreter import IDENTITY

from .family import Family, varies
from .varying import Varying, leaves


@dataclass(frozen=True, slots=True)
class Operand:
    """An operand of the op: each value stands once, in the order of the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class Made:
    """What an earlier call of the same code gave."""

    call: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call, its tensors being :class:`Operand` and :class:`Made`."""

    target: Any
    args: Any
    kwargs: Any


@dataclass
class Code:
    """The calls that do one op on the ranks of a family."""

    family: Family
    calls: list[Call] = field(default_factory=list)
    results: list[Operand | Made] = field(default_factory=list)

    @staticmethod
    def of(family: Family) -> Code:
        """The code of an op that stands alone in a program."""
        code, env = Code(family), dict[fx.Node, Operand | Made]()
        for node in family.program.graph.nodes:
            if node.op == "placeholder":
                env[node] = Operand(len(env))
            elif node.op == "output":
                code.results = [env[result] for result in node.args[0]]
            elif node.target in IDENTITY:
                env[node] = env[node.args[0]]
            else:
                args, kwargs = (fx.map_arg(each, env.__getitem__) for each in (node.args, node.kwargs))
                env[node] = Made(len(code.calls))
                code.calls.append(Call(node.target, args, kwargs))
        return code


def operands(node: Node) -> list[Value]:
    """The operands of an op, each once."""
    return list(dict.fromkeys(node.operands))


@dataclass
class Reading:
    """The reading of a family's program."""

    family: Family
    nodes: Sequence[Node]
    codes: Mapping[Value, Code]
    """By the first result of each planned node: the code of its op on these ranks."""
    calls: int = 0
    _stands: dict[fx.Node, Value] = field(default_factory=dict)
    _made: dict[fx.Node, tuple[Value, int]] = field(default_factory=dict)
    _same: dict[Value, Value] = field(default_factory=dict)
    """Of values that are one on a rank, for their op does nothing there: the first."""
    _next: dict[Value, int] = field(default_factory=dict)
    _restricted: dict[tuple[int, Any], Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for node in self.nodes:
            first: dict[Operand | Made, Value] = {}
            for ref, value in zip(self._code(node).results, node.outs, strict=True):
                if isinstance(ref, Operand):
                    self._same[value] = self._one(operands(node)[ref.index])
                elif ref in first:
                    self._same[value] = first[ref]
                else:
                    first[ref] = value

    def _code(self, node: Node) -> Code:
        return self.codes[node.outs[0]]

    def _one(self, value: Value) -> Value:
        return self._same.get(value, value)

    def first_other(self, inputs: Sequence[Input], outputs: Sequence[Output]) -> fx.Node | None:
        """The first node at which the program is not the planned graph in this code; None: it is."""
        known = {node.outs[0]: node for node in self.nodes}
        given = iter(inputs)
        for node in self.family.program.graph.nodes:
            if node.op == "placeholder":
                self._stands[node] = self._one(next(given).value)
            elif node.op == "output":
                returned = [self._stands.get(result) for result in node.args[0]]
                return None if returned == [self._one(output.value) for output in outputs] else node
            elif node.op != "call_function":
                return node
            elif node.target in IDENTITY:
                source = node.args[0]
                for table in (self._stands, self._made):
                    if source in table:
                        table[node] = table[source]  # type: ignore[index]
            elif not self._reads(node, known):
                return node
        return None

    def _reads(self, node: fx.Node, known: Mapping[Value, Node]) -> bool:
        """Whether a call is the next one of its op."""
        made = node.meta.get("shardfx")
        planned = known.get(made.outs[0]) if isinstance(made, Node) and made.outs else None
        if planned is None:
            return False
        key, code = planned.outs[0], self._code(planned)
        place = self._next.get(key, 0)
        if place >= len(code.calls):
            return False
        call, given = code.calls[place], operands(planned)

        def is_(ref: Any, arg: Any) -> bool:
            if isinstance(arg, fx.Node):
                if isinstance(ref, Operand):
                    return self._stands.get(arg) is self._one(given[ref.index])
                return isinstance(ref, Made) and self._made.get(arg) == (key, ref.call)
            a, b = self._constant(code, ref), self._constant(None, arg)
            return type(a) is type(b) and (bool(a == b) or (a != a and b != b))

        if node.target is not call.target or not alike((call.args, call.kwargs), (node.args, node.kwargs), is_):
            return False
        self._next[key] = place + 1
        self._made[node] = key, place
        for ref, value in zip(code.results, planned.outs, strict=True):
            if isinstance(ref, Made) and ref.call == place:
                self._stands[node] = self._one(value)
                break
        self.calls += 1
        return True

    def numbers(self, code: Code | None, calls: Iterable[Call]) -> list[Any]:
        """Of calls in a code (None: in the program) the targets and constants of those that are not the same on all
        ranks."""
        found = []
        for call in calls:
            each = [self._constant(code, arg) for arg in leaves(call) if not isinstance(arg, (Operand, Made))]
            if any(isinstance(constant, tuple) for constant in each):
                found.append((call.target, each))
        return found

    def _constant(self, code: Code | None, arg: Any) -> Any:
        """A constant as it is on each rank, where it is not the same on all."""
        if not varies(arg):
            return arg
        together = self.family.together if code is None else code.family.together
        key = id(together), together.mark(arg) if isinstance(arg, Varying) else arg
        if key not in self._restricted:
            each = together.on_each(arg)
            assert each is not None
            places = [together.place[rank] for rank in self.family.ranks]
            found = tuple(each[place] for place in places)
            self._restricted[key] = found[0] if len(set(found)) == 1 else found
        return self._restricted[key]


def alike(a: Any, b: Any, same: Callable[[Any, Any], bool]) -> bool:
    """Whether two nests of arguments are the same, the leaves being so by ``same``."""
    if isinstance(a, (list, tuple)):
        return isinstance(b, (list, tuple)) and len(a) == len(b) and all(alike(x, y, same) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[k], b[k], same) for k in a)
    return same(a, b)



def same_numbers(family: Family, nodes: Sequence[Node], codes: Mapping[Value, Code]) -> bool:
    """Whether the calls of a program that are not the same on all ranks are those of its ops' codes, and all of them.

    The program is then one text in which each rank puts its own numbers, and these are proven.
    """
    reading = Reading(family, nodes, codes)
    wanted = {node.outs[0]: reading.numbers(code, code.calls) for node in nodes if (code := codes[node.outs[0]]).calls}
    found: dict[Value, list[Any]] = {}
    for node in family.program.graph.nodes:
        made = node.meta.get("shardfx")
        numbers = reading.numbers(None, [Call(node.target, node.args, node.kwargs)])
        if numbers and not (isinstance(made, Node) and made.outs):
            return False
        if numbers and isinstance(made, Node):
            found.setdefault(made.outs[0], []).extend(numbers)
    return found == {key: numbers for key, numbers in wanted.items() if numbers}
