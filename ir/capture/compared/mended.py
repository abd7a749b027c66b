"""What is done where a captured graph is not the model: an op whose traced form is another function is taken apart by
its own kernel, as it is in eager torch; else it is said which number differs, and where."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from torch import Tensor, fx

from shardfx.ir.capture.sources import CAPTURE
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Where

from .as_eager import AsItIs, Difference
from .both_runs import Draws
from .one_op import Write, WrongOp, wrong_ops

ASKS = (
    "look for code that asks whether it is traced or compiled (torch.compiler.is_compiling(), torch.jit.is_tracing()), "
    "and let it do the same in both; in transformers, masks are made in two ways: pass the one that is meant as "
    "attention_mask"
)
AS_TORCH: set[Any] = set()
"""The ops that were found so: their kernels take them apart in what is captured from then on, also where nothing can
be run."""


def mended(
    difference: Difference,
    as_it_is: AsItIs,
    given: tuple[Tensor, ...],
    export: Callable[[], fx.GraphModule],
    write: Callable[[Collection[Any]], tuple[Graph, Draws]],
    one: Write,
    loss: Where | None,
) -> Graph:
    """The graph of a program in which some ops are taken apart by torch's kernels. What is said of it is a note.

    Args:
        difference: of the graph in which they are not.
        export: exports the program.
        write: captures it, with these ops taken apart so.
        one: captures another program.
        loss: where the loss is written.

    Raises:
        Error: it is not the model, either.
    """
    wrong = list(wrong_ops(export(), given, one))
    if not wrong:
        raise _other(difference)
    ops = {each.op for each in wrong}
    graph, drawn = write(AS_TORCH | ops)
    left = as_it_is.difference(graph, drawn)
    if left is not None:
        raise _wrong(wrong[0], loss if wrong[0].where.file == CAPTURE and loss is not None else wrong[0].where, left)
    AS_TORCH.update(ops)
    names = ", ".join(dict.fromkeys(map(str, wrong)))
    graph.notes.append(f"{names}: what torch traces is another function than its kernel, which is taken instead")
    return graph


def _other(found: Difference) -> Error:
    return Error(
        "the model computes something else when it is traced",
        where=_place(found.name, found.where),
        expected=f"{found.expected}, as the model gives",
        got=f"{found.got}, as it was traced",
        remedy=ASKS,
    )


def _wrong(op: WrongOp, where: Where, found: Difference) -> Error:
    return Error(
        f"what torch traces of {op} is another function than what it computes",
        where="  ".join(part for part in (str(where), where.code) if part),
        expected=f"{op.difference.expected} as its {op.difference.name}",
        got=f"{op.difference.got}; of the model, {found.name} is {found.got} in place of {found.expected}",
        remedy="write it in other ops; or as a torch.library.custom_op with a gradient of its own, which stays one op",
    )


def _place(name: str, where: str) -> str:
    return f"{name}, on the example inputs" + (f": made in {where}" if where else "")
