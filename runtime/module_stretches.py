"""A program as modules of the calls between what ranks do together, each compiled alone, and a driver in Python.

x = c10d.wait_tensor(receive)              received: as it stands
h = aten.addmm(b, x, w)
y = aten.relu(h)                     ->    (y,) = module(b, x, w)
stage.send(y, 1, 0, turn, ...)             sent: as it stands

What ranks do together is done as an engine does it (:class:`shardfx.ir.program.source.Forms`), and so is what hangs on
the number of a turn: a module is the same one in each turn. What puts values away and fetches them stands alone, too,
for ``torch.compile`` would plan that memory as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.aliasing import destination
from shardfx.ir.program.loops.loop_regions import (
    FRAMES,
    Lifetimes,
    UnitOrder,
    Word,
    gives_number,
    name_of,
    order_of,
    part_in_turns,
    turns_of,
)
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.source import Forms

from .rendezvous import RankCoroutine

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


@dataclass(frozen=True)
class Stretch:
    """Calls between two that stand alone, as a module."""

    module: Any
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    first: fx.Node
    kept: tuple[fx.Node, ...]
    """What other units of the turn take."""
    dies: tuple[fx.Node, ...]
    """What nobody behind it needs."""


def stands_alone(node: fx.Node) -> bool:
    """Whether a call is no part of a module: ranks do it together, it copies between pools of memory or waits for that,
    it hangs on the number of a turn, or begins or ends turns."""
    if part_in_turns(node) in FRAMES:
        return True
    row = row_of(node.target) if node.op == "call_function" else None
    together = node.target is c10d.wait_tensor.default or (row is not None and row.group is not None)
    pools = row is not None and (row.copies or (row.fetches and row.waits))
    return together or pools or gives_number(node) or any(gives_number(used) for used in node.all_input_nodes)


class Stretches:
    """A program as a coroutine of modules.

    Args:
        compiled: what runs a module.
        forms: how calls that stand alone are done, and which of them the coroutine asks for.
    """

    def __init__(self, program: RankProgram, compiled: Callable[[fx.GraphModule], Any], forms: Forms) -> None:
        self.program, self.nodes, self.forms = program, tuple(program.graph.nodes), forms
        self._life = Lifetimes(self.nodes)
        self._steps: list[Stretch | fx.Node] = []
        self._at: fx.Node | None = None
        group: list[fx.Node] = []
        for node in self.nodes:
            if node.op not in ("call_function", "get_attr"):
                continue
            if stands_alone(node):
                self._close(group, compiled)
                self._steps.append(node)
                group = []
            else:
                group.append(node)
        self._close(group, compiled)

    def _close(self, group: list[fx.Node], compiled: Callable[[fx.GraphModule], Any]) -> None:
        """Make a module of the calls since the last one that stands alone."""
        if not group:
            return
        inside, graph, env = set(group), fx.Graph(), dict[fx.Node, fx.Node]()
        takes = dict.fromkeys(used for node in group for used in node.all_input_nodes if used not in inside)
        for used in takes:
            env[used] = graph.placeholder(used.name)
        for node in group:
            env[node] = graph.node_copy(node, env.__getitem__)
        gives = tuple(node for node in group if any(user not in inside for user in node.users))
        graph.output(tuple(env[node] for node in gives))
        held = {str(node.target): self.program.constants[str(node.target)] for node in group if node.op == "get_attr"}
        module, kept, dies = compiled(fx.GraphModule(held, graph)), self._kept(group), self._dying(group)
        self._steps.append(Stretch(module, tuple(takes), gives, group[0], kept, dies))

    def _kept(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(node for node in nodes if self._life.kept(node) is not None)

    def _dying(self, nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        return tuple(used for node in nodes for used in self._life.dying.get(node, ()))

    def __call__(self, *inputs: Tensor) -> RankCoroutine:
        env: dict[fx.Node, Any] = dict(zip((n for n in self.nodes if n.op == "placeholder"), inputs, strict=True))
        clock = _Clock(self._steps, self._life, env)
        at, forms = 0, self.forms
        while at < len(self._steps):
            step = self._steps[at]
            at += 1
            if isinstance(step, Stretch):
                self._at, kept, dies = step.first, step.kept, step.dies
                env.update(zip(step.gives, step.module(*(env[used] for used in step.takes)), strict=True))
            else:
                self._at = step
                done: tuple[fx.Node, ...] = (step,)
                if part_in_turns(step) in FRAMES:
                    at, done = clock.next(step, at)
                elif (request := None if forms.ask is None else forms.ask(step)) is None:
                    env[step] = self._call(step, env)
                else:
                    env[step] = (yield self._asked(step, request, env)).pop()
                kept, dies = self._kept(done), self._dying(done)
            clock.keep(kept)
            for used in dies:
                env.pop(used, None)
        return [env[node] for node in self.program.result().args[0]]  # type: ignore[union-attr,index]

    def _call(self, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
        """Do a call that stands alone."""
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
        function: Any = self.forms.instead.get(node.target, node.target)
        return function(*args, **kwargs)

    def _asked(self, node: fx.Node, request: Any, env: dict[fx.Node, Any]) -> Any:
        """What is asked for: with a tensor (of a receive, a shape), and the memory that the result goes into."""
        numbers = {n.name: env[n] for n in node.all_input_nodes if gives_number(n)}
        into, given = destination(node), fx.node.map_arg(node.args[0], env.__getitem__)
        return request.of_turn(numbers) if numbers else request, given, None if into is None else env[into]

    def to_the_end(self, *inputs: Tensor) -> Sequence[Tensor]:
        """What the program gives, where it asks for nothing."""
        try:
            next(self(*inputs))
        except StopIteration as done:
            results: Sequence[Tensor] = done.value
            return results
        raise AssertionError("a rank that runs alone asks for nothing")

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The call that raised; of a stretch the first one."""
        return self._at

    def position(self, node: fx.Node | None) -> int:
        """How many calls stand before a node."""
        return self.nodes.index(node) if node is not None else 0


