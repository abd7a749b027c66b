"""Abstract interpretation of one rank's program: each node's value is a box of a term.

:class:`Rank` walks the program once, and stops at collectives, which need the other ranks
(:mod:`.collective_matching`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN
from shardfx.ir.graph import Input, Node, Output, OutputKind, op_name
from shardfx.ir.ops.pack import IDENTITY
from shardfx.ir.ops.traits import COPIES, NEUTRAL, is_neutral
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.data_movement import ATEN_MOVES, COLLECTIVES, MESSAGES, PACKING
from shardfx.runtime.verify.fault import Failed, Fault, first_line, place

from .calls import CallDeduction, Known, Proof
from .deduction import Fact
from .elements import Elements
from .numbering import Source, Wrong

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

MOVES: dict[Any, Callable[..., Any]] = {**ATEN_MOVES, **PACKING, operator.getitem: operator.getitem}

Asked = tuple[fx.Node, Elements | None, Sequence[int]]
"""A collective request: its node, its operand, and the sources of an empty one."""
Ask = Generator[Asked, Known, None]


class HasGraph(Protocol):
    """A program to interpret: a GraphModule, or its graph alone."""

    @property
    def graph(self) -> fx.Graph:
        """The nodes in program order."""


@dataclass(frozen=True)
class Written:
    """A program's graph; ``own`` are calls of one rank that replace some of its calls."""

    graph: fx.Graph
    own: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass
