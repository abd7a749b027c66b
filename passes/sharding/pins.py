"""What a pin (how somebody wants a node to be sharded) means to propagation: checked against the op's rule, and
followed.

A pinned factor is sharded as it says, whatever the operands hold; its axes are no other factor's. An op that cannot be
sharded so as it is, is taken apart, and the pin goes to the part that has these factors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from shardfx.ir.dim_sharding import DimSharding, smallest
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Pin, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text


def pinned(node: Node) -> dict[str, DimSharding]:
    """The shardings of the factors that are pinned, whole ones too."""
    said = [pin for pin in node.pin.each() if not pin.op] if node.pin is not None else []
    return {factor: DimSharding(axes) for pin in said for factor, axes in pin.shardings}


def must_part(node: Node, rule: ShardingRule) -> bool:
    """Whether a pin asks for something that the op can do only in parts."""
    said = node.pin.each() if node.pin is not None else ()
    return any(pin.op or any(axes and f in rule.whole for f, axes in pin.shardings) for pin in said)


def check_names(pin: Pin, mesh: Mesh, where: str) -> None:
    """Raise if a pin names a factor or an axis twice, or an axis that is none of ranks.

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


def check_pin(node: Node, rule: ShardingRule, mesh: Mesh, may_part: bool = False) -> None:
    """Raise if a node cannot be sharded as it is pinned. ``may_part``: the op may still be taken apart.

    Raises:
        Error: there is no such factor, axis or piece; the factor must stay whole. It prints the op's rule.
    """
    assert node.pin is not None
    for pin in node.pin.each():
        if not pin.op:
            _check(pin, node, rule, mesh, may_part)


def _check(pin: Pin, node: Node, rule: ShardingRule, mesh: Mesh, may_part: bool) -> None:
    check_names(pin, mesh, str(node.where))
    where = f"hint {pin.by!r}; {node.where}"
    said = f"{op_name(node.op)}: {rule_text(rule)}"
    for factor, axes in pin.shardings:
        got = factors_text(((factor, axes),))
        if factor not in rule.sizes:
            raise Error(f"the op has no factor {factor!r}", where=where, expected=f"a factor of {said}", got=got)
        if axes and factor in rule.whole and not may_part:
            raise Error(
                f"the op needs its factor {factor!r} whole", where=where, expected=f"{said} (! is whole)", got=got
            )
        if axes and factor in rule.windows:
            leader = rule.windows[factor].leader
            raise Error(
                f"the op needs of its factor {factor!r} what the chunks of {leader!r} are made of",
                where=where,
                expected=f"a sharding of {leader!r}: {said}",
                got=got,
            )
        if axes and smallest(rule.sizes[factor], axes, mesh) == 0:
            raise Error(
                f"some ranks would get nothing of the factor {factor!r}",
                where=where,
                expected=f"at most {rule.sizes[factor]} pieces, each with something in it; {said}",
                got=f"{got}, which is {mesh.extent(axes)} pieces",
            )


def join(pin: Pin, node: Node) -> Pin:
    """A pin and what was said of a node before, of its other parts.

    Raises:
        Error: something else was said of the same.
    """
    said = node.pin.each() if node.pin is not None else ()
    for other in said:
        if other.op == pin.op and other.shardings != pin.shardings:
            raise _disagree(other, pin, pin.op or op_name(node.op), node)
    for other in reversed([each for each in said if each.op != pin.op]):
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


def hand_over(pin: Pin, node: Node, parts: Iterable[Node], rules: Mapping[Node, ShardingRule], mesh: Mesh) -> None:
    """Pin the parts of a node that was taken apart of which the pin is said: first those that it names.

    Raises:
        Error: no part can be sharded so.
    """
    made = list(parts)
    for each in sorted(pin.each(), key=lambda each: not each.op):
        _hand_over(each, node, made, rules, mesh)


def _hand_over(pin: Pin, node: Node, made: list[Node], rules: Mapping[Node, ShardingRule], mesh: Mesh) -> None:
    named = [each for each in made if not pin.op or op_name(each.op) == pin.op]
    fitting = [each for each in named if _fits(pin, rules[each])]
    for each in fitting:
        each.pin = _merged(replace(pin, op=""), each)
        check_pin(each, rules[each], mesh)
    if not fitting:
        raise Error(
            f"{op_name(node.op)} cannot be sharded so",
            where=f"hint {pin.by!r}; {node.where}",
            expected=f"factors of {_rules(named or made, rules)} (! is whole)",
            got=factors_text(pin.shardings),
        )


def _merged(pin: Pin, node: Node) -> Pin:
    """What is said of a whole op, beside what is said of this part of it.

    Raises:
        Error: it shards a factor otherwise.
    """
    if node.pin is None:
        return pin
    known = dict(node.pin.shardings)
    for factor, axes in pin.shardings:
        if known.get(factor, axes) != axes:
            raise _disagree(node.pin, pin, op_name(node.op), node)
    return replace(
        node.pin, shardings=(*node.pin.shardings, *((f, axes) for f, axes in pin.shardings if f not in known))
    )


def _fits(pin: Pin, rule: ShardingRule) -> bool:
    barred = rule.whole | rule.windows.keys()
    return all(factor in rule.sizes and not (axes and factor in barred) for factor, axes in pin.shardings)


def _rules(nodes: Sequence[Node], rules: Mapping[Node, ShardingRule]) -> str:
    return "; ".join(dict.fromkeys(f"{op_name(node.op)}: {rule_text(rules[node])}" for node in nodes))
