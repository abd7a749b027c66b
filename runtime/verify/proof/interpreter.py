"""The abstract interpretation of one rank's program: which box of which term does every node hold?

:class:`Rank` walks the program once and stops at collectives, which need the other ranks (see :mod:`.static`).
"""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import fx

from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, op_name
from shardfx.ir.ops import pack
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.rules.local import gives_list
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.fault import Failed, Fault, place

from .deduction import Deduction, ExpectedCall, Fact, same, written
from .elements import Elements
from .numbering import ALSO, COLLECTIVES, MOVERS, Numbering, Source
from .terms import Universe

aten = torch.ops.aten
c10d = torch.ops._c10d_functional

IDENTITY = {aten.contiguous.default, pack.dense_last}
MOVES: dict[Any, Callable[..., Any]] = {**ALSO, **MOVERS, operator.getitem: operator.getitem}
MOST_FACTS = 8
DEPTH = 8
"""How far a rule's own calls may reach from the result back to the operands."""


@dataclass
class Known:
    """What is known of one fx node on one rank: facts, numbered elements, several results, or why nothing is."""

    facts: list[Fact] | None = None
    codes: Elements | None = None
    hints: Sequence[int] = ()
    many: list[Known] | None = None
    waits: bool = False
    why: str = ""


Asked = tuple[fx.Node, Elements | None, Sequence[int]]
"""A collective, the tensor that goes in, and the sources of an empty one."""
Ask = Generator[Asked, Known, None]


class HasGraph(Protocol):
    """What there is to interpret: a GraphModule, or its graph alone."""

    @property
    def graph(self) -> fx.Graph: ...


@dataclass
class Proof:
    """One verification: the terms, the rules, the element numbers; shared by all ranks."""

    after: Graph
    universe: Universe
    deduction: Deduction
    numbering: Numbering
    drawn: dict[int, Spec] = field(default_factory=dict)
    """The placement for which each random mask is drawn."""
    nodes: int = 0
    collectives: int = 0


