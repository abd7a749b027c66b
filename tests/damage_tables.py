"""Damage to lookups in sharded tables, and to steps of their rows: what the compiler could get wrong about either."""

from __future__ import annotations

import torch
from torch import fx

from shardfx.ir.ops.computing.row_update import step_rows
from shardfx.ir.ops.computing.table_ids import narrow_ids, numbered_rows, row_numbers
from shardfx.ir.ops.experts.dispatch import expert_slots, take_rows
from tests.damage import Damage, Mutation, Places, Site, argument, becomes, of

aten = torch.ops.aten
FILL = aten.masked_fill.Scalar


def text(call: str, old: str, new: str) -> Damage:
    """Change the first call of a step of rows that begins so."""

    def damage(site: Site, node: fx.Node) -> None:
        calls, *rest = node.args
        texts = list(map(str, calls))  # type: ignore[arg-type, call-overload]
        number = next(i for i, each in enumerate(texts) if each.startswith(call))
        texts[number] = texts[number].replace(old, new)
        node.args = (texts, *rest)

    return damage


def steps_with(op: str) -> Places:
    """Steps of rows with a call of this name."""
    return lambda site: [n for n in site.calls(step_rows) if any(op in str(text) for text in n.args[0])]  # type: ignore[union-attr]


def of_another_table(site: Site, node: fx.Node) -> None:
    """The index is that of another call."""
    node.update_arg(1, next(n.args[1] for n in site.calls(node.target) if n.args[1] is not node.args[1]))


LOOKUPS = (
    Mutation(
        "rows of the next rank",
        of(aten.sub.Tensor, when=lambda node: isinstance(node.args[1], int) and node.args[1] > 1),
        argument(1, lambda n: n + 1),
    ),
    Mutation("rows of others are kept", of(aten.masked_fill.Scalar), becomes(0)),
    Mutation("narrow ids of a smaller table", of(narrow_ids), argument(1, lambda size: size - 1)),
    Mutation("the last id of a rank is another's", of(aten.ge.Scalar), argument(1, lambda size: size - 1)),
    Mutation("a gradient of fewer rows", of(aten.embedding_dense_backward.default), argument(3, lambda padding: 0)),
    Mutation("gradients by count", of(aten.embedding_dense_backward.default), argument(4, lambda scale: not scale)),
)
OF_GRADIENTS = (
    Mutation("padding names a row", of(FILL, when=lambda node: node.args[2] == -1), argument(2, lambda none: 0)),
    Mutation("all ids are kept", of(FILL, when=lambda node: node.args[2] == -1), becomes(0)),
    Mutation("ids without another padding", of(aten.eq.Scalar), argument(1, lambda padding: padding + 1)),
    Mutation("ids of one lookup are left out", of(aten.cat.default), argument(0, lambda parts: [parts[0]] * 4)),
)
"""Damage to the ids that a program gives beside dense gradients."""
EXCHANGED = (
    Mutation("parts of other sizes", of(row_numbers), argument(1, lambda rows: rows - 1)),
    Mutation("another padding", of(row_numbers), argument(2, lambda padding: padding + 2)),
    Mutation("ids of another room", of(expert_slots), argument(3, lambda room: room - 1)),
    Mutation("ids of another number of ranks", of(expert_slots), argument(1, lambda parts: parts - 1)),
    Mutation("rows in slots of another table", of(take_rows), of_another_table),
    Mutation("rows of another lookup", of(numbered_rows), of_another_table),
    Mutation("ids without room that are not counted", of(aten.lt.Scalar), argument(1, lambda least: least - 1)),
    Mutation("padding with a gradient", of(aten.le.Scalar), argument(1, lambda least: least - 1)),
    Mutation(
        "gradients of the row before",
        of(aten.sub.Tensor, when=lambda node: node.args[1] == 1),
        argument(1, lambda n: 2),
    ),
)
"""Of ids that are sent to the ranks of their rows."""
STEPS = (
    Mutation("all rows are stepped", steps_with("gt"), text("aten.gt", "aten.gt.Scalar", "aten.ge.Scalar")),
    Mutation("untouched rows are stepped", steps_with("gt"), text("aten.gt", ", 0)", ", -1)")),
    Mutation("a state is chosen for the table", steps_with("where"), text("aten.where", "c0)", "c1)")),
    Mutation("a step without its gradient's square", steps_with("pow"), text("aten.pow", ", 2)", ", 3)")),
    Mutation("twice the step", steps_with("mul"), text("aten.mul", "aten.mul.Tensor", "aten.add.Tensor")),
    Mutation("a padding of its own", steps_with("dense"), text("aten.embedding", ", -1, False", ", 2, False")),
)
"""Of steps of rows, as they run."""
