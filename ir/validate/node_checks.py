"""Checks of one node: types, keywords, placements; and their error messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

import torch

from shardfx.ir.builder import infer
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, Strategy, Value, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp, carried
from shardfx.ir.ops.traits import storage_offset
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_shardings, partial_operands, passes_partial, strategy
from shardfx.ir.spec import TensorType
from shardfx.ir.text.printer import Printer

DEVICES = ("meta", "cpu")
"""Fake devices for type checks: a result type may match on either; the second is tried if the first differs."""


@dataclass(frozen=True)
class Complaint:
    """Raises validation errors about ``graph``; ``after`` names the pass that has just run.

    Text is written only then, so that a right graph costs nothing.
    """

    graph: Graph
    after: str | None

    def name(self, value: Value) -> str:
        """The name of a value in the graph's text."""
        return Printer(self.graph).use(value)

    def fail(self, what: str, place: Node | Input | Output, expected: object, got: object) -> NoReturn:
        """Raise an error at ``place``, the wrong line."""
        printer = Printer(self.graph)
        if isinstance(place, Node):
            where = printer.node(place)
        elif isinstance(place, Input):
            where = printer.input(place)
        else:
            maker = place.value.node
            made = f", made by {printer.node(maker)}" if maker is not None and maker in self.graph.nodes else ""
            where = f"output {place.kind.value} {place.name}{made}"
        raise Error(
            f"the graph is wrong{f' after pass {self.after!r}' if self.after else ''}: {what}",
            where=where,
            expected=expected,
            got=got,
            remedy=f"pass {self.after!r} left it so: mend it there" if self.after else None,
        )


def check_types(node: Node, wrong: Complaint) -> None:
    """Run the op on fake tensors and compare the number, shapes and dtypes of its results.

    A result that the graph leaves out may be one that the op gives. Ops that are not torch's, and those that cannot be
    run so, are taken as they stand.
    """
    if not isinstance(node.op, torch._ops.OpOverload):
        return
    if (offset := storage_offset(node.op, node.args, node.kwargs)) is not None:
        what = f"{op_name(node.op)} has a storage offset, which is no property of a value"
        wrong.fail(what, node, "storage_offset None, of a slice where the view starts later", offset)
    actual = [None if value is None else value.type for value in node.results]
    opinions: list[str | list[TensorType | None]] = []
    for device in DEVICES:
        try:
            found = infer(node.op, node.args, node.kwargs, device)
        except NotImplementedError:
            return
        except Exception as error:
            opinions.append(f"{type(error).__name__}: {error}".splitlines()[0])
            continue
        made = found if isinstance(found, list) else [found]
        if len(made) == len(actual) and all(a is None or a == b for a, b in zip(actual, made, strict=True)):
            return
        opinions.append([*made])
    _refuse(node, actual, opinions[0], wrong)


def _refuse(
    node: Node, types: list[TensorType | None], made: str | list[TensorType | None], wrong: Complaint
) -> NoReturn:
    """Raise an error for differing results; ``made`` is what the op returns, or why it fails."""
    name = op_name(node.op)
    if isinstance(made, str):
        wrong.fail(f"{name} does not take these arguments", node, str(node.op._schema), made)
    if len(made) != len(types):
        what = f"{name} has another number of results"
        wrong.fail(what, node, f"{len(made)}", f"{len(types)} results")
    index = next(i for i, (a, b) in enumerate(zip(types, made, strict=True)) if a is not None and a != b)
    what = f"result {index} is not what {name} gives"
    wrong.fail(what, node, _text(made[index]), _text(types[index]))


def _text(type: TensorType | None) -> str:
    return "no tensor" if type is None else f"{list(type.shape)} of {type.dtype}"


def check_comm(node: Node, op: OwnOp, operands: list[Value], mesh: Mesh, wrong: Complaint) -> None:
    """Check a comm node: its keywords are the op's, its axes the mesh's, and operand k becomes result k."""
    _keywords(node, op, mesh, wrong)
    results = node.outs
    if len(results) != len(operands) or not operands:
        got = f"{len(operands)} operands, {len(results)} results"
        wrong.fail(f"{op} does not have a result for each operand", node, "as many", got)
    for value, result in carried(node):
        if value.type != result.type:
            what = f"{op} changes the type of {wrong.name(value)}"
            wrong.fail(what, node, value.type, result.type)
        if value.spec is None or result.spec is None:
            continue
        try:
            made = op.place(value.spec, value.shape, mesh, **node.kwargs)
        except Error as error:
            what = f"{op} cannot start from {wrong.name(value)}"
            wrong.fail(what, node, error.expected, error.got)
        if made != result.spec:
            what = f"{op} does not lead to {wrong.name(result)}"
            wrong.fail(what, node, made.text(value.shape), result.spec.text(result.shape))


