"""Steps of the rows of a table that lookups name: no dense gradient, and no temporary as large as the table.

Where a step keeps all other rows, as that of a sparse gradient does, it is one call over the rows that are named
(:mod:`shardfx.ir.ops.computing.row_update`), which are written where they lie.

    grad = aten.embedding_dense_backward(rows, ids, 8000, -1, False)      step = update.rows([...], [0], 1, [w],
    times = aten.embedding_dense_backward(ones, ids, 8000, -1, False)                        [rows, ids, ones, rate])
    named = aten.gt(times, 0)                                             new = step[0]
    mul = aten.mul(grad, rate), sub = aten.sub(w, mul)              ->
    where = aten.where(named, sub, w), new = memory.write(w, where)
    return (new,)                                                         return (new,)
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import fx

from shardfx.ir.graph import Value
from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.computing.row_update import CHOOSE, DENSE, is_by_rows, step_rows, wrong_rows
from shardfx.ir.ops.computing.segment import COPY, SegmentRef, call_text
from shardfx.ir.ops.local_ops import OVERWRITING
from shardfx.ir.program.rank_module import ORIGINS
from shardfx.ir.program.rank_program import RankProgram, planned_node

from .rank_pass import is_update

FUNCTIONAL = {form: op for op, form in OVERWRITING.items()}


def step_touched_rows(program: RankProgram) -> bool:
    """Compute the steps of tables on the rows that lookups name, where they keep the others; returns whether any is."""
    by_mask: dict[fx.Node, list[fx.Node]] = {}
    for node in program.graph.find_nodes(op="call_function", target=memory_ops.write):
        column, made = node.args
        if is_update(node) and column.op == "placeholder" and made.target is CHOOSE and made.args[2] is column:
            by_mask.setdefault(made.args[0], []).append(node)
    replaced = [_replace(program, writes) for writes in by_mask.values()]
    return any(replaced)


def _replace(program: RankProgram, writes: Sequence[fx.Node]) -> bool:
    """Replace the step of one table, which writes these; returns whether it could be."""
    graph, order = program.graph, {node: place for place, node in enumerate(program.graph.nodes)}
    columns: list[Any] = [write.args[0] for write in writes]
    inside, todo = set(writes), list[Any](writes)
    while todo:
        node = todo.pop()
        used = () if node.target is DENSE else node.all_input_nodes
        fresh = {each for each in used if _is_of_rows(each) and each not in inside}
        inside |= fresh
        todo += fresh
    calls = sorted(inside, key=order.__getitem__)
    if any(not inside.issuperset(node.users) for node in calls if node not in writes):
        return False
    refs: dict[Any, SegmentRef] = {column: SegmentRef("c", i) for i, column in enumerate(columns)}
    others, texts = list[fx.Node](), list[str]()
    for number, node in enumerate(calls):
        sized = _sized(node)
        for each in node.all_input_nodes:
            if each not in refs:
                group, kind = (columns, "c") if each in sized else (others, "s")
                refs[each] = SegmentRef(kind, len(group))
                group.append(each)
        kwargs = {name: arg for name, arg in node.kwargs.items() if name != "out"}
        target = COPY if node.target is memory_ops.write else FUNCTIONAL.get(node.target, node.target)
        texts.append(call_text(target, [refs[a] if isinstance(a, fx.Node) else a for a in node.args], kwargs))
        refs[node] = SegmentRef("r", number)
    gives = list(range(len(writes)))
    if wrong_rows(texts, gives, 1, len(columns), len(others)):
        return False
    with graph.inserting_after(calls[-1]):
        made = graph.call_function(step_rows, (texts, gives, 1, columns, others))
    made.meta.update({"shardfx": writes[0].meta["shardfx"], ORIGINS: [node.meta["shardfx"] for node in calls]})
    for number, write in reversed(list(enumerate(writes))):
        with graph.inserting_after(made):
            got = graph.call_function(operator.getitem, (made, number))
        got.meta = dict(write.meta)
        write.replace_all_uses_with(got)
    for node in reversed(calls):
        graph.erase_node(node)
    return True


def _sized(node: fx.Node) -> list[fx.Node]:
    """The operands of an elementwise call that have rows, as the table has."""
    planned = planned_node(node)
    if planned is None or node.target is DENSE:
        return []
    pairs = zip(node.args, planned.args, strict=False)
    return [arg for arg, value in pairs if isinstance(arg, fx.Node) and isinstance(value, Value) and value.shape]


def _is_of_rows(node: fx.Node) -> bool:
    """Whether a call of the step computes on all rows of a table."""
    planned = planned_node(node)
    if node.op != "call_function" or planned is None or not planned.outs or not planned.outs[0].shape:
        return False
    by_rows = is_by_rows(node.target, node.args) or node.target in FUNCTIONAL
    return node.target is DENSE or (is_update(node) and by_rows)
