"""Hints on ops, written onto the nodes that they name as pins.

A hint names a module, and behind a colon perhaps an op; without one it is said of the module's products (of all its ops
where it has none). It gives axes to factors of the op's rule, in the words of the IR; factors that it leaves out are
free, and ``m{}`` is replicated. Or it gives one spec for each operand of the op, which settles all their factors; where
an op adds something to a product, those of the product's operands will do.

    before   %3 = aten.mm(%1, %2)                       hints: "fc1": "n{tp}", or ("-, -", "-, tp")
    after    %3 = aten.mm(%1, %2)  pinned "fc1" n{tp}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from shardfx.ir.dim_sharding import DimSharding, project
from shardfx.ir.errors import Error
from shardfx.ir.graph import FactorAxes, Graph, Node, Phase, Pin, factors_text, op_name
from shardfx.ir.names import pattern
from shardfx.ir.ops.traits import is_heavy, is_own
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text
from shardfx.ir.rules.strategy import wished
from shardfx.ir.spec import Spec
from shardfx.passes.base import Context

from .decompose import Decomposer
from .pins import check_names, check_pin, join_pins

WHERE = "Hints(strategies=...)"
FACTOR = re.compile(r"\s*([^\s{}]+)\s*\{([^{}]*)\}")
FORMS = "text such as 'n{tp} m{}', or a spec for each operand"


def pin_nodes(graph: Graph, context: Context) -> bool:
    """Write ``context.strategies`` onto the nodes that they name; says whether there were any.

    Raises:
        Error: a hint names nothing, says nothing that can be read, asks what the op's rule forbids, or two disagree.
    """
    decomposer = Decomposer(context.rules)
    for text, given in context.strategies.items():
        if not isinstance(given, (str, list, tuple)):
            where, got = f"{WHERE}: {text!r}", repr(given)
            raise Error("a hint on an op is of no known form", where=where, expected=FORMS, got=got)
        for node, op in _named(graph, text, given, context, decomposer):
            pin = Pin(_factors(given, node, op, graph, context, text), text, op)
            check_names(pin, graph.mesh, str(node.where))
            node.pin = join_pins(pin, node)
            if not op:
                check_pin(node, context.cache.rule(node), graph.mesh, decomposes=decomposer.can(node))
    return bool(context.strategies)


def _named(graph: Graph, text: str, given: Any, context: Context, decomposer: Decomposer) -> Iterator[tuple[Node, str]]:
    """The nodes that a hint names, and the op where that is a part of the node's."""
    path, op = (part.strip() for part in text.partition(":")[::2])
    matches = pattern(path).fullmatch
    forward = [node for node in graph.nodes if node.phase is Phase.FORWARD and not is_own(node)]
    inside = [node for node in forward if matches(node.where.module)]
    if not op:
        heavy = [node for node in inside if is_heavy(node)]
        found = [(node, "") for node in heavy or inside if _speaks_of(given, context.cache.rule(node))]
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
    near = [] if inside else difflib.get_close_matches(path, paths, 3, 0.5)
    said = "; ".join(f"{name}: {rule}" for name, rule in rules.items()) or "the modules that call an op"
    remedy = f"did you mean {' or '.join(map(repr, near))}?" if near else "print(sx.api.trace(...)) has all ops"
    if any(op in names_of(node.op) and matches(node.where.module) for node in graph.nodes):
        remedy = "hint the op of the forward: those of its backward follow it"
    lacks = _lacks(given, [context.cache.rule(node) for node in inside]) if inside and not op else ""
    expected = f"{'factors' if lacks else 'module.path:aten.op'}, of one of {said}"
    what, got = f"hint {text!r} names no op{lacks}", f"{text!r}: {given!r}"
    raise Error(what, where=WHERE, expected=expected, got=got, remedy=remedy)