def _keywords(node: Node, op: OwnOp, mesh: Mesh, wrong: Complaint) -> None:
    axes = tuple(node.kwargs.get("axes", ()))
    speaks = "axes" in op.keywords
    if speaks and (not axes or len(set(axes)) != len(axes) or any(axis not in mesh.names for axis in axes)):
        known = ", ".join(mesh.names)
        got = ", ".join(map(str, axes)) or "none"
        wrong.fail(f"the axes of {op} are not this mesh's", node, f"axes=[...] of {known}", got)
    needed = {name for name, keyword in op.keywords.items() if keyword.needed}
    possible = op.keywords.keys() - needed
    for what, names in (
        ("does not take", [key for key in node.kwargs if key not in needed | possible]),
        ("needs", sorted(needed - node.kwargs.keys())),
    ):
        if names:
            takes = f"{', '.join(sorted(needed))}; perhaps {', '.join(sorted(possible)) or 'no other'}"
            got = ", ".join(node.kwargs)
            wrong.fail(f"{op} {what} the keyword {', '.join(names)}", node, takes, got)


def check_values(node: Node, operands: list[Value], made: Strategy, explicit: bool, wrong: Complaint) -> None:
    """Check that results are placed as the strategy says, and operands too, once communication is explicit."""
    results = node.outs
    if len(made.operands) != len(operands) or len(made.results) != len(results):
        what = "a strategy does not fit its node"
        expected = f"placements of {len(operands)} operands and {len(results)} results"
        wrong.fail(what, node, expected, f"placements of {len(made.operands)} operands and {len(made.results)} results")
    for value, spec in zip(results, made.results, strict=True):
        if value.spec is not None and value.spec != spec:
            what = f"{wrong.name(value)} is placed otherwise than its node's strategy gives it"
            wrong.fail(what, node, spec, value.spec)
    for value, spec in zip(operands, made.operands, strict=True) if explicit else ():
        if value.spec != spec:
            what = f"operand {wrong.name(value)} is placed otherwise than the node needs it"
            wrong.fail(what, node, spec, value.spec or "no placement")


def check_shardings(node: Node, made: Strategy, rules: RuleBook, mesh: Mesh, wrong: Complaint) -> None:
    """Check that the op's rule allows the strategy: placements follow from its factor shardings."""
    name = op_name(node.op)
    rule = rules.rule(node)
    partial = partial_operands(made)
    sharding_by = {axis: factor for factor, axes in made.shardings for axis in axes}
    for factor, axes in made.shardings:
        groups = [partial.get(axis, ("sum", frozenset[int]()))[1] for axis in axes]
        if factor not in rule.factors:
            known = ", ".join(rule.factors) or "none: it is computed replicated"
            wrong.fail(f"{name} is sharded by a factor that its rule lacks", node, f"one of {known}", factor)
        if axes and factor in rule.windows.keys() - rule.alone:
            leader = rule.windows[factor].leader
            wrong.fail(f"{name} is sharded by a factor that follows another", node, leader, factor)
        if axes and factor in rule.replicated and not all(rule.together(factor, group) for group in groups):
            free = ", ".join(f for f in rule.factors if f not in rule.replicated) or "none"
            wrong.fail(f"{name} is sharded where its rule needs replication", node, f"shardings of {free}", factor)
    for axis, (kind, group) in partial.items():
        if not passes_partial(rule, node, kind, group, sharding_by.get(axis, "")):
            what = f"{name} cannot be computed on these partial operands"
            expected = f"operands that are reduced over {axis}, or partial where the op is linear: {_groups(rule)}"
            wrong.fail(what, node, expected, f"partial ({kind}) over {axis}: operands {_numbers(group)}")
    try:
        follows = strategy(rule, factor_shardings(rule, node, mesh), mesh, partial)
    except Error as error:
        wrong.fail(f"the shardings of {name} contradict one another", node, error.expected, error.got)
    for word, said, found in (("operand", made.operands, follows.operands), ("result", made.results, follows.results)):
        for index, (a, b) in enumerate(zip(said, found, strict=True)):
            if a != b:
                what = f"{word} {index} of {name} is not placed as its strategy says"
                wrong.fail(what, node, f"{b}, with {_shardings(made)}", a)


def _shardings(made: Strategy) -> str:
    return "shardings " + factors_text(made.shardings)


def _groups(rule: ShardingRule) -> str:
    return " or ".join(_numbers(each.operands) for each in rule.linear if each.operands) or "in none"


def _numbers(group: frozenset[int]) -> str:
    return " and ".join(map(str, sorted(group)))
