"""``Hints(reduce="auto")``: gradients of iterations are reduced once, or in each iteration: what is faster and fits.

Behind the last turn a gradient is sent once, but until then the rank adds up all of it; in each turn it is sent as
often, and the rank adds up its piece alone. Where gradients leave in pieces (``zero``) and it is known what a rank may
hold (by ``Hints(memory=...)``, or a machine that is named), both plans are made, and the cheaper of those that fit is
taken.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardfx.compile import plan_graph
from shardfx.compiled import Compiled
from shardfx.ir.cost.machine import Machine
from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_nest import loop_axes
from shardfx.ir.text.printer import size_text

from .budget import Foresight, budget_of

WAYS = {"last": "once, behind the last iteration", "each": "in each iteration"}


@dataclass(frozen=True)
class Candidate:
    """A plan, the bytes that a rank holds at its peak, and the seconds of a step."""

    way: str
    plan: Compiled
    peak: int
    seconds: float

    def __str__(self) -> str:
        return f"{WAYS[self.way]}: {self.seconds * 1e3:.3g} ms a step, {size_text(self.peak)}"


def reduced(compiled: Compiled, foresight: Foresight) -> Compiled:
    """The plan in which gradients of iterations are reduced when that is cheapest; itself, where nothing is to be
    chosen."""
    hints, mesh = compiled.hints, compiled.after.mesh
    budget = budget_of(hints)
    trains = any(output.kind is OutputKind.GRADIENT for output in compiled.after.outputs)
    asked = hints.reduce == "auto"
    if not asked or not loop_axes(mesh) or not hints.zero or not trains or budget is None:
        return compiled
    machine = Machine.of(hints.machine)
    made = [_candidate(compiled, way, foresight, machine) for way in WAYS]
    fitting = [each for each in made if each.peak <= budget]
    best = min(fitting, key=lambda each: each.seconds) if fitting else min(made, key=lambda each: each.peak)
    (other,) = (each for each in made if each is not best)
    fits = "which is faster" if other in fitting else f"for a rank may hold {size_text(budget)}"
    why = f"gradients of iterations are reduced {best}; {fits} ({other})"
    graph = best.plan.after
    graph.notes.append(why)
    gradients = {output.value for output in graph.outputs if output.kind is OutputKind.GRADIENT}
    for node in reversed(graph.nodes):
        if node.op in (comm.all_reduce, comm.reduce_scatter) and gradients & set(node.outs):
            gradients.update(node.operands)
            node.why = f"{node.why}; {why}" if node.why else why
    return best.plan


def _candidate(compiled: Compiled, way: str, foresight: Foresight, machine: Machine) -> Candidate:
    hints = replace(compiled.hints, reduce=way)
    graph, context = plan_graph(compiled.captured, hints, compiled.context.rules, compiled.passes)
    plan = Compiled(hints, compiled.captured, graph, context, compiled.passes)
    memory = foresight.of(plan)
    return Candidate(way, plan, memory.peak, memory.footprint.cost.seconds(machine, graph.mesh))