@dataclass
class Rank:
    """The interpretation of one rank's program."""

    proof: Proof
    rank: int
    module: HasGraph
    inputs: Sequence[Input]
    changed: bool = False
    """The program is not the plan's own."""
    asked: list[fx.Node] = field(default_factory=list)
    """The collectives so far."""
    items: dict[fx.Node, Known] = field(default_factory=dict)
    root: dict[fx.Node, fx.Node] = field(default_factory=dict)
    taken: Counter[Node] = field(default_factory=Counter)
    """How many calls were taken for an op, of those that could be several."""
    result: fx.Node | None = None

    def run(self) -> Ask:
        """Interpret the program; yields at collectives."""
        given = iter(self.inputs)
        for node in self.module.graph.nodes:
            self.proof.nodes += 1
            if node.op == "placeholder":
                self.items[node] = self._input(node, next(given, None))
            elif node.op == "output":
                self.result = node
            elif node.op == "call_function" and node.target in COLLECTIVES:
                self.proof.collectives += 1
                self.asked.append(node)
                item = self.items[node.args[0]]
                reply = yield node, self._codes(item), item.hints
                self.items[node] = Known(reply.facts, reply.codes, reply.hints, None, True, reply.why)
            elif node.op == "call_function":
                self.items[node] = self._call(node)
            else:
                raise Failed(self.fault(f"a {node.op} node is no part of a rank's program", node))

    def _input(self, node: fx.Node, given: Input | None) -> Known:
        if given is None:
            raise Failed(self.fault("the program has more inputs than the plan", node))
        assert given.value.spec is not None
        return Known([Fact(self.proof.universe.of[given.value], given.value.spec)])

    def fault(self, what: str, node: fx.Node, output: str = "") -> Fault:
        made = node.meta.get("shardfx")
        return Fault(what, output, self.rank, node.name, place(made) if isinstance(made, Node) else "")

    # ---- the same program at another rank ---------------------------------------------------------------------

    def as_at(self, node: fx.Node, rank: int) -> Elements | None:
        """What a node holds where this program runs at another rank's coordinates; None: that cannot be said."""
        facts = self.facts(node)
        if facts:
            return self.proof.numbering.codes(facts[0], rank)
        if node.op != "call_function" or node.target is c10d.wait_tensor.default or node.target in COLLECTIVES:
            return None
        given = {n: self.as_at(n, rank) for n in node.all_input_nodes}
        if None in given.values():
            return None
        function = MOVES.get(node.target)
        if function is None:
            return None
        args: Any = fx.map_arg(node.args, given.__getitem__)  # type: ignore[arg-type]
        made: Elements = function(*args, **node.kwargs)
        return made

    # ---- one call ---------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Known:
        target = node.target
        if target is c10d.wait_tensor.default:
            item = self.items[node.args[0]]  # type: ignore[index]
            return Known(item.facts, item.codes, item.hints, item.many, False, item.why)
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
        if target in MOVERS:
            return self._move(node, MOVERS[target])
        if not isinstance(target, torch._ops.OpOverload):
            raise Failed(self.fault(f"{target} is not known to be free of effects", node))
        item = self._deduce(node)
        if item.why and target in ALSO:
            moved = self._move(node, ALSO[target])
            return item if moved.why else moved
        return item

    def _getitem(self, node: fx.Node) -> Known:
        source, index = node.args
        many = self.items[source].many  # type: ignore[index]
        if many is None or not isinstance(index, int) or not -len(many) <= index < len(many):
            return Known(why=self.items[source].why or f"there is no result {index}")  # type: ignore[index]
        return many[index]

    def facts(self, node: Any) -> list[Fact]:
        """What is known of a node's tensor."""
        item = self.items.get(node) if isinstance(node, fx.Node) else None
        if item is None or item.waits:
            return []
        if item.facts is None and item.codes is not None:
            item.facts = self.proof.numbering.read(item.codes, item.hints, self.rank)
        return item.facts or []

    def _codes(self, item: Known) -> Elements | None:
        if item.codes is None and item.facts and not item.waits:
            item.codes = self.proof.numbering.codes(item.facts[0], self.rank)
            fact = item.facts[0]
            item.hints = [self.proof.numbering.number(Source(fact.term, fact.spec.partial, fact.origins))]
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
        except (RuntimeError, IndexError, TypeError, ValueError) as error:
            return Known(why=f"this cannot be done: {str(error).splitlines()[0]}")
        if isinstance(made, (list, tuple)):
            return Known(many=[Known(codes=m, hints=hints) for m in made])
        return Known(codes=made, hints=hints)

    def _deduce(self, node: fx.Node) -> Known:
        """The facts of a call's results, from the rules."""
        operands = [n for n in _tensors(node) if n is not None]
        best = ""
        direct = [self.facts(n) for n in operands]
        found: list[list[Fact | None]] = []
        if all(direct):
            for facts in itertools.product(*direct):
                key = (node.target, tuple(f.term for f in facts))
                for maker in self._makers(key):
                    made, why = self._try(node, maker, operands, facts)
                    found += made
                    best = best or why
        else:
            unknown = next(n for n, f in zip(operands, direct, strict=True) if not f)
            best = f"nothing is known of {unknown.name}"
        if not found:
            made, why = self._by_rule(node)
            found, best = made, why or best
        if not found:
            return Known(why=best or self._no_such(node, direct))
        count = len(found[0])
        many = [
            Known(list(dict.fromkeys(f for r in found if len(r) == count and (f := r[i])))[:MOST_FACTS])
            for i in range(count)
        ]
        return many[0] if count == 1 and not gives_list(node.target) else Known(many=many)

    def _makers(self, key: tuple[Any, tuple[int, ...]]) -> Sequence[Node]:
        makers = self.proof.universe.makers
        found = makers.get(key, ())
        if not found and key[0] is aten.add.Tensor and len(key[1]) == 2:
            found = makers.get((key[0], key[1][::-1]), ())
        return found

    def _try(
        self, node: fx.Node, maker: Node, operands: Sequence[fx.Node], facts: Sequence[Fact]
    ) -> tuple[list[list[Fact | None]], str]:
        """Whether the call is this rank's version of ``maker``; what follows, or why it is not."""
        deduction = self.proof.deduction
        if [f.term for f in facts] != [self.proof.universe.of[v] for v in maker.operands]:
            operands, facts = operands[::-1], facts[::-1]
        ways = deduction.strategies(maker, tuple(f.spec for f in facts))
        found, why = [], ""
        if not ways:
            held = ", ".join(f.spec.text(v.shape) for f, v in zip(facts, maker.operands, strict=True))
            why = f"{op_name(maker.op)} cannot be computed from {held}: its rule knows no such cut"
        for made in ways:
            forms = written(maker, made, operands, deduction.mesh, self.rank, deduction.book)
            if any(same(form, node, self.root) or same(_swapped(form), node, self.root) for form in forms):
                drawn = self.proof.drawn.setdefault(maker.args[3], made.results[0]) if maker.op is dropout else None
                if drawn not in (None, made.results[0]):
                    return [], f"this mask was drawn elsewhere for {drawn}: other boxes are other random numbers"
                found.append(deduction.results(maker, made, facts))
            else:
                why = (
                    f"this is not what rank {self.rank} does of {op_name(maker.op)} : "
                    f"{made.results[0].text(maker.outs[0].shape)}"
                )
        return found, "" if found else why

    def _by_rule(self, node: fx.Node) -> tuple[list[list[Fact | None]], str]:
        """The same, for ops whose rule writes several calls: ``node`` is the last of them.

        A call may be what this rank does of several ops (``arange(0, 4)`` is a part of many ranges): those come
        first that no earlier call was taken for.
        """
        cone = self._cone(node)
        best = ""
        all_found: list[tuple[int, Node, list[list[Fact | None]]]] = []
        for terms, maker in self.proof.universe.written:
            if not terms <= cone.keys():
                continue
            wanted = [cone[self.proof.universe.of[v]] for v in maker.operands]
            for chosen in itertools.islice(itertools.product(*wanted), 64):
                found, why = self._try(node, maker, [n for n, _ in chosen], [f for _, f in chosen])
                if found:
                    all_found.append((self.taken[maker], maker, found))
                    break
                if maker.op is node.target:
                    best = why
        all_found.sort(key=lambda each: each[0])
        if all_found:
            self.taken[all_found[0][1]] += 1
        return [made for _, _, found in all_found for made in found], best

    def _cone(self, node: fx.Node) -> dict[int, list[tuple[fx.Node, Fact]]]:
        """The known tensors behind a node, by their terms."""
        found: dict[int, list[tuple[fx.Node, Fact]]] = {}
        seen: set[fx.Node] = set()
        front = [(n, 1) for n in node.all_input_nodes]
        while front:
            each, depth = front.pop()
            if each in seen:
                continue
            seen.add(each)
            facts = self.facts(each)
            for fact in facts:
                found.setdefault(fact.term, []).append((each, fact))
            if depth < DEPTH and not facts:
                front += [(n, depth + 1) for n in each.all_input_nodes]
        return found

    def _no_such(self, node: fx.Node, direct: Sequence[Sequence[Fact]]) -> str:
        names = self.proof.universe.terms.names
        target = node.target
        return f"the model computes no {op_name(target)} of ({', '.join(names[f[0].term] for f in direct)})"

    # ---- the end ----------------------------------------------------------------------------------------------

    def outputs(self, outputs: Sequence[Output]) -> None:
        """Check what the program returns."""
        assert self.result is not None
        given = self.result.args[0]
        if not isinstance(given, (tuple, list)) or len(given) != len(outputs):
            raise Failed(self.fault(f"the program returns {given}, not {len(outputs)} values", self.result))
        for output, node in zip(outputs, given, strict=True):
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
                held = facts[0].term
                what = f"this is another value of the model: a {names[held]} at {where[held]}"
            raise Failed(self.fault(what, node, name))

    def _spec(self, output: Output) -> Spec:
        """The placement that an output must have: a gradient or buffer that of its input, a loss whole."""
        if output.kind in (OutputKind.GRADIENT, OutputKind.BUFFER):
            stored = next((g.value.spec for g in self.proof.after.inputs if g.name == output.name), None)
            if stored is not None:
                return stored
        spec = output.value.spec
        assert spec is not None
        return Spec.whole(output.value.type.ndim) if output.kind is OutputKind.LOSS else spec

    def _fits(self, held: Spec, wanted: Spec, output: Output) -> bool:
        if held.partial or held == wanted:
            return held == wanted
        box = self.proof.numbering.box
        return box(output.value.shape, held, self.rank).equals(box(output.value.shape, wanted, self.rank))

    def _first_unknown(self, node: fx.Node) -> fx.Node:
        """The first node, in program order, behind ``node`` of which nothing is known though all its operands are."""
        behind, front = {node}, [node]
        while front:
            for each in front.pop().all_input_nodes:
                if each not in behind and not self.facts(each):
                    behind.add(each)
                    front.append(each)
        order = {n: i for i, n in enumerate(self.module.graph.nodes)}
        return min((n for n in behind if self.items[n].many is None), key=order.__getitem__, default=node)


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, in the order of the op's schema, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def _swapped(expected: Any) -> Any:
    """An add of two tensors with its operands the other way round; anything else as it is."""
    plain = isinstance(expected, ExpectedCall) and expected.op is aten.add.Tensor and not expected.kwargs
    if plain and len(expected.args) == 2 and all(isinstance(a, fx.Node) for a in expected.args):
        return ExpectedCall(expected.op, expected.args[::-1], expected.kwargs)
    return expected