class _Clock:
    """Which turn it is, and what is done next: turn by turn, or unit by unit as an order says."""

    def __init__(self, steps: Sequence[Stretch | fx.Node], life: Lifetimes, env: dict[fx.Node, Any]) -> None:
        self._life, self._env = life, env
        self._place = {step: at for at, step in enumerate(steps) if isinstance(step, fx.Node)}
        self._unit = {(turns_of(n), name_of(n)): n for n in self._place if part_in_turns(n) == "unit"}
        self._words: dict[fx.Node, Iterator[Word]] = {}
        """By turns in units: what is still to be done."""
        self._now: dict[fx.Node, Word] = {}
        """By such turns: the unit that comes behind their numbers."""
        self._kept: dict[tuple[fx.Node, int], Any] = {}

    def next(self, frame: fx.Node, at: int) -> tuple[int, tuple[fx.Node, ...]]:
        """The place to go on from, where turns or units begin or end, and what is over; ``at`` is behind ``frame``."""
        if part_in_turns(frame) == "opens":
            if order := order_of(frame):
                self._words[frame] = iter(UnitOrder.of(order.split()).words)
                return self._word(frame)
            self._env[frame] = 0
            return at, ()
        begin = turns_of(frame)
        if begin in self._words:
            word = self._now.pop(begin, None)
            return self._word(begin) if word is None else self._begin(self._unit[begin, word.unit], word.turn)
        self._env[begin] += 1
        count: Any = begin.args[1]
        return (self._place[begin] + 1, ()) if self._env[begin] < count else (at, (frame,))

    def _word(self, begin: fx.Node) -> tuple[int, tuple[fx.Node, ...]]:
        """The next unit of turns, from their numbers on; behind their end where there is none."""
        word = next(self._words[begin], None)
        if word is None:
            del self._words[begin]
            end = next(user for user in begin.users if part_in_turns(user) == "closes")
            return self._place[end] + 1, (end,)
        self._now[begin], self._env[begin] = word, word.turn
        return self._place[begin] + 1, ()

    def _begin(self, unit: fx.Node, turn: int) -> tuple[int, tuple[fx.Node, ...]]:
        """A unit, of which other units of the turn have kept what it takes."""
        for value in self._life.takes.get(unit, ()):
            last = turn in self._life.let_go(value, unit)
            self._env[value] = (self._kept.pop if last else self._kept.__getitem__)((value, turn))
        return self._place[unit] + 1, ()

    def keep(self, values: Sequence[fx.Node]) -> None:
        """Keep what was made for other units of the turn."""
        for value in values:
            begin = self._life.kept(value)
            assert begin is not None
            self._kept[value, self._env[begin]] = self._env[value]
