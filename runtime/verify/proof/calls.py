"""The calls of one rank's program: which op of the model is each this rank's version of, by the rules of ops?

A rule writes one call for an op, or several, of which the last has the op's result. What follows from a call is known
by what is known of the tensors that go in (:class:`.Fact`).
"""

from __future__ import annotations

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Node, op_name
from shardfx.ir.ops.computing.no_share import no_share
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.rules.local import gives_list
from shardfx.ir.rules.of_nothing import may_lack

from .deduction import ExpectedCall, Fact, Place, nesting, same
from .known import Known, Proof

aten = torch.ops.aten

OF_NOTHING = {aten.new_full.default, no_share}
"""What rules write for a rank that has nothing of a factor that is shared."""
REACH = 8
"""How far a rule's own calls may reach from the result back to the operands, where the plan's do not reach as far."""
MOST_CHOICES = 64
"""Of what may be an op's operands so many choices are tried."""


@dataclass
class Calls:
    """What follows from the calls of one rank's program. ``facts`` says what is known of a node's tensor."""

    proof: Proof
    rank: int
    facts: Callable[[Any], list[Fact]]
    root: dict[fx.Node, fx.Node]
    """For a node that changes nothing the one that it is the same tensor as."""
    taken: Counter[Node] = field(default_factory=Counter)
    """How many calls were taken for an op, of those that could be several."""

    def deduce(self, node: fx.Node) -> Known:
        """The facts of a call's results, from the rules."""
        operands = [n for n in _tensors(node) if n is not None]
        best = ""
        direct = [self.facts(n) for n in operands]
        key = self._key(node, operands, direct)
        if key in self.proof.deduced:
            return self.proof.deduced[key]
        found: list[list[Fact | None]] = []
        if all(direct):
            for facts, makers in self._of_terms(node.target, direct):
                for maker in makers:
                    made, why = self._try(node, maker, operands, facts)
                    found += made
                    best = best or why
        else:
            unknown = next(n for n, f in zip(operands, direct, strict=True) if not f)
            best = f"nothing is known of {unknown.name}"
        of_operands = bool(found)
        if not found and node.target in OF_NOTHING:
            found = self._of_nothing(node)
        for behind in (False, True) if not found else ():
            made, why = self._by_rule(node, behind)
            found, best = made, why or best
            if found:
                break
        if not found:
            return Known(why=best or self._no_such(node, direct))
        count = len(found[0])
        of_count = [result for result in found if len(result) == count]
        many = [Known(list(dict.fromkeys(f for result in of_count if (f := result[i])))) for i in range(count)]
        known = many[0] if count == 1 and not gives_list(node.target) else Known(many=many)
        if of_operands:
            self.proof.deduced[key] = known
        return known

    def _key(self, node: fx.Node, operands: Sequence[fx.Node], facts: Sequence[list[Fact]]) -> Hashable:
        """Equal for calls of programs of one rank from which the same follows: what is known of their operands, and
        which of these are one tensor."""
        places: dict[fx.Node, int] = {}
        args = fx.map_arg(
            (node.args, node.kwargs), lambda n: _Place(places.setdefault(self.root.get(n, n), len(places)))
        )
        return self.rank, node.target, repr(args), tuple(map(tuple, facts))

    def _of_terms(self, op: Any, direct: Sequence[list[Fact]]) -> Iterator[tuple[tuple[Fact, ...], Sequence[Node]]]:
        """What may be known of the operands together, and the nodes of the plan that have such operands.

        Of what is made of nothing much may be known (``full([4], 1)`` is a part of many tensors): then it is the nodes
        that say what is asked.
        """
        by_term = [_by_term(facts) for facts in direct]
        tuples: Iterable[tuple[int, ...]] = itertools.product(*by_term)
        if math.prod(map(len, by_term)) > len(self.proof.universe.makers):
            asked = [terms for its_op, terms in self.proof.universe.makers if its_op is op]
            both = dict.fromkeys(each for terms in asked for each in (terms, terms[::-1]))
            tuples = (t for t in both if len(t) == len(by_term) and all(map(operator.contains, by_term, t)))
        for terms in tuples:
            if makers := self._makers((op, terms)):
                for facts in itertools.product(*map(operator.getitem, by_term, terms)):
                    yield facts, makers

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
            why = f"{op_name(maker.op)} cannot be computed from {held}: its rule knows no such sharding"
        for made in ways:
            forms = deduction.forms(maker, made, self.rank)
            if any(
                same(form, node, self.root, operands) or same(_swapped(form), node, self.root, operands)
                for form in forms
            ):
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

    def _by_rule(self, node: fx.Node, behind: bool) -> tuple[list[list[Fact | None]], str]:
        """The same, for ops whose rule writes several calls: ``node`` is the last of them. ``behind``: what another
        one of them gives may be something of the model, too.

        A call may be what this rank does of several ops (``arange(0, 4)`` is a part of many ranges): those come
        first that no earlier call was taken for.
        """
        cone = self._cone(node, behind)
        best = ""
        all_found: list[tuple[int, Node, list[list[Fact | None]]]] = []
        for terms, maker in self.proof.universe.written:
            if not terms <= cone.keys():
                continue
            wanted: list[Sequence[tuple[fx.Node, Fact]]] = [cone[self.proof.universe.of[v]] for v in maker.operands]
            if math.prod(map(len, wanted)) > MOST_CHOICES:
                wanted = _likely_first(wanted, maker, _tensors(node))
            for chosen in itertools.islice(itertools.product(*wanted), MOST_CHOICES):
                found, why = self._try(node, maker, [n for n, _ in chosen], [f for _, f in chosen])
                if found:  # and so by what else is true of the operands: this rank's rows may be those of two shardings
                    all_found.append((self.taken[maker], maker, found))
                elif maker.op is node.target:
                    best = why
        all_found.sort(key=lambda each: each[0])
        if all_found:
            self.taken[all_found[0][1]] += 1
        return [made for _, _, found in all_found for made in found], best

    @cached_property
    def _lacking(self) -> list[Node]:
        """The nodes of which some rank may have nothing of a factor that is shared."""
        return [node for node in self.proof.after.nodes if may_lack(node, self.proof.deduction.mesh)]

    def _of_nothing(self, node: fx.Node) -> list[list[Fact | None]]:
        """What a call gives that a rule writes where this rank has nothing of what is shared: whatever it holds of the
        operands, of which one stands in the call for its device. Where these are shares of sums, so is the result: then
        they are looked for among all that is known so far."""
        deduction, found = self.proof.deduction, list[list[Fact | None]]()
        for maker in self._lacking:
            made = maker.strategy
            assert made is not None
            own = {axis for _, axes in made.shardings for axis in axes}
            if any(axis not in own for spec in made.results for axis in spec.partial_axes):
                wanted = [self._known(node, self.proof.universe.of[value]) for value in maker.operands]
                for chosen in itertools.islice(itertools.product(*wanted), MOST_CHOICES):
                    found += self._try(node, maker, [n for n, _ in chosen], [fact for _, fact in chosen])[0]
                continue
            like = node.all_input_nodes[:1] * len(maker.operands)
            if any(same(form, node, self.root, like) for form in deduction.forms(maker, made, self.rank)):
                found.append(deduction.results(maker, made, ()))
        return found

    def _known(self, node: fx.Node, term: int) -> list[tuple[fx.Node, Fact]]:
        """The tensors before a call that are known to be a rank's part of a term."""
        before = itertools.takewhile(lambda each: each is not node, node.graph.nodes)
        return [(each, fact) for each in before for fact in self.facts(each) if fact.term == term]

    def _cone(self, node: fx.Node, behind: bool) -> dict[int, list[tuple[fx.Node, Fact]]]:
        """The known tensors behind a node, by their terms; also those ``behind`` known ones."""
        found: dict[int, list[tuple[fx.Node, Fact]]] = {}
        reach = self._reach()
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
            if depth < reach and (behind or not facts):
                front += [(n, depth + 1) for n in each.all_input_nodes]
        return found

    def _reach(self) -> int:
        """The most calls that stand one behind the other in what the rules write for the plan's ops on this rank."""
        known, deduction = self.proof.reach, self.proof.deduction
        if self.rank not in known:
            makers = (maker for _, maker in self.proof.universe.written)
            forms = (form for m in makers if m.strategy for form in deduction.forms(m, m.strategy, self.rank))
            known[self.rank] = max(map(nesting, forms), default=0)
        return max(REACH, known[self.rank])

    def _no_such(self, node: fx.Node, direct: Sequence[Sequence[Fact]]) -> str:
        names = self.proof.universe.terms.names
        target = node.target
        return f"the model computes no {op_name(target)} of ({', '.join(names[f[0].term] for f in direct)})"


