"""Do a node's placements follow from how it is sharded, by its op's rule; and do its values have them?"""

from __future__ import annotations

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Output, Strategy, Value, factors_text, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.rules.as_placed import passes_partial
from shardfx.ir.rules.book import RuleBook, replicated
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import factor_shardings, partial_operands, strategy
from shardfx.ir.spec import Spec

from .complaint import Complaint


def check_values(node: Node, operands: list[Value], made: Strategy, explicit: bool, wrong: Complaint) -> None:
    """Results are placed as the strategy gives them; operands as it needs them, once communication is explicit."""
    results = node.outs
    if len(made.operands) != len(operands) or len(made.results) != len(results):
        wrong.fail(
            "a strategy does not fit its node",
            node,
            expected=f"placements of {len(operands)} operands and {len(results)} results",
            got=f"placements of {len(made.operands)} operands and {len(made.results)} results",
        )
    for value, spec in zip(results, made.results, strict=True):
        if value.spec is not None and value.spec != spec:
            what = f"{wrong.name(value)} is placed otherwise than its node's strategy gives it"
            wrong.fail(what, node, expected=spec, got=value.spec)
    for value, spec in zip(operands, made.operands, strict=True) if explicit else ():
        if value.spec != spec:
            what = f"operand {wrong.name(value)} is placed otherwise than the node needs it"
            wrong.fail(what, node, expected=spec, got=value.spec or "no placement")


def check_shardings(node: Node, made: Strategy, rules: RuleBook, mesh: Mesh, wrong: Complaint) -> None:
    """The strategy is one that the op's rule allows: the placements follow from the shardings of its factors."""
    name = op_name(node.op)
    entry = rules.entry(node.op)
    rule = (entry.make(node) if entry is not None else None) or replicated(node)
    partial = partial_operands(made)
    sharding_by = {axis: factor for factor, axes in made.shardings for axis in axes}
    for factor, axes in made.shardings:
        groups = [partial.get(axis, ("sum", frozenset[int]()))[1] for axis in axes]
        if factor not in rule.factors:
            known = ", ".join(rule.factors) or "none: it is computed whole"
            wrong.fail(
                f"{name} is sharded by a factor that its rule lacks", node, expected=f"one of {known}", got=factor
            )
        if axes and factor in rule.windows.keys() - rule.alone:
            leader = rule.windows[factor].leader
            wrong.fail(f"{name} is sharded by a factor that follows another", node, expected=leader, got=factor)
        if axes and factor in rule.whole and not all(rule.together(factor, group) for group in groups):
            free = ", ".join(f for f in rule.factors if f not in rule.whole) or "none"
            wrong.fail(
                f"{name} is sharded where its rule needs the whole", node, expected=f"shardings of {free}", got=factor
            )
    for axis, (kind, group) in partial.items():
        if not passes_partial(rule, node, kind, group, sharding_by.get(axis, "")):
            wrong.fail(
                f"{name} cannot be computed on these partial operands",
                node,
                expected=f"operands that are reduced over {axis}, or partial where the op is linear: {_groups(rule)}",
                got=f"partial ({kind}) over {axis}: operands {_numbers(group)}",
            )
    try:
        follows = strategy(rule, factor_shardings(rule, node, mesh), mesh, partial)
    except Error as error:
        wrong.fail(f"the shardings of {name} contradict one another", node, expected=error.expected, got=error.got)
    for word, said, found in (
        ("operand", made.operands, follows.operands),
        ("result", made.results, follows.results),
    ):
        for index, (a, b) in enumerate(zip(said, found, strict=True)):
            if a != b:
                what = f"{word} {index} of {name} is not placed as its shardings say"
                wrong.fail(what, node, expected=f"{b}, with {_shardings(made)}", got=a)


def check_outputs(graph: Graph, wrong: Complaint) -> None:
    """Every output leaves as it must: a gradient as its parameter is stored, nothing partial."""
    for output, spec in graph.output_specs().items():
        if output.value.spec != spec:
            _wrong_output(output, spec, wrong)


def _wrong_output(output: Output, spec: Spec, wrong: Complaint) -> None:
    made = output.value.spec
    how = " as a partial sum" if made is not None and made.partial else ""
    wrong.fail(
        f"{output.kind.value} {output.name!r} leaves the program otherwise than it must{how}",
        output,
        expected=spec.text(output.value.shape),
        got=made.text(output.value.shape) if made is not None else "no placement",
    )


def _shardings(made: Strategy) -> str:
    return "shardings " + factors_text(made.shardings)


def _groups(rule: ShardingRule) -> str:
    return " or ".join(_numbers(each.operands) for each in rule.linear if each.operands) or "in none"


def _numbers(group: frozenset[int]) -> str:
    return " and ".join(map(str, sorted(group)))
