"""Matching of a rank program's calls with ops of the model, of which each is this rank's version by the rules.

A rule writes one call for an op, or several, of which the last has the op's result. What follows from a call is known
by what is known of the tensors that go in (:class:`.deduction.Fact`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Graph, Node, Output, op_name
from shardfx.ir.ops.alike import argument_key
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.memory_ops import no_share
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.local import gives_list, may_lack
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.fault import Fault

from .deduction import Deduction, ExpectedCall, Fact, OperandSlot, same
from .elements import Elements
from .numbering import Numbering
from .terms import Universe, same_function

aten = torch.ops.aten

OF_NOTHING = {aten.new_full.default, no_share}
"""The ops that rules write for a rank with an empty shard of a sharded factor."""
REACH = 24
"""The longest path of a rule's own calls from the result back to the operands."""
MOST_CHOICES = 64
"""The most candidate choices of an op's operands that are tried."""
Results = list[list["Fact | None"]]
"""Facts of each result of a call, in each way in which they follow."""


@dataclass
class Known:
    """The abstract value of a node on one rank: facts, numbered elements, several results, or why nothing is known."""

    facts: list[Fact] | None = None
    codes: Elements | None = None
    hints: Sequence[int] = ()
    many: list[Known] | None = None
    waits: bool = False
    why: str = ""


@dataclass
class Proof:
    """One verification: the terms, the rules, the element numbers; shared by all ranks."""

    after: Graph
    universe: Universe
    deduction: Deduction
    numbering: Numbering
    drawn: dict[int, Spec] = field(default_factory=dict)
    """The placement for which each random mask is drawn."""
    deduced: dict[Hashable, Known] = field(default_factory=dict)
    """A cache of deductions by call: one call stands in several programs of a rank."""
    nodes: int = 0
    collectives: int = 0

    @classmethod
    def begin(
        cls,
        before: Graph,
        after: Graph,
        book: RuleBook,
        outputs: Sequence[Output],
        counts: MutableMapping[str, int],
        *,
        decomposed: bool = False,
    ) -> Proof | Fault:
        """A proof, begun with that the planned graph is the same function of the inputs as the captured one; or the
        fault that it is not. ``counts`` is told how much was compared. With every op ``decomposed``, programs may have
        the calls of decompositions, too."""
        found = same_function(before, after, book, outputs, decomposed=decomposed)
        if isinstance(found, Fault):
            return found
        counts.update({"terms": len(found.terms.types), "decompositions": found.decompositions})
        if found.trusted:
            counts["decompositions too large to compare"] = found.trusted
        return cls.of(after, found, book)

    @classmethod
    def of(cls, after: Graph, universe: Universe, book: RuleBook) -> Proof:
        """A proof with the terms of a planned graph."""
        return cls(after, universe, Deduction(universe, book, after.mesh), Numbering(universe, after.mesh))


