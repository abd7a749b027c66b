"""What each block of a model keeps, so that it is known what any stage would hold that has some of them.

Counted on the planned graph, as if each block were a stage of its own: parameters and states as they are stored, their
gradients, what each iteration that is live keeps for the backward, and the most that an iteration makes in passing.
What several blocks use is there once in each stage that has one of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from math import prod

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.graph import Graph, Node, OutputKind, Phase, Value
from shardfx.ir.ops import comm
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.schedule.actions import Pipelined
from shardfx.ir.schedule.simulation import KEEPS
from shardfx.ir.shards import held_shape
from shardfx.passes.stages.assignment import OF_WEIGHTS, Assignment
from shardfx.passes.stages.best_split import Held
from shardfx.passes.stages.stage_blocks import Blocks

from .stretches import sources

Uses = dict[tuple[int, ...], int]
"""Bytes, by the blocks that use them."""


class BlockMemory:
    """The blocks of a planned graph in stages, and what stretches of them cost and hold on the rank that holds most."""

    def __init__(self, graph: Graph, pipeline: Pipelined) -> None:
        self.graph, self.pipeline = graph, pipeline
        self.blocks = Blocks(graph)
        self.count = len(self.blocks.names)
        self.live = in_flight_microbatches(pipeline)
        self._assigned = Assignment(graph, self.blocks.of, self.count - 1, told=False)
        kept = {v for v in self._kept if pipeline.microbatches in (v.spec.axes if v.spec is not None else ())}
        self._once = Stretches(self.count, [*self._stored(), *self._uses(self._kept - kept)])
        self._in_iterations = Stretches(self.count, self._uses(kept))
        self._passing = self._in_passing(self._kept)

    def held(self, stage: int, first: int, end: int) -> Held:
        """What a stage with the blocks from ``first`` to before ``end`` holds."""
        stays = self._once.there(first, end) + self.live[stage] * self._in_iterations.there(first, end)
        return Held(stays, max(self._passing[first:end]))

    @cached_property
    def costs(self) -> list[float]:
        """The operations of each block, forward and backward, in all iterations; so that each costs something."""
        found = [1.0] * self.count
        for node, at in self._assigned.at.items():
            for block in at if node.phase is not Phase.UPDATE else ():
                found[block] += flops_of(node)
        return found

    @cached_property
    def sent(self) -> list[float]:
        """What is sent in an iteration if a stage begins at a block: what is made before it and used from it on, or so
        in
        the backward."""
        steps = [0.0] * (self.count + 2)
        for value, nodes in self._users.items():
            mine = self._assigned.of(value)
            if value.node is not None and mine:
                at = [block for node in nodes for block in self._assigned.at[node]]
                low, high, nbytes = min([*at, mine[0]]), max([*at, mine[0]]), value.local_bytes(self.graph.mesh)
                steps[low + 1] += nbytes
                steps[high + 1] -= nbytes
        return list(accumulate(steps))[: self.count]

    # ---- what there is --------------------------------------------------------------------------------------------

    @cached_property
    def _users(self) -> Mapping[Value, Sequence[Node]]:
        """The users of what is made; of what is sent, those of what arrives."""
        found: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in sent_from(sources(node.operands)) if node.op is not comm.send else ():
                found.setdefault(value, []).append(node)
        return found

    @cached_property
    def _kept(self) -> set[Value]:
        """What the forward makes and the backward uses."""
        return {
            value
            for value, users in self._users.items()
            if value.node is not None
            and value.node.phase is Phase.FORWARD
            and any(user.phase is Phase.BACKWARD for user in users)
        }

    def _uses(self, values: Iterable[Value]) -> Iterator[tuple[int, Sequence[int]]]:
        for value in values:
            users = [node for node in self._users[value] if node.phase is Phase.BACKWARD]
            yield value.local_bytes(self.graph.mesh), [block for node in users for block in self._assigned.at[node]]

    def _stored(self) -> Iterator[tuple[int, Sequence[int]]]:
        """What programs are given, and gradients."""
        given = {each.name: each for each in self.graph.inputs}
        for each in self.graph.inputs:
            value = each.value
            if not each.pool and value.spec is not None:
                shape = held_shape(value.spec, value.shape, self.graph.mesh, 0)
                yield prod(shape) * value.type.dtype.itemsize, self._assigned.inputs[value]
        for output in self.graph.outputs:
            mine = given.get(output.name)
            if output.kind is OutputKind.GRADIENT and mine is not None and mine.kind in OF_WEIGHTS:
                yield self._adding_up(output.value), self._assigned.inputs[mine.value]

    def _adding_up(self, value: Value) -> int:
        """The bytes of what a gradient is summed in, before it is sharded."""
        return max(each.local_bytes(self.graph.mesh) for each in before_communication(value))

    def _in_passing(self, kept: set[Value]) -> list[int]:
        """By block the most bytes that are there for a moment while it is done."""
        left = Counter({value: len(users) for value, users in self._users.items()})
        leaves = sources(each for output in self.graph.outputs for each in before_communication(output.value))
        found, there, now = [0] * self.count, set[Value](), 0
        for node in self.graph.nodes:
            if node.op is comm.send:
                continue
            for value in (sources(node.outs) & {*node.outs}) - kept - leaves:
                there.add(value)
                now += value.local_bytes(self.graph.mesh)
            for block in self._assigned.at[node]:
                found[block] = max(found[block], now)
            for value in sent_from(sources([*node.operands, *node.outs])):
                left[value] -= value not in node.outs
                if value in there and left[value] <= 0:
                    there.remove(value)
                    now -= value.local_bytes(self.graph.mesh)
        return found


class Stretches:
    """Bytes that are there in each stretch of blocks that has one of those that use them."""

    def __init__(self, count: int, uses: Iterable[tuple[int, Sequence[int]]]) -> None:
        self._sums = [[0] * (count + 1) for _ in range(count + 1)]
        together: Uses = {}
        for nbytes, blocks in uses:
            key = tuple(sorted({*blocks}))
            together[key] = together.get(key, 0) + nbytes
        for blocks, nbytes in together.items():
            for before, block in pairwise((-1, *blocks)):  # of stretches that begin behind the use before
                for first in range(before + 1, block + 1):
                    self._sums[first][block + 1] += nbytes
        for row in self._sums:
            for end in range(1, count + 1):
                row[end] += row[end - 1]

    def there(self, first: int, end: int) -> int:
        """The bytes in the stretch of the blocks from one to before another."""
        return self._sums[first][end]


def sent_from(values: Iterable[Value]) -> set[Value]:
    """Values as they are where they are made."""
    found = set()
    for value in values:
        while value.node is not None and value.node.op is comm.send:
            (value,) = sources(value.node.operands)
        found.add(value)
    return found


def before_communication(value: Value) -> Iterator[Value]:
    """A value, and what it was before each step of communication that it comes out of."""
    yield value
    while value.node is not None and is_comm(value.node) and len(value.node.operands) > value.index:
        value = value.node.operands[value.index]
        yield value


def in_flight_microbatches(pipeline: Pipelined) -> list[int]:
    """How many iterations are live at each stage when most are live on its rank."""
    found = [0] * len(pipeline.homes)
    for row in pipeline.schedule.rows:
        now, most = Counter[int](), Counter[int]()
        for action in row:
            now[action.stage] += max(KEEPS[action.kind], 0)
            most = now.copy() if now.total() > most.total() else most
            now[action.stage] += min(KEEPS[action.kind], 0)
        for stage, iterations in most.items():
            found[stage] = iterations
    return found
