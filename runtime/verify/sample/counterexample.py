"""Numbers that show that a program is wrong, where a proof did not come to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, Output
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.book import RuleBook
from shardfx.runtime.verify.fault import Fault

from .compare import by_boxes, draw_sample, verify
from .whole import apart_at, distance, run_whole

MOST = 1 << 26
"""Numbers are sought where all values of all ranks together have no more elements than this."""
MOST_CALLS = 200_000
"""And where the programs of all ranks together have no more ops."""
SEEDS = range(3)
"""What random numbers are drawn with, one after the other: a fault may hide behind a relu that is 0 anyway."""
TOLERANCE = 1e-9
DOES_NOT_RUN = (Error, RuntimeError, IndexError, TypeError, ValueError, KeyError, AttributeError, AssertionError)
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
        except DOES_NOT_RUN:
            return fault
        try:
            got = run_whole(sample.after, sample.inputs, by_boxes(sample.after))
        except DOES_NOT_RUN as error:
            return replace(fault, numbers=f"the planned graph does not run: {first_line(error)}", certain=True)
        wanted = {(o.kind, o.name): right[o.value] for o in sample.before.outputs}
        for output in sorted(sample.after.outputs, key=lambda o: f"{o.kind.value} {o.name}" != fault.output):
            mine = wanted[output.kind, output.name]
            if not distance(got[output.value], mine) <= TOLERANCE:
                name = f"{output.kind.value} {output.name}"
                return replace(fault, output=name, numbers=apart_at(got[output.value], mine, seed), certain=True)
        return fault

    def affordable(self) -> bool:
        """Whether all ranks can be run in passing."""
        ranks = self.after.mesh.size
        return _count(self.before) * ranks <= MOST and len(self.after.nodes) * ranks <= MOST_CALLS

    def of_ranks(
        self, fault: Fault, given: Mapping[int, RankProgram], inputs: Sequence[Input], outputs: Sequence[Output]
    ) -> Fault:
        """The fault with numbers that the ranks' programs give otherwise; or as it is."""
        for seed in SEEDS:
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
                )
            except DOES_NOT_RUN:
                return fault
            if found is not None:
                numbers = found.numbers or found.what
                return replace(fault, output=found.output or fault.output, numbers=numbers, certain=True)
        return fault


def _count(graph: Graph) -> int:
    return sum(value.type.numel for value in graph.values())


def first_line(error: Exception) -> str:
    """What an exception says, in short."""
    return next(iter(str(error).splitlines()), type(error).__name__)
