"""The answer of ``pm.verify()``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.program.lower import select, write
from shardfx.ir.program.rank_program import Code
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.proof.interpreter import HasGraph

from .fault import Fault
from .first_change import named
from .proof import every_rank, representatives
from .sample import compare, shrink_plan


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks' programs compute what the model computes; false where that is not proven.

    ``why`` names the output, the rank, the node and the source line; ``checked`` says how much was looked at.
    """

    ok: bool
    why: str = ""
    how: str = "proven"
    checked: Mapping[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    claim: str = "the ranks compute what the model computes"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        looked = ", ".join(f"{count:,} {what}" for what, count in self.checked.items())
        head = f"{self.how}: {self.claim}" if self.ok else f"not {self.how}"
        return f"{head} ({looked})" if self.ok else f"{head}\n{self.why}\n  {'checked:':<10}{looked}"


def text(fault: Fault) -> str:
    """The fault as an error reads."""
    rank = "" if fault.rank is None else f"rank {fault.rank}"
    node = f"node {fault.node!r}" if fault.node else ""
    place = "; ".join(part for part in (rank, node, fault.where) if part)
    lines = [fault.what]
    lines += [f"  {'where:':<10}{place}"] if place else []
    lines += [f"  {'output:':<10}{fault.output}"] if fault.output else []
    return "\n".join(lines)


def verify(
    before: Graph,
    after: Graph,
    rules: RuleBook,
    kinds: Iterable[OutputKind],
    modules: Mapping[int, fx.GraphModule] | None,
    run: bool,
    stored: Mapping[str, torch.Tensor],
) -> Verdict:
    """Verify the plan's own programs for outputs of some kinds, ``modules`` in the place of some of them.

    Raises:
        Error: ``modules`` names a rank that the mesh does not have.
    """
    mesh = after.mesh
    unknown = [r for r in modules or () if not (isinstance(r, int) and 0 <= r < mesh.size)]
    if unknown:
        raise Error(f"no rank {unknown[0]} on this mesh", where="verify(modules=...)", expected=f"0 .. {mesh.size - 1}")

    changed: dict[int, HasGraph] = dict(modules or {})
    small = shrink_plan.shrink(before, after, rules) if run and not changed and shrink_plan.needed(before) else None
    if small is not None and not compare.alike(small.before, small.after, small.known(stored)):
        small = None  # numbers of the program stand for sizes: a count that a sum is divided by
    if small is not None:
        before, after, stored = small.before, small.after, small.known(stored)

    def program(rank: int) -> Code:
        return write(after, rank, rules, kinds)

    def alone(graph: Graph, rank: int) -> Code:
        return write(graph, rank, rules, {OutputKind.RESULT})

    inputs, _, outputs = select(after, kinds)
    if not run and mesh.size > representatives.EVERY and representatives.is_even(after):
        fault, checked = representatives.verify(before, after, rules, alone, program, changed, inputs, outputs)
    else:
        own: dict[int, HasGraph] = {rank: program(rank) for rank in range(mesh.size)}
        given = own | changed if changed else own
        if run:
            fault, checked = compare.verify(before, after, rules, given, own, inputs, outputs, stored)
        else:
            fault, checked = every_rank.verify(before, after, rules, given, inputs, outputs)
    if fault is not None and changed and not run:
        fault = named(fault, {rank: program(rank) for rank in changed}, changed)
    how = "shown on random float64 numbers" if run else "proven"
    if small is not None:
        how, checked = f"{how}, on shapes that were shrunk", {**checked, "sizes shrunk": small.sizes}
    return Verdict(fault is None, "" if fault is None else text(fault), how, checked, fault)