def _likely_first(
    wanted: Sequence[Sequence[tuple[fx.Node, Fact]]], maker: Node, given: Sequence[fx.Node]
) -> list[Sequence[tuple[fx.Node, Fact]]]:
    """What may be each operand, in the order in which it is tried: placed as planned, given at that place, first."""
    planned = maker.strategy.operands if maker.strategy is not None else ()

    def unlikely(place: int, each: tuple[fx.Node, Fact]) -> tuple[bool, bool]:
        return each[1].spec not in planned[place : place + 1], each[0] not in given[place : place + 1]

    return [sorted(choices, key=lambda each: unlikely(place, each)) for place, choices in enumerate(wanted)]


def _by_term(facts: Iterable[Fact]) -> dict[int, list[Fact]]:
    found: dict[int, list[Fact]] = {}
    for fact in facts:
        found.setdefault(fact.term, []).append(fact)
    return found


class _Place(int):
    """An operand among the arguments, not to be taken for a number."""

    def __repr__(self) -> str:
        return f"%{int(self)}"


def _tensors(node: fx.Node) -> list[fx.Node]:
    """The tensors among a call's arguments, in the order of the op's schema, each as often as it stands there."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda n: found.append(n))
    return found


def _swapped(expected: Any) -> Any:
    """An add of two tensors with its operands the other way round; anything else as it is."""
    plain = isinstance(expected, ExpectedCall) and expected.op is aten.add.Tensor and not expected.kwargs
    if plain and len(expected.args) == 2 and all(isinstance(a, Place) for a in expected.args):
        return ExpectedCall(expected.op, expected.args[::-1], expected.kwargs)
    return expected
