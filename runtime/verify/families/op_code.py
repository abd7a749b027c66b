"""The code of one op in a rank's program, and the reading of a program as such code, op by op.

    %5 = comm.all_reduce(%4, axes=[tp])      c10d.all_reduce(operand 0, 'sum', group)
                                             c10d.wait_tensor(call 0)                     result 0

A program is *the planned graph in this code* if each of its calls is the next one of the code of the op that it comes
from, takes the nodes of the operands that the planned graph gives this op, and if it returns the nodes of the planned
outputs. Then what is proven of the code, op by op, and of the planned graph, is proven of the program. An op may be
recomputed, as what two loops need is: of the same operands it gives the same. Messages are sent and received once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardfx.ir.graph import Input, Node, Output, Value
from shardfx.ir.ops.pack import IDENTITY
from shardfx.runtime.verify.data_movement import MESSAGES

from .family import Family, varies
from .varying import Varying, leaves


@dataclass(frozen=True, slots=True)
class CodeOperand:
    """An operand of the op: each value once, in the order of the arguments."""

    index: int


@dataclass(frozen=True, slots=True)
class CodeResult:
    """What an earlier call of the same code gave."""

    call: int


@dataclass(frozen=True, slots=True)
class CodeCall:
    """One call, its tensors being :class:`CodeOperand` and :class:`CodeResult`."""

    target: Any
    args: Any
    kwargs: Any


@dataclass
class Code:
    """The calls that compute one op on the ranks of a family."""

    family: Family
    calls: list[CodeCall] = field(default_factory=list)
    results: list[CodeOperand | CodeResult | None] = field(default_factory=list)
    """The node of each result; None for one that is another stage's."""

    @property
    def once(self) -> bool:
        """Whether it must be run exactly once: another rank waits for each message."""
        return any(call.target in MESSAGES for call in self.calls)

    @staticmethod
    def of(family: Family, results: int) -> Code:
        """The code of an op with so many results that is alone in a program."""
        code, env = Code(family), dict[fx.Node, Any]()
        for node in family.program.graph.nodes:
            if node.op == "placeholder":
                env[node] = CodeOperand(len(env))
            elif node.op == "output":
                code.results = [env[result] for result in node.args[0]] or [None] * results
            elif node.target in IDENTITY:
                env[node] = env[node.args[0]]
            else:
                args, kwargs = (fx.map_arg(each, env.__getitem__) for each in (node.args, node.kwargs))
                env[node] = CodeResult(len(code.calls))
                code.calls.append(CodeCall(node.target, args, kwargs))
        return code


def operands(node: Node) -> list[Value]:
    """The operands of an op, each once."""
    return list(dict.fromkeys(node.operands))


@dataclass(slots=True, eq=False)
class _Op:
    """How far the code of a planned node has been read: how many calls, those of repetitions among them."""

    code: Code
    operands: list[Value]
    outs: list[Value]
    next: int = 0


