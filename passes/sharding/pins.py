"""Pins (strategies that the user fixed): checked against the op's rule, and followed.

A pinned factor is sharded as it says, whatever the operands hold; its axes are no other factor's. An op that cannot be
sharded so as it is, is decomposed, and the pin goes to the part that has these factors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardfx.ir.dim_sharding import DimSharding, smallest
from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Pin, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text


def pinned(node: Node) -> dict[str, DimSharding]:
    """The pinned shardings of factors, replicated ones too."""
    if node.pin is None or node.pin.op:
        return {}
    return {factor: DimSharding(axes) for factor, axes in node.pin.shardings}


def needs_decomposition(node: Node, rule: ShardingRule) -> bool:
    """Whether a pin can only be satisfied by parts of the op."""
    pin = node.pin
    return pin is not None and (bool(pin.op) or any(axes and f in rule.replicated for f, axes in pin.shardings))


def check_names(pin: Pin, mesh: Mesh, where: str) -> None:
    """Raise if a pin names a factor or an axis twice, or an unknown axis.

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
    """Raise if a node's pin cannot be satisfied. ``decomposes``: the op may still be decomposed.

    Raises:
        Error: there is no such factor, axis or shard; the factor must be replicated. It prints the op's rule.
    """
    pin, said = node.pin, f"{op_name(node.op)}: {rule_text(rule)}"
    if pin is None or pin.op:
        return
    check_names(pin, mesh, str(node.where))
    for factor, axes in pin.shardings:
        what, expected, got = "", said, factors_text(((factor, axes),))
        if factor not in rule.sizes:
            what, expected = f"the op has no factor {factor!r}", f"a factor of {said}"
        elif axes and factor in rule.replicated and not decomposes:
            what, expected = f"the op needs its factor {factor!r} replicated", f"{said} (! is replicated)"
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


def pin_parts(pin: Pin, node: Node, parts: Sequence[Node], rules: Mapping[Node, ShardingRule], mesh: Mesh) -> None:
    """Pin those parts of a decomposed node that the pin is about.

    Raises:
        Error: no part can be sharded so.
    """
    named = [each for each in parts if not pin.op or op_name(each.op) == pin.op]
    fitting = [each for each in named if _fits(pin, rules[each])]
    for each in fitting:
        each.pin = replace(pin, op="")
        check_pin(each, rules[each], mesh)
    if not fitting:
        texts = dict.fromkeys(f"{op_name(each.op)}: {rule_text(rules[each])}" for each in named or parts)
        what, where = f"{op_name(node.op)} cannot be sharded so", f"hint {pin.by!r}; {node.where}"
        expected, got = f"factors of {'; '.join(texts)} (! is replicated)", factors_text(pin.shardings)
        raise Error(what, where=where, expected=expected, got=got)


def _fits(pin: Pin, rule: ShardingRule) -> bool:
    barred = rule.replicated | rule.windows.keys()
    return all(factor in rule.sizes and not (axes and factor in barred) for factor, axes in pin.shardings)