class Rank:
    """The abstract interpreter of one rank's program."""

    proof: Proof
    rank: int
    module: HasGraph
    inputs: Sequence[Input]
    changed: bool = False
    """Whether the program is a user's, not the plan's own."""
    asked: list[fx.Node] = field(default_factory=list)
    """The collectives so far."""
    items: dict[fx.Node, Known] = field(default_factory=dict)
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    result: fx.Node | None = None

    def __post_init__(self) -> None:
        self._calls = CallDeduction(self.proof, self.rank, self.facts, self.root)
        self._own = self.module.own if isinstance(self.module, Written) else {}

    def run(self) -> Ask:
        """Interpret the program; yields at collectives."""
        remaining = iter(self.inputs)
        for node in self.module.graph.nodes:
            self.proof.nodes += 1
            if node.op == "placeholder":
                self.items[node] = self._input(node, next(remaining, None))
            elif node.op == "output":
                self.result = node
            elif node.op == "call_function":
                call = self._own.get(node, node)
                if node.target in COLLECTIVES or node.target in MESSAGES:
                    self.proof.collectives += 1
                    if node.target in COLLECTIVES:
                        self.asked.append(call)
                    item = self.items[call.args[0]] if isinstance(call.args[0], fx.Node) else Known()
                    reply = yield call, self._codes(item), item.hints
                    known = Known(reply.facts, reply.codes, reply.hints, None, True, reply.why)
                else:
                    known = self._call(call)
                self.items[node] = self.items[call] = known
                if call is not node:
                    self.root[node] = self.root.get(call, call)
            else:
                raise Failed(self.fault(f"a {node.op} node is no part of a rank's program", node))

    def _input(self, node: fx.Node, inp: Input | None) -> Known:
        if inp is None:
            raise Failed(self.fault("the program has more inputs than the plan", node))
        assert inp.value.spec is not None
        return Known([Fact(self.proof.universe.of[inp.value], inp.value.spec)])

    def fault(self, what: str, node: fx.Node, output: str = "") -> Fault:
        """A fault at a node of this rank's program, with its line in the user's model."""
        made = node.meta.get("shardfx")
        return Fault(what, output, self.rank, node.name, place(made) if isinstance(made, Node) else "")

    # ---- the same program at another rank ---------------------------------------------------------------------

    def as_at(self, node: fx.Node, rank: int, moved: dict[Any, Elements]) -> Elements | None:
        """The value of a node where this program runs at another rank's coordinates; None: that cannot be said.

        ``moved`` keeps what calls give, for ranks that hold the same.
        """
        facts = self.facts(node)
        if facts:
            return self.proof.numbering.codes(facts[:1], rank)
        function = MOVES.get(node.target)
        if function is None:
            return None
        values = {n: self.as_at(n, rank, moved) for n in node.all_input_nodes}
        if None in values.values():
            return None
        call = self._own.get(node, node)
        key = call, *values.values()
        if key not in moved:
            args: Any = fx.map_arg(call.args, values.__getitem__)  # type: ignore[arg-type]
            moved[key] = function(*args, **call.kwargs)
        return moved[key]

    # ---- one call ---------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Known:
        target = node.target
        if target is c10d.wait_tensor.default:
            item = self.items[node.args[0]]  # type: ignore[index]
            return Known(item.facts, item.codes, item.hints, item.many, False, item.why)
        if isinstance(target, torch._ops.OpOverload) and "c10d" in target.namespace:
            raise Failed(self.fault(f"{op_name(target)} is a collective that no rule knows", node))
        if isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable:
            raise Failed(self.fault(f"{op_name(target)} changes a tensor in place", node))
        late = next((n for n in node.all_input_nodes if self.items[n].waits), None)
        if late is not None:
            return Known(why=f"{late.name} is used before it is waited for")
        if target is operator.getitem:
            return self._getitem(node)
        if target in IDENTITY:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            self.root[node] = self.root.get(source, source)
            return self.items[source]
        if target in PACKING:
            return self._move(node, PACKING[target])
        if not isinstance(target, torch._ops.OpOverload):
            raise Failed(self.fault(f"{target} is not known to be free of effects", node))
        item = self._calls.deduce(node)
        if item.why and target in ATEN_MOVES:
            moved = self._move(node, ATEN_MOVES[target])
            return item if moved.why else moved
        return self._given_back(node) if item.why and (target in COPIES or target in NEUTRAL) else item

    def _given_back(self, node: fx.Node) -> Known:
        """The abstract value of a call that the model does not have, but that gives its operand back."""
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return Known(why=f"the model computes no such {op_name(node.target)}")
        if node.target in COPIES:  # also between the calls that a rule writes for one op
            self.root[node] = self.root.get(source, source)
            return self.items[source]
        facts = self.facts(source)
        dtypes = {self.proof.universe.terms.types[fact.term].dtype for fact in facts}
        exact = any(not (dtype.is_floating_point or dtype.is_complex) for dtype in dtypes)  # integers: they may be cast
        if exact or not is_neutral(node.target, node.args, node.kwargs):
            return Known(why=f"the model computes no such {op_name(node.target)}")
        return self.items[source] if facts else Known(why=f"nothing is known of {source.name}")

    def _getitem(self, node: fx.Node) -> Known:
        source, index = node.args
        many = self.items[source].many  # type: ignore[index]
        if many is None or not isinstance(index, int) or not -len(many) <= index < len(many):
            return Known(why=self.items[source].why or f"there is no result {index}")  # type: ignore[index]
        return many[index]

    def facts(self, node: Any) -> list[Fact]:
        """The facts about a node's tensor."""
        item = self.items.get(node) if isinstance(node, fx.Node) else None
        if item is None or item.waits:
            return []
        if item.facts is None and item.codes is not None:
            item.facts = self.proof.numbering.read(item.codes, item.hints, self.rank)
        return item.facts or []

    def _codes(self, item: Known) -> Elements | None:
        if item.codes is None and item.facts and not item.waits:
            item.codes = self.proof.numbering.codes(item.facts, self.rank)
            item.hints = [self.proof.numbering.number(Source(f.term, f.spec.partial, f.origins) for f in item.facts)]
        return item.codes

    def _move(self, node: fx.Node, function: Any) -> Known:
        hints: list[int] = []
        lacking: list[str] = []

        def numbered(source: fx.Node) -> Any:
            codes = self._codes(self.items[source])
            if codes is None:
                lacking.append(source.name)
                return None
            hints.extend(h for h in self.items[source].hints if h not in hints)
            return codes

        args = fx.map_arg(node.args, numbered)
        kwargs = fx.map_arg(node.kwargs, numbered)
        if lacking:
            return Known(why=f"nothing is known of {lacking[0]}")
        try:
            made = function(*args, **kwargs)
        except (Wrong, *DOES_NOT_RUN) as error:
            return Known(why=f"this cannot be done: {first_line(error)}")
        if isinstance(made, (list, tuple)):
            return Known(many=[Known(codes=m, hints=hints) for m in made])
        return Known(codes=made, hints=hints)

    # ---- the end ----------------------------------------------------------------------------------------------

    def outputs(self, outputs: Sequence[Output]) -> None:
        """Check the program's results against the outputs."""
        assert self.result is not None
        returned = self.result.args[0]
        if not isinstance(returned, (tuple, list)) or len(returned) != len(outputs):
            raise Failed(self.fault(f"the program returns {returned}, not {len(outputs)} values", self.result))
        for output, node in zip(outputs, returned, strict=True):
            name = f"{output.kind.value} {output.name}"
            if not isinstance(node, fx.Node):
                raise Failed(self.fault(f"the program returns {node!r}", self.result, name))
            facts = self.facts(node)
            wanted = self.proof.universe.outputs[output.kind, output.name]
            spec = self._spec(output)
            if any(f.term == wanted and self._fits(f.spec, spec, output) for f in facts):
                continue
            if not facts:
                at = self._first_unknown(node)
                raise Failed(self.fault(self.items[at].why or "this is no box of any value of the model", at, name))
            same_term = [f for f in facts if f.term == wanted]
            shape = output.value.shape
            if same_term:
                what = f"this is the part {same_term[0].spec.text(shape)}, where {spec.text(shape)} is expected"
            else:
                names, where = self.proof.universe.terms.names, self.proof.universe.terms.where
                actual = facts[0].term
                what = f"this is another value of the model: a {names[actual]} at {where[actual]}"
            raise Failed(self.fault(what, node, name))

    def _spec(self, output: Output) -> Spec:
        """The required placement of an output: its input's for a gradient or buffer; replicated for a loss or guard."""
        if output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER):
            stored = next((g.value.spec for g in self.proof.after.inputs if g.name == output.name), None)
            if stored is not None:
                return stored
        spec = output.value.spec
        assert spec is not None
        return Spec.replicated(output.value.type.ndim) if output.kind.leaves_replicated else spec

    def _fits(self, actual: Spec, wanted: Spec, output: Output) -> bool:
        if actual.partial or actual == wanted:
            return actual == wanted
        return self._same_box(output, actual, wanted, self.rank)

    def _same_box(self, output: Output, actual: Spec, wanted: Spec, rank: int) -> bool:
        box = self.proof.numbering.box
        return box(output.value.shape, actual, rank).equals(box(output.value.shape, wanted, rank))

    def promised(self, outputs: Sequence[Output], ranks: Sequence[int]) -> None:
        """Check on some ranks that the planned placement of each output is the required one.

        Raises:
            Failed: it is another box.
        """
        assert self.result is not None
        for output in outputs:
            spec, wanted = output.value.spec, self._spec(output)
            assert spec is not None
            other = spec.partial != wanted.partial or not all(self._same_box(output, spec, wanted, r) for r in ranks)
            if spec != wanted and other:
                shape = output.value.shape
                what = f"this is the part {spec.text(shape)}, where {wanted.text(shape)} is expected"
                raise Failed(self.fault(what, self.result, f"{output.kind.value} {output.name}"))

    def _first_unknown(self, node: fx.Node) -> fx.Node:
        """The first node, in program order, behind ``node`` that has no facts though all its operands have."""
        behind, front = {node}, [node]
        while front:
            for each in front.pop().all_input_nodes:
                if each not in behind and not self.facts(each):
                    behind.add(each)
                    front.append(each)
        order = {n: i for i, n in enumerate(self.module.graph.nodes)}
        return min((n for n in behind if self.items[n].many is None), key=order.__getitem__, default=node)
