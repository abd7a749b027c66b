"""Hints on ops, written onto the nodes that they name as pins.

A hint names a module, and behind a colon perhaps an op; without one it is said of the module's products (of all its ops
where it has none). It gives axes to factors of the op's rule, in the words of the IR; factors that it leaves out are
free, and ``m{}`` is replicated.

    before   %3 = aten.mm(%1, %2)                       hints: "fc1": "n{tp}"
    after    %3 = aten.mm(%1, %2)  pinned "fc1" n{tp}
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import FactorAxes, Graph, Node, Phase, Pin, factors_text, op_name
from shardfx.ir.names import pattern
from shardfx.ir.ops.traits import is_heavy, is_own
from shardfx.ir.rules.sharding_rule import rule_text
from shardfx.passes.base import PassContext

from .decompose import Decomposer
from .pins import check_names, check_pin

WHERE = "Hints(strategies=...)"
FACTOR = re.compile(r"\s*([^\s{}]+)\s*\{([^{}]*)\}")


def pin_nodes(graph: Graph, context: PassContext) -> bool:
    """Write ``context.strategies`` onto the nodes that they name, as pins; returns whether there were any.

    Raises:
        Error: a hint names nothing, says nothing that can be read, asks what the op's rule forbids, or two disagree.
    """
    decomposer = Decomposer(context.rules)
    for text, hint in context.strategies.items():
        said = parse_factors(hint, f"{WHERE}: {text!r}")
        for node, op in _named(graph, text, said, context, decomposer):
            pin = Pin(said, text, op)
            check_names(pin, graph.mesh, str(node.where))
            if node.pin is not None and (node.pin.op, node.pin.shardings) != (op, said):
                raise Error(
                    f"two hints disagree on {op or op_name(node.op)}",
                    where=f"hints {node.pin.by!r} and {text!r}; {node.where}",
                    expected="one strategy for each op",
                    got=f"{factors_text(node.pin.shardings)} and {factors_text(said)}",
                    remedy="make the patterns narrower; of an op that is decomposed, hint one part",
                )
            node.pin = pin
            if not op:
                check_pin(node, context.cache.rule(node), graph.mesh, decomposes=decomposer.can(node))
    return bool(context.strategies)


def _named(
    graph: Graph, text: str, said: FactorAxes, context: PassContext, decomposer: Decomposer
) -> Iterator[tuple[Node, str]]:
    """The nodes that a hint names, and the op where it is a part of the node's."""
    path, op = (part.strip() for part in text.partition(":")[::2])
    matches = pattern(path).fullmatch
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD and not is_own(node)]
    inside = [node for node in forward if matches(node.where.module)]
    if not op:
        heavy = [node for node in inside if is_heavy(node)]
        found = [(n, "") for n in heavy or inside if all(f in context.cache.rule(n).sizes for f, _ in said)]
    else:
        found = [(node, "") for node in inside if op in names_of(node.op)]
        if not found:
            split = [node for node in inside if decomposer.can(node)]
            parts = [(node, part) for node in split for part in decomposer.parts(node) if op in names_of(part)]
            found = [(node, op_name(part)) for node, part in parts]
    if found:
        yield from found
        return
    rules = {op_name(n.op): rule_text(context.cache.rule(n)) for n in sorted(inside, key=is_heavy, reverse=True)}
    paths = dict.fromkeys(node.where.module for node in forward if node.where.module)
    known = "; ".join(f"{name}: {rule}" for name, rule in rules.items()) or "the modules that call an op"
    remedy = did_you_mean(path, [] if inside else paths, "print(sx.api.trace(...)) has all ops", count=3)
    if any(op in names_of(node.op) and matches(node.where.module) for node in graph.nodes):
        remedy = "hint the op of the forward: those of its backward follow it"
    lacks = f" with {' and '.join(factor for factor, _ in said)} among its factors" if inside and not op else ""
    expected = f"{'factors' if lacks else 'module.path:aten.op'}, of one of {known}"
    what, got = f"hint {text!r} names no op{lacks}", f"{text!r}: {factors_text(said)!r}"
    raise Error(what, where=WHERE, expected=expected, got=got, remedy=remedy)


def names_of(op: Any) -> set[str]:
    """The names of an op in hints: ``aten.add.Tensor``, ``aten.add``, ``add``."""
    parts = op_name(op).split(".")
    return {".".join(parts), ".".join(parts[:2]), ".".join(parts[1:2])}


def parse_factors(text: object, where: str) -> FactorAxes:
    """Parse ``n{dp tp} m{}`` to axes by factor; commas between axes will do too.

    Raises:
        Error: it is no such text.
    """
    text = text if isinstance(text, str) else repr(text)
    rest = FACTOR.sub("", text).strip()
    found = tuple((factor, tuple(axes.replace(",", " ").split())) for factor, axes in FACTOR.findall(text))
    if rest or not found:
        raise Error("a hint on an op cannot be read", where=where, expected="text such as 'n{tp} m{}'", got=repr(text))
    return found
