"""The answer of ``pm.verify()``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind
from shardfx.ir.program.devices import CPU
from shardfx.ir.program.lower import lower, select
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.validate_program import ProgramError, validate_program
from shardfx.ir.rules.book import RuleBook

from .families import many_ranks
from .fault import Fault
from .first_change import named
from .proof import every_rank
from .sample import compare, shrink_plan


@dataclass(frozen=True)
class Verdict:
    """Whether the ranks' programs compute what the model computes; false where that is not proven.

    ``why`` names the output, the rank, the node and the source line; ``checked`` says how much was looked at, ``given``
    what is taken as given.
    """

    ok: bool
    why: str = ""
    how: str = "proven"
    checked: Mapping[str, int] = field(default_factory=dict)
    fault: Fault | None = None
    claim: str = "the ranks compute what the model computes"
    given: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        looked = ", ".join(f"{count:,} {what}" for what, count in self.checked.items())
        head = f"{self.how}: {self.claim}" if self.ok else f"not {self.how}"
        given = "".join(f"\n  {'given:':<10}{each}" for each in self.given)
        return f"{head} ({looked}){given}" if self.ok else f"{head}\n{self.why}\n  {'checked:':<10}{looked}"


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
    program: Callable[[Graph, int], RankProgram],
    used: Mapping[int, RankProgram],
    modules: Mapping[int, fx.GraphModule] | None,
    run: bool,
    stored: Mapping[str, torch.Tensor],
    device: torch.device = CPU,
) -> Verdict:
    """Verify the programs of a plan for outputs of some kinds.

    Args:
        before, after: the captured graph and the planned one.
        program: ``program(graph, rank)``: the plan's own program of a rank; of ``after``, or (with ``run``) of the same
            plan in small.
        used: programs that run on some ranks in the place of the plan's own.
        modules: programs that somebody changed, in the place of those of some ranks.
        stored: inputs whose content counts.
        device: what programs are written for.

    Raises:
        Error: ``modules`` names a rank that the mesh does not have, or has a module of another plan.
    """
    mesh = after.mesh
    unknown = [r for r in modules or () if not (isinstance(r, int) and 0 <= r < mesh.size)]
    if unknown:
        raise Error(f"no rank {unknown[0]} on this mesh", where="verify(modules=...)", expected=f"0 .. {mesh.size - 1}")
    changed = {**used, **{r: program(after, r).changed(module) for r, module in (modules or {}).items()}}
    small = shrink_plan.shrink(before, after, rules) if run and not changed and shrink_plan.needed(before) else None
    if small is not None and not compare.alike(small.before, small.after, small.known(stored)):
        small = None  # numbers of the program stand for sizes: a count that a sum is divided by
    if small is not None:
        before, after, stored = small.before, small.after, small.known(stored)
    selected = select(after, kinds)
    try:
        fault, checked = _ask(before, after, rules, program, changed, run, stored, selected, device)
    except _Broken as broken:
        fault, checked = broken.fault, {"ranks": mesh.size}
    if fault is not None and changed and not run:
        fault = named(fault, {rank: program(after, rank) for rank in changed}, changed)
    how = "shown on random float64 numbers" if run else "proven"
    if small is not None:
        how, checked = f"{how}, on shapes that were shrunk", {**checked, "sizes shrunk": small.sizes}
    return Verdict(fault is None, "" if fault is None else text(fault), how, checked, fault)


def first_broken(programs: Iterable[RankProgram]) -> Fault | None:
    """The first program that is not well formed, so that it may not compute what its plain form does."""
    for program in programs:
        try:
            validate_program(program)
        except ProgramError as error:
            return Fault(error.what, _leads_to(program, error.node), program.rank, error.node, error.line)
    return None


def _leads_to(program: RankProgram, name: str) -> str:
    """The first output of a program that is made of a call."""
    made = {node for node in program.graph.nodes if node.name == name}
    for node in program.graph.nodes:
        if made & set(node.all_input_nodes):
            made.add(node)
    results = program.result().args[0]
    pairs = zip(program.outputs, results, strict=False)  # type: ignore[arg-type]
    return next((f"{output.kind.value} {output.name}" for output, node in pairs if node in made), "")


class _Broken(Exception):
    """A program that is not well formed."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(fault.what)
        self.fault = fault


def _sound(program: RankProgram, *, in_place: bool = False) -> RankProgram:
    """The plain form of a program that is well formed: that is what is proven."""
    fault = first_broken([program])
    if fault is not None:
        raise _Broken(fault)
    return plain(program, in_place=in_place)


def _ask(
    before: Graph,
    after: Graph,
    rules: RuleBook,
    program: Callable[[Graph, int], RankProgram],
    changed: Mapping[int, RankProgram],
    run: bool,
    stored: Mapping[str, torch.Tensor],
    selected: tuple[Sequence[Input], Sequence[Node], Sequence[Output]],
    device: torch.device,
) -> tuple[Fault | None, dict[str, int]]:
    """The first fault, and how much was looked at."""
    ranks = range(after.mesh.size)
    inputs, nodes, outputs = selected
    if not run and len(ranks) > many_ranks.EVERY and many_ranks.is_even(after):
        others = {rank: _sound(each) for rank, each in changed.items()}
        return many_ranks.verify(
            before,
            after,
            rules,
            lambda graph, rank: plain(lower(graph, rank, rules, {OutputKind.RESULT}, device), in_place=True),
            lambda rank: _sound(program(after, rank), in_place=True),
            others,
            nodes,
            inputs,
            outputs,
        )
    own = {rank: program(after, rank) for rank in ranks}
    given = {**own, **changed}
    if run:
        for each in given.values():
            _sound(each)
        return compare.verify(before, after, rules, given, own if changed else given, inputs, outputs, stored)
    return every_rank.verify(before, after, rules, {r: _sound(each) for r, each in given.items()}, inputs, outputs)