def _lacks(given: Any, rules: Sequence[ShardingRule]) -> str:
    """What none of a module's ops has of what a hint says."""
    if not isinstance(given, str):
        return f" with {len(given)} operands"
    factors = [factor for factor, _ in FACTOR.findall(given)]
    unknown = [factor for factor in factors if not any(factor in rule.sizes for rule in rules)]
    if unknown:
        return f" with a factor {' or '.join(map(repr, unknown))}"
    return f" with the factors {' and '.join(map(repr, factors))} together"


def names_of(op: Any) -> set[str]:
    """By which names a hint may call an op: ``aten.add.Tensor``, ``aten.add``, ``add``."""
    parts = op_name(op).split(".")
    return {".".join(parts), ".".join(parts[:2]), ".".join(parts[1:2])}


def _speaks_of(given: Any, rule: ShardingRule) -> bool:
    """Whether what a hint says can be said of an op: it has these factors, or so many operands."""
    if isinstance(given, str):
        return all(factor in rule.sizes for factor, _ in FACTOR.findall(given))
    return _tensors(rule, len(given)) is not None


def _tensors(rule: ShardingRule, count: int) -> list[int] | None:
    """The operands that a hint of ``count`` specs is said of: all, or those between which the op sums."""
    if count == len(rule.operands):
        return list(range(count))
    kept = frozenset[str]().union(*rule.result_factors)
    summed = [i for i, dims in enumerate(rule.operands) if any(f not in kept for dim in dims for f in dim)]
    return summed if count == len(summed) else None


def _factors(given: Any, node: Node, op: str, graph: Graph, context: Context, text: str) -> FactorAxes:
    """What a hint says of a node, as axes of factors."""
    if isinstance(given, str):
        return parse_factors(given, f"{WHERE}: {text!r}")
    rule = context.cache.rule(node)
    tensors = _tensors(rule, len(given)) if not op else None
    if tensors is None:
        where, expected = f"{WHERE}: {text!r}; {node.where}", f"{FORMS}, of {op_name(node.op)}: {rule_text(rule)}"
        raise Error("a hint on an op is of no known form", where=where, expected=expected, got=repr(given))
    found: dict[str, tuple[str, ...]] = {}
    for number, each in zip(tensors, given, strict=True):
        where = f"{WHERE}: {text!r}; operand {number} of {op_name(node.op)}; {node.where}"
        for factor, axes in _factors_of_spec(each, number, node, rule, graph, where):
            if found.setdefault(factor, axes) != axes:
                what, expected = (
                    f"two operands shard the factor {factor!r} differently",
                    f"one way for {rule_text(rule)}",
                )
                got = " and ".join(factors_text(((factor, each),)) for each in (found[factor], axes))
                raise Error(what, where=where, expected=expected, got=got)
    return tuple(found.items())


def parse_factors(text: str, where: str) -> FactorAxes:
    """``n{dp tp} m{}`` as axes by factor; commas between axes will do too.

    Raises:
        Error: the text is no such list.
    """
    rest = FACTOR.sub("", text).strip()
    found = tuple((factor, tuple(axes.replace(",", " ").split())) for factor, axes in FACTOR.findall(text))
    if rest or not found:
        raise Error("a hint on an op cannot be read", where=where, expected="text such as 'n{tp} m{}'", got=repr(text))
    return found


def _factors_of_spec(
    given: Any, number: int, node: Node, rule: ShardingRule, graph: Graph, where: str
) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The axes of the factors of an operand, from how it is to be placed."""
    value = node.operands[number]
    spec = given if isinstance(given, Spec) else Spec.parse(str(given), graph.mesh, value.type.ndim, where=where)
    for d, dim in enumerate(rule.operands[number]):
        shardings = project(spec.dims[d], value.shape[d], rule.dim_sizes(dim), graph.mesh)
        if shardings is None or any(sharding != DimSharding(sharding.axes) for sharding in shardings):
            what, expected = (
                "a placement cannot be said in the factors of the op's rule",
                f"{' '.join(dim)} sharded in ",
            )
            raise Error(what, where=where, expected=expected + rule_text(rule), got=str(given))
        for each, given_sharding in zip(dim, shardings, strict=True):
            factor, sharding = wished(rule, each, given_sharding)
            yield factor, sharding.axes
