"""Pins (how somebody wants a node to be sharded): checked against the op's rule, and followed.

A pinned factor is sharded as it says, whatever the operands hold; its axes are no other factor's. An op that cannot be
sharded so as it is, is decomposed, and the pin goes to the part that has these factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shardfx.ir.dim_sharding import DimSharding, smallest
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Pin, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text


def pinned(node: Node) -> dict[str, DimSharding]:
    """The sharding of the factors that are pinned, replicated ones too."""
    return {factor: DimSharding(axes) for pin in _pins(node) if not pin.op for factor, axes in pin.shardings}


def needs_decomposition(node: Node, rule: ShardingRule) -> bool:
    """Whether a pin asks for something that only parts of the op can do."""
    return any(pin.op or any(axes and f in rule.whole for f, axes in pin.shardings) for pin in _pins(node))


def _pins(node: Node) -> Iterable[Pin]:
    return node.pin.each() if node.pin is not None else ()


def check_names(pin: Pin, mesh: Mesh, where: str) -> None:
    """Raise if a pin names a factor or an axis twice, or an axis that is none of the mesh.

    Raises:
        Error: naming it.
    """
    where, got = f"hint {pin.by!r}; {where}", factors_text(pin.shardings)
    axes = [axis for _, axes in pin.shardings for axis in axes]
    for kind, names in (("factor", [factor for factor, _ in pin.shardings]), ("axis", axes)):
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise Error(f"a hint names {kind} {twice!r} twice", where=where, expected=f"each {kind} once", got=got)
    for axis in axes:
        if axis not in mesh.names:
            raise Error(f"mesh axis {axis!r} is unknown", where=where, expected=f"axes of {mesh!r}", got=got)


def check_pin(node: Node, rule: ShardingRule, mesh: Mesh, decomposes: bool = False) -> None:
    """Raise if a node cannot be sharded as it is pinned. ``decomposes``: the op may still be decomposed.

    Raises:
        Error: there is no such factor, axis or shard; the factor must be replicated. It prints the op's rule.
    """
    said = f"{op_name(node.op)}: {rule_text(rule)}"
    for pin in _pins(node):
        if pin.op:
            continue
        check_names(pin, mesh, str(node.where))
        for factor, axes in pin.shardings:
            what, expected, got = "", said, factors_text(((factor, axes),))
            if factor not in rule.sizes:
                what, expected = f"the op has no factor {factor!r}", f"a factor of {said}"
            elif axes and factor in rule.whole and not decomposes:
                what, expected = f"the op needs its factor {factor!r} whole", f"{said} (! is whole)"
            elif axes and factor in rule.windows:
                leader = rule.windows[factor].leader
                what = f"the op needs of its factor {factor!r} what the chunks of {leader!r} are made of"
                expected = f"a sharding of {leader!r}: {said}"
            elif axes and smallest(rule.sizes[factor], axes, mesh) == 0:
                what = f"some ranks would get nothing of the factor {factor!r}"
                expected = f"at most {rule.sizes[factor]} shards, each with something in it; {said}"
                got = f"{got}, which is {mesh.extent(axes)} shards"
            if what:
                raise Error(what, where=f"hint {pin.by!r}; {node.where}", expected=expected, got=got)


def join_pins(pin: Pin, node: Node) -> Pin:
    """A pin and what was said of a node before, of its other parts.

    Raises:
        Error: something else was said of the same.
    """
    for other in _pins(node):
        if other.op == pin.op and other.shardings != pin.shardings:
            raise _disagree(other, pin, pin.op or op_name(node.op), node)
    for other in reversed([each for each in _pins(node) if each.op != pin.op]):
        pin = replace(pin, also=replace(other, also=pin.also))
    return pin


def _disagree(one: Pin, two: Pin, op: str, node: Node) -> Error:
    return Error(
        f"two hints disagree on {op}",
        where=f"hints {one.by!r} and {two.by!r}; {node.where}",
        expected="one strategy for each op",
        got=f"{factors_text(one.shardings)} and {factors_text(two.shardings)}",
        remedy="make the patterns narrower",
    )


def pin_parts(pin: Pin, node: Node, parts: Iterable[Node], rules: Mapping[Node, ShardingRule], mesh: Mesh) -> None:
    """Pin the parts of a decomposed node of which the pin is said: first those that it names.

    Raises:
        Error: no part can be sharded so.
    """
    made = list(parts)
    for said in sorted(pin.each(), key=lambda each: not each.op):
        named = [each for each in made if not said.op or op_name(each.op) == said.op]
        fitting = [each for each in named if _fits(said, rules[each])]
        for each in fitting:
            each.pin = _merged(replace(said, op=""), each)
            check_pin(each, rules[each], mesh)
        if not fitting:
            texts = dict.fromkeys(f"{op_name(each.op)}: {rule_text(rules[each])}" for each in named or made)
            what, where = f"{op_name(node.op)} cannot be sharded so", f"hint {said.by!r}; {node.where}"
            expected, got = f"factors of {'; '.join(texts)} (! is whole)", factors_text(said.shardings)
            raise Error(what, where=where, expected=expected, got=got)


def _merged(pin: Pin, node: Node) -> Pin:
    """What is said of a whole op, beside what is said of this part of it.

    Raises:
        Error: it shards a factor otherwise.
    """
    if node.pin is None:
        return pin
    known = dict(node.pin.shardings)
    if any(known.get(factor, axes) != axes for factor, axes in pin.shardings):
        raise _disagree(node.pin, pin, op_name(node.op), node)
    return replace(
        node.pin, shardings=(*node.pin.shardings, *((f, axes) for f, axes in pin.shardings if f not in known))
    )


def _fits(pin: Pin, rule: ShardingRule) -> bool:
    barred = rule.whole | rule.windows.keys()
    return all(factor in rule.sizes and not (axes and factor in barred) for factor, axes in pin.shardings)
