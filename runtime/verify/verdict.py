"""The verdict of ``pm.verify()``: proven, refuted or unknown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, OutputKind
from shardfx.ir.program.devices import CPU
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.program.lower import select
from shardfx.ir.rules.book import RuleBook

from .fault import Failed, Fault
from .interface import interface_fault
from .loop_proof import of_iteration, unrolled_plan
from .plan_proof import PlanProof, ProgramRequest, Task


class Status(StrEnum):
    """The outcome of a verification."""

    PROVEN = "proven"
    REFUTED = "refuted"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks' programs compute what the model computes; true where that is proven only.

    ``status`` is ``"proven"``, ``"refuted"`` (some output differs: ``fault.numbers`` has a counterexample where one was
    found) or ``"unknown"`` (the proof does not come to its end; ``fault.agrees`` says on how many random draws the
    programs agree with the model, where they could be run). ``why`` names the output, the rank, the node and the source
    line; ``programs`` are those that were proven, ``checked`` says how much was checked, ``assumptions`` what is
    assumed.
    """

    status: Status
    why: str = ""
    how: str = "proven"
    checked: Mapping[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    claim: str = "the ranks compute what the model computes"
    programs: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @staticmethod
    def of(fault: Fault | None, **more: Any) -> Verdict:
        """The verdict for the first fault that was found, if any."""
        if fault is None:
            return Verdict(Status.PROVEN, **more)
        return Verdict(Status.REFUTED if fault.certain else Status.UNKNOWN, text(fault), fault=fault, **more)

    def said_of(self, form: str) -> Verdict:
        """The same verdict, labelled with a specialization."""
        why = f"for {form}: {self.why}" if self.why else ""
        return replace(self, why=why, programs=tuple(f"{form}: {each}" for each in self.programs))

    @property
    def proven(self) -> bool:
        """Whether it is proven."""
        return self.status is Status.PROVEN

    def __bool__(self) -> bool:
        return self.proven

    def __str__(self) -> str:
        looked = ", ".join(f"{count:,} {what}" for what, count in self.checked.items())
        if self.proven:
            of = f" in {', '.join(self.programs)}" if self.programs else ""
            assumed = "".join(f"\n  {'assumed:':<10}{each}" for each in self.assumptions)
            return f"{self.how}: {self.claim}{of} ({looked}){assumed}"
        return f"{self.status}: not {self.how}\n{self.why}\n  {'checked:':<10}{looked}"


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Merge verdicts into one: the first that is not proven, or all of them."""
    refused = next((each for each in verdicts if not each), None)
    if refused is not None or len(verdicts) == 1:
        return refused or verdicts[0]
    counts: Counter[str] = Counter()
    for each in verdicts:
        counts.update({what: count for what, count in each.checked.items() if what != "ranks"})
    checked = {"ranks": verdicts[0].checked["ranks"], **counts}
    programs, assumed = (sum((getattr(each, name) for each in verdicts), ()) for name in ("programs", "assumptions"))
    return replace(verdicts[0], checked=checked, programs=programs, assumptions=tuple(dict.fromkeys(assumed)))


def text(fault: Fault) -> str:
    """The fault, formatted as an error."""
    rank = "" if fault.rank is None else f"rank {fault.rank}"
    node = f"node {fault.node!r}" if fault.node else ""
    place = "; ".join(filter(None, (rank, node, fault.where)))
    seen = "" if fault.seen is None else " (seen at node {!r} of rank {})".format(*fault.seen)
    agrees = f"agrees {fault.agrees}" if fault.agrees else ""
    lines = [("where:", place), ("output:", fault.output), ("numbers:", fault.numbers or agrees)]
    return "\n".join([fault.what + seen, *(f"  {word:<10}{said}" for word, said in lines if said)])


def verify(
    before: Graph,
    after: Graph,
    rules: RuleBook,
    requests: Sequence[ProgramRequest],
    run: bool,
    stored: Mapping[str, torch.Tensor],
    device: torch.device = CPU,
) -> Verdict:
    """Verify the programs of a plan.

    Args:
        before, after: the captured graph and the planned one.
        stored: inputs whose content counts.
        device: what programs are written for.

    Raises:
        Error: ``modules`` names a rank that the mesh does not have, or has a module of another plan.
    """
    mesh = after.mesh
    unknown = [r for each in requests for r in each.modules if not (isinstance(r, int) and 0 <= r < mesh.size)]
    if unknown:
        raise Error(f"no rank {unknown[0]} on this mesh", where="verify(modules=...)", expected=f"0 .. {mesh.size - 1}")
    how = "shown on random float64 numbers" if run else "proven"
    loops = bool(loop_axes(mesh))
    try:
        if loops:
            before, after, requests = unrolled_plan(before, after, requests)
        fault = interface_fault(before, after)
    except Failed as failed:
        fault = failed.fault
    if fault is not None:
        return Verdict.of(fault, how=how, checked={"ranks": mesh.size})
    counts: Counter[str] = Counter({"ranks": mesh.size})
    tasks = [Task(each, each.changed(after), *select(after, each.kinds), after) for each in requests]
    proof = PlanProof(before, after, rules, tasks, stored, device, counts, mesh)
    try:
        fault = proof.compared() if run else proof.proven()
    except Failed as failed:
        fault = failed.fault
    if loops and fault is not None:
        fault = of_iteration(fault, mesh)
    seen = dict.fromkeys(name for task in tasks for name in task.observers)
    assumed = tuple(f"the observer {name} has no side effect on tensors of the program" for name in seen)
    if any(output.kind is OutputKind.OVERFLOW for output in after.outputs):
        assumed += (
            "there is room for all rows that are sent, which each step checks: one in which there is not runs again",
        )
    programs = () if fault is not None else tuple(each.name for each in requests)
    return Verdict.of(fault, how=how, checked=dict(counts), programs=programs, assumptions=assumed)