@dataclass
class CallDeduction:
    """The abstract transfer function of one rank's calls. ``facts`` has the abstract value of a node's tensor."""

    proof: Proof
    rank: int
    facts: Callable[[Any], list[Fact]]
    root: dict[fx.Node, fx.Node]
    """The node that an identity node is the same tensor as."""
    taken: Counter[Node] = field(default_factory=Counter)
    """The number of calls matched with each op, of those that match several."""

    def deduce(self, node: fx.Node) -> Known:
        """The facts of a call's results, from the rules."""
        operands = _tensors(node)
        direct = [self.facts(n) for n in operands]
        key = self._key(node, direct)
        if key in self.proof.deduced:
            return self.proof.deduced[key]
        found: Results = []
        if all(direct):
            found, why = self._of_operands(node, operands, direct)
        else:
            why = f"nothing is known of {next(n for n, f in zip(operands, direct, strict=True) if not f).name}"
        of_operands = bool(found)
        if not found and node.target in OF_NOTHING:
            found = self._of_nothing(node)
        if not found:
            found, other = self._by_rule(node)
            why = other or why
        if not found:
            return Known(why=why or self._no_such(node, direct))
        of_count = [result for result in found if len(result) == len(found[0])]
        many = [Known(list(dict.fromkeys(filter(None, facts)))) for facts in zip(*of_count, strict=True)]
        known = many[0] if len(many) == 1 and not gives_list(node.target) else Known(many=many)
        if of_operands:
            self.proof.deduced[key] = known
        return known

    def _key(self, node: fx.Node, facts: Sequence[list[Fact]]) -> Hashable:
        """A cache key, equal for calls in one rank's programs with equal deductions: what is known of their operands,
        and which of these are one tensor."""
        places: dict[fx.Node, int] = {}

        def slot(operand: fx.Node) -> Hashable:
            return fx.Node, places.setdefault(self.root.get(operand, operand), len(places))

        args = [argument_key(arg, slot, fx.Node) for arg in (node.args, *node.kwargs.items())]
        return self.rank, node.target, tuple(args), tuple(map(tuple, facts))

    def _of_operands(
        self, node: fx.Node, operands: Sequence[fx.Node], direct: Sequence[list[Fact]]
    ) -> tuple[Results, str]:
        """The results that follow from the operands, for the planned nodes that have such operands; or why none do."""
        found, why, by_term = Results(), "", [_by_term(facts) for facts in direct]
        for first in by_term[0] if by_term else (None,):
            for terms, maker in self.proof.universe.makers.get((node.target, first), ()):
                if len(terms) != len(by_term) or not all(map(operator.contains, by_term, terms)):
                    continue
                for facts in itertools.product(*map(operator.getitem, by_term, terms)):
                    made, other = self._try(node, maker, operands, facts)
                    found += made
                    why = why or other
        return found, why

    def _try(
        self, node: fx.Node, maker: Node, operands: Sequence[fx.Node], facts: Sequence[Fact]
    ) -> tuple[Results, str]:
        """Match the call with this rank's version of ``maker``; returns the results, or why it does not match."""
        deduction = self.proof.deduction
        if [f.term for f in facts] != [self.proof.universe.of[v] for v in maker.operands]:
            operands, facts = operands[::-1], facts[::-1]
        strategies = deduction.strategies(maker, tuple(f.spec for f in facts))
        found, why = Results(), ""
        if not strategies:
            specs = ", ".join(f.spec.text(v.shape) for f, v in zip(facts, maker.operands, strict=True))
            why = f"{op_name(maker.op)} cannot be computed from {specs}: its rule knows no such sharding"
        for made in strategies:
            expected = deduction.expected_calls(maker, made, self.rank)
            if any(same(form, node, self.root, operands) for each in expected for form in (each, _swapped(each))):
                drawn = self.proof.drawn.setdefault(maker.args[3], made.results[0]) if maker.op is dropout else None
                if drawn not in (None, made.results[0]):
                    return [], f"this mask was drawn elsewhere for {drawn}: other boxes are other random numbers"
                found.append(deduction.results(maker, made, facts))
            else:
                result = made.results[0].text(maker.outs[0].shape)
                why = f"this is not what rank {self.rank} does of {op_name(maker.op)} : {result}"
        return found, "" if found else why

    def _by_rule(self, node: fx.Node) -> tuple[Results, str]:
        """The results of ops whose rule writes several calls: ``node`` is the last of them.

        A call may be what this rank does of several ops (``arange(0, 4)`` is a part of many ranges): those come first
        that no earlier call was taken for. Of one op all that is found is true, as where this rank's rows are those of
        two shardings.
        """
        cone, best = self._cone(node), ""
        all_found: list[tuple[int, Node, Results]] = []
        for terms, maker in self.proof.universe.written:
            if not terms <= cone.keys():
                continue
            wanted: list[Sequence[tuple[fx.Node, Fact]]] = [cone[self.proof.universe.of[v]] for v in maker.operands]
            if math.prod(map(len, wanted)) > MOST_CHOICES:
                wanted = _likely_first(wanted, maker, _tensors(node))
            for chosen in itertools.islice(itertools.product(*wanted), MOST_CHOICES):
                found, why = self._try(node, maker, [n for n, _ in chosen], [f for _, f in chosen])
                if found:
                    all_found.append((self.taken[maker], maker, found))
                elif maker.op is node.target:
                    best = why
        all_found.sort(key=lambda each: each[0])
        if all_found:
            self.taken[all_found[0][1]] += 1
        return [made for _, _, found in all_found for made in found], best

    @cached_property
    def _lacking(self) -> list[Node]:
        """The nodes of which some rank may have an empty shard of a sharded factor."""
        return [node for node in self.proof.after.nodes if may_lack(node, self.proof.deduction.mesh)]

    def _of_nothing(self, node: fx.Node) -> Results:
        """The results of a call that a rule writes for a rank with an empty shard of a sharded factor: independent of
        the facts of the operands, of which one is in the call for its device. Where these are shares of sums, so is the
        result: then they are looked for among all that is known so far."""
        deduction, found = self.proof.deduction, Results()
        before = list(itertools.takewhile(lambda each: each is not node, node.graph.nodes))
        for maker in self._lacking:
            made = maker.strategy
            assert made is not None
            own = {axis for _, axes in made.shardings for axis in axes}
            if any(axis not in own for spec in made.results for axis in spec.partial_axes):
                terms = [self.proof.universe.of[value] for value in maker.operands]
                wanted = [[(n, fact) for n in before for fact in self.facts(n) if fact.term == term] for term in terms]
                for chosen in itertools.islice(itertools.product(*wanted), MOST_CHOICES):
                    found += self._try(node, maker, [n for n, _ in chosen], [fact for _, fact in chosen])[0]
                continue
            like = node.all_input_nodes[:1] * len(maker.operands)
            if any(same(each, node, self.root, like) for each in deduction.expected_calls(maker, made, self.rank)):
                found.append(deduction.results(maker, made, ()))
        return found

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
            own = each.meta.get("shardfx") is node.meta.get("shardfx")  # which may be some rows of an operand
            if depth < REACH and (own or not facts):
                front += [(n, depth + 1) for n in each.all_input_nodes]
        return found

    def _no_such(self, node: fx.Node, direct: Sequence[Sequence[Fact]]) -> str:
        names = self.proof.universe.terms.names
        return f"the model computes no {op_name(node.target)} of ({', '.join(names[f[0].term] for f in direct)})"