class Reading:
    """The reading of a family's program. ``codes`` is the code of each planned node, by its first result."""

    def __init__(self, family: Family, nodes: Sequence[Node], codes: Mapping[Value, Code]) -> None:
        self.family = family
        self.calls = 0
        self._ops: dict[Value, _Op] = {}
        self._value_of: dict[fx.Node, Value] = {}
        self._made: dict[fx.Node, tuple[_Op, int]] = {}
        self._same: dict[Value, Value] = {}
        """Of values that are one on a rank, for their op has no call there: the first."""
        self._restricted: dict[tuple[int, Any], Any] = {}
        for node in nodes:
            outs = node.outs
            op = _Op(codes[outs[0]], [self._one(value) for value in operands(node)], outs)
            self._ops[outs[0]] = op
            first: dict[CodeOperand | CodeResult, Value] = {}
            for ref, value in zip(op.code.results, outs, strict=True):
                if isinstance(ref, CodeOperand):
                    self._same[value] = op.operands[ref.index]
                elif ref is not None and first.setdefault(ref, value) is not value:
                    self._same[value] = first[ref]

    def _one(self, value: Value) -> Value:
        return self._same.get(value, value)

    def first_other(self, inputs: Sequence[Input], outputs: Sequence[Output]) -> fx.Node | None:
        """The first node at which the program is not the planned graph in this code; None: it is."""
        given = iter(inputs)
        node: fx.Node
        for node in self.family.program.graph.nodes:
            if node.op == "placeholder":
                self._value_of[node] = next(given).value
            elif node.op == "output":
                results: Any = node.args[0]
                returned = [self._value_of.get(result) for result in results]
                done = all(op.next == len(op.code.calls) for op in self._ops.values() if op.code.once)
                return None if done and returned == [self._one(output.value) for output in outputs] else node
            elif node.op != "call_function":
                return node
            elif node.target in IDENTITY:
                source: Any = node.args[0]
                if source in self._value_of:
                    self._value_of[node] = self._value_of[source]
                if source in self._made:
                    self._made[node] = self._made[source]
            elif not self._reads(node):
                return node
        return None

    def _reads(self, node: fx.Node) -> bool:
        """Whether a call is the next one of its op, or the first of the same op once more."""
        made = node.meta.get("shardfx")
        op = self._ops.get(made.outs[0]) if isinstance(made, Node) and made.outs else None
        if op is None or not op.code.calls:
            return False
        place = op.next % len(op.code.calls)
        call = op.code.calls[place]
        if node.target is not call.target or not self._alike(op, call.args, node.args):
            return False
        if (call.kwargs or node.kwargs) and not self._alike(op, call.kwargs, node.kwargs):
            return False
        op.next += 1
        self._made[node] = op, place
        for ref, value in zip(op.code.results, op.outs, strict=True):
            if isinstance(ref, CodeResult) and ref.call == place:
                self._value_of[node] = self._one(value)
                break
        self.calls += 1
        return True

    def _alike(self, op: _Op, ref: Any, arg: Any) -> bool:
        """Whether an argument is what the code has there."""
        if isinstance(arg, fx.Node):
            if isinstance(ref, CodeOperand):
                return self._value_of.get(arg) is op.operands[ref.index]
            return isinstance(ref, CodeResult) and self._made.get(arg) == (op, ref.call)
        if isinstance(ref, (list, tuple)):
            if not isinstance(arg, (list, tuple)) or len(ref) != len(arg):
                return False
            for a, b in zip(ref, arg, strict=True):  # noqa: SIM110, the loop is where the time goes
                if not self._alike(op, a, b):
                    return False
            return True
        if isinstance(ref, dict):
            return (
                isinstance(arg, dict) and ref.keys() == arg.keys() and all(self._alike(op, ref[k], arg[k]) for k in ref)
            )
        a, b = self._constant(op.code, ref), self._constant(None, arg)
        return type(a) is type(b) and (bool(a == b) or (a != a and b != b))

    def numbers(self, code: Code | None, calls: Iterable[CodeCall]) -> list[Any]:
        """Of calls in a code (None: in the program) the targets and constants of those that are not the same on all
        ranks."""
        found = []
        for call in calls:
            each = [self._constant(code, arg) for arg in leaves(call) if not isinstance(arg, (CodeOperand, CodeResult))]
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


def same_numbers(family: Family, nodes: Sequence[Node], codes: Mapping[Value, Code]) -> bool:
    """Whether the calls of a program that differ by rank are those of its ops' codes, and all of them.

    The program is then one text with each rank's own numbers, and these are proven.
    """
    reading = Reading(family, nodes, codes)
    wanted = {node.outs[0]: reading.numbers(code, code.calls) for node in nodes if (code := codes[node.outs[0]]).calls}
    found: dict[Value, list[Any]] = {}
    for node in family.program.graph.nodes:
        made = node.meta.get("shardfx")
        numbers = reading.numbers(None, [CodeCall(node.target, node.args, node.kwargs)])
        if numbers and not (isinstance(made, Node) and made.outs):
            return False
        if numbers and isinstance(made, Node):
            found.setdefault(made.outs[0], []).extend(numbers)
    return found == {key: numbers for key, numbers in wanted.items() if numbers}
