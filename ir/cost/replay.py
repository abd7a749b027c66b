"""One rank's program, replayed on shapes alone: which storages it makes, how long they live, how many flops it does.

Nothing is computed. The code generator writes into a recorder instead of an fx graph, and the recorder runs each
distinct call once on fake tensors; the same call in the next layer is looked up.

    >>> replay = replay_rank(graph, rules, {OutputKind.LOSS, OutputKind.GRADIENT})
    >>> replay.peak.nbytes, replay.work.flops
    (1835008, 402653184)

Bytes are counted by storage, as torch holds them: a view, a transpose or a slice shares that of its source, and a
storage lives until the last use of any of its views. Inputs (parameters, buffers, the batch) are not in it: their
storages belong to the caller.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shardfx.ir.graph import Graph, OutputKind, Value
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.lower import Lowering, select
from shardfx.ir.rules.book import RuleBook

from .recorder import Peak, Recorder

KEPT = {
    OutputKind.GRADIENT: "gradients",
    OutputKind.LOSS: "results",
    OutputKind.RESULT: "results",
    OutputKind.BUFFER: "new buffers",
}


@dataclass(frozen=True)
class Work:
    """The arithmetic of a program: flops, and bytes read and written, of each call but those of communication."""

    calls: tuple[tuple[int, int], ...] = ()

    @property
    def flops(self) -> int:
        return sum(flops for flops, _ in self.calls)

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """The sum over all calls of what takes longer, computing or reading and writing."""
        return sum(max(flops / flops_per_second, nbytes / bytes_per_second) for flops, nbytes in self.calls)


@dataclass(frozen=True)
class Replay:
    """What :func:`replay_rank` found."""

    peak: Peak
    work: Work
    calls: int


def replay_rank(graph: Graph, book: RuleBook, kinds: Iterable[OutputKind], rank: int = 0) -> Replay:
    """Replay the program of ``rank`` (0 holds most) for the outputs of some kinds."""
    inputs, nodes, outputs = select(graph, kinds)
    recorder = Recorder()
    writer = Lowering(graph, rank, book, fx=recorder)  # type: ignore[arg-type]
    for given in inputs:
        recorder.next_input = (given, writer.shape(given.value, given.value.spec))
        writer.placeholder(given)
    gradients = {source_of(output.value) for output in outputs if output.kind is OutputKind.GRADIENT}
    for node in nodes:
        recorder.node = node
        writer.node(node)
        for value in node.outs:
            if value in gradients and not isinstance(node.op, OwnOp):
                recorder.mark(writer.env[value], "gradients")
    for output in outputs:
        recorder.keep(writer.env[output.value], KEPT[output.kind])
    return Replay(recorder.peak(), Work(tuple(recorder.work)), recorder.count)


def source_of(value: Value) -> Value:
    """The value before any communication."""
    while value.node is not None and isinstance(value.node.op, OwnOp):
        operands = value.node.operands
        value = operands[value.index if len(operands) > 1 else 0]
    return value