def _likely_first(
    wanted: Sequence[Sequence[tuple[fx.Node, Fact]]], maker: Node, operands: Sequence[fx.Node]
) -> list[Sequence[tuple[fx.Node, Fact]]]:
    """The candidates of each operand in the order of trial: placed as planned, and an operand there, first."""
    planned = maker.strategy.operands if maker.strategy is not None else ()

    def unlikely(place: int, each: tuple[fx.Node, Fact]) -> tuple[bool, bool]:
        return each[1].spec not in planned[place : place + 1], each[0] not in operands[place : place + 1]

    return [sorted(choices, key=lambda each: unlikely(place, each)) for place, choices in enumerate(wanted)]


def _by_term(facts: Iterable[Fact]) -> dict[int, list[Fact]]:
    found: dict[int, list[Fact]] = {}
    for fact in facts:
        found.setdefault(fact.term, []).append(fact)
    return found


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, in the order of the op's schema, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), found.append)
    return found


def _swapped(expected: Any) -> Any:
    """An add of two tensors with its operands swapped; anything else as it is."""
    plain = isinstance(expected, ExpectedCall) and expected.op is aten.add.Tensor and not expected.kwargs
    if plain and len(expected.args) == 2 and all(isinstance(each, OperandSlot) for each in expected.args):
        return ExpectedCall(expected.op, expected.args[::-1], expected.kwargs)
    return expected
