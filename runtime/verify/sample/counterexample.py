"""Numbers that show that a program is wrong, where a proof did not come to its end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardfx.ir.capture.compared.whole_run import run_whole
from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Graph, Input, Output
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.fault import Fault

from .compare import by_boxes, draw_sample, verify
from .ranks_alike import RanksAlike, ranks_alike
from .whole import apart_at, distance

MOST = 1 << 28
"""Numbers are sought where all values, those of the whole and of the ranks that are run, have no more elements."""
MOST_CALLS = 200_000
"""And where the programs of these ranks together have no more ops."""
MOST_FLOPS = 1e11
"""And do no more multiplications and additions."""
MANY = 16
"""Of more ranks than these, a few are run first."""
SEEDS = range(3)
"""What random numbers are drawn with, one after the other: a fault may hide behind a relu that is 0 anyway."""
TOLERANCE = 1e-9
FAILS = (Error, *DOES_NOT_RUN)
"""What a program raises that cannot be run."""


@dataclass(frozen=True)
class Numbers:
    """What to run beside the captured program: the planned graph, and all ranks' programs."""

    before: Graph
    after: Graph
    book: RuleBook
    known: Mapping[str, torch.Tensor]

    def of_graph(self, fault: Fault) -> Fault:
        """The fault with numbers that the planned graph, run whole, gives otherwise; or as it is."""
        if _count(self.before) > MOST:
            return fault
        found = (self._of_graph(fault, seed) for seed in SEEDS)
        return next((each for each in found if each.certain), fault)

    def _of_graph(self, fault: Fault, seed: int) -> Fault:
        try:
            sample = draw_sample(self.before, self.after, self.known, seed)
            right = run_whole(sample.before, sample.inputs, by_boxes(sample.after))
        except FAILS:
            return fault
        try:
            got = run_whole(sample.after, sample.inputs, by_boxes(sample.after))
        except FAILS as error:
            return replace(fault, numbers=f"the planned graph does not run: {first_line(error)}", certain=True)
        wanted = {(o.kind, o.name): right[o.value] for o in sample.before.outputs}
        for output in sorted(sample.after.outputs, key=lambda o: f"{o.kind.value} {o.name}" != fault.output):
            mine = wanted[output.kind, output.name]
            if not distance(got[output.value], mine) <= TOLERANCE:
                name = f"{output.kind.value} {output.name}"
                return replace(fault, output=name, numbers=apart_at(got[output.value], mine, seed), certain=True)
        return fault

    def affordable(self, ranks: int) -> bool:
        """Whether so many ranks can be run in passing."""
        one = sum(v.type.numel // self.after.mesh.extent(v.spec.axes if v.spec else ()) for v in self.after.values())
        if _count(self.before) + one * ranks > MOST or len(self.after.nodes) * ranks > MOST_CALLS:
            return False
        whole = sum(map(flops_of, (node for node in self.before.nodes if not isinstance(node.op, OwnOp))))
        return whole * (1 + ranks / self.after.mesh.size) <= MOST_FLOPS

    def of_ranks(
        self,
        fault: Fault,
        program: Callable[[Any], RankProgram],
        changed: Mapping[int, RankProgram],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
    ) -> Fault:
        """The fault with numbers that the ranks' programs give otherwise; or as it is. Of many ranks, those are run
        first that stand for all on inputs which are alike (:mod:`.ranks_alike`), and all where that is affordable.

        Args:
            program: the plan's own program of a rank, or of ranks that are together.
            changed: programs in the place of some ranks' own.
        """
        size = self.after.mesh.size
        few = ranks_alike(self.after, program, changed) if size > MANY or not self.affordable(size) else None
        for alike in (None,) if few is None else (few, None):
            ranks = range(size) if alike is None else alike.ranks
            if not self.affordable(len(ranks)):
                continue
            given = {rank: changed.get(rank) or program(rank) for rank in ranks}
            found = next(filter(None, (self._of_ranks(given, inputs, outputs, seed, alike) for seed in SEEDS)), None)
            if found is not None:
                numbers = (found.numbers or found.what) + (f"; {len(ranks)} ranks run for {size}" if alike else "")
                return replace(fault, output=found.output or fault.output, numbers=numbers, certain=True)
        return fault

    def _of_ranks(
        self,
        given: Mapping[int, RankProgram],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
        seed: int,
        alike: RanksAlike | None,
    ) -> Fault | None:
        try:
            found, _ = verify(
                self.before,
                self.after,
                self.book,
                given,
                given,
                inputs,
                outputs,
                self.known,
                locate=False,
                seed=seed,
                alike=alike,
            )
        except FAILS:
            return None
        return found


def _count(graph: Graph) -> int:
    return sum(value.type.numel for value in graph.values())


def first_line(error: Exception) -> str:
    """What an exception says, in short."""
    return next(iter(str(error).splitlines()), type(error).__name__)
