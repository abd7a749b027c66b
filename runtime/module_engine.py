"""Engines that execute the GraphModules themselves, through ``torch.compile`` where it is wanted.

A real rank runs its program as one module, collectives and all. Virtual ranks run theirs in stretches between the
collectives, each stretch a module, and meet as always. What puts values away and fetches them stands between stretches
too, for torch.compile would plan that memory as any other; then so do a real rank's collectives, whose memory must not
be used again before they are waited for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.program.looped.within_turns import FRAMES, gives_number, part_in_turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.sharing import destination
from shardfx.ir.program.units.lifetimes import Lifetimes, name_of, turns_of
from shardfx.ir.program.units.unit_order import UnitOrder, Word, order_of

from .engine import Engine, Watch
from .rendezvous import Perform, RankCoroutine, Request, run

Tensor = torch.Tensor
c10d = torch.ops._c10d_functional


class ModuleEngine:
    """Runs modules in the place of another engine, which still runs what is watched.

    Args:
        engine: whose ranks these are.
        options: of ``torch.compile``; None: modules run as they are.
        perform: how virtual ranks do a collective; None for a real rank.
        ending: the context in which a real rank runs, which tells the others how it ends.
    """

    meets_late = False

    def __init__(
        self,
        engine: Engine,
        mesh: Mesh,
        options: Mapping[str, Any] | None,
        perform: Perform | None = None,
        ending: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.mesh, self.device = mesh, engine.device
        self._engine, self._options, self._perform, self._ending = engine, options, perform, ending
        self._modules: WeakKeyDictionary[RankProgram, Any] = WeakKeyDictionary()

    @property
    def ranks(self) -> Sequence[int]:
        """Those of the engine."""
        return self._engine.ranks

    def prepare(self) -> None:
        """As the engine does."""
        self._engine.prepare()

    def seed(self) -> Tensor:
        """A step's seed."""
        return self._engine.seed()

    def run(
        self,
        programs: Mapping[int, RankProgram],
        inputs: Mapping[int, Sequence[Tensor]],
        watch: Watch | None = None,
    ) -> Mapping[int, Sequence[Tensor]]:
        """Run the modules; what is watched is run node by node."""
        if watch is not None:
            return self._engine.run(programs, inputs, watch)
        with torch.no_grad():
            if self._perform is None:
                (rank,) = programs
                with self._ending():
                    return {rank: self._module(programs[rank], self._whole)(*inputs[rank])}
            made = {rank: self._module(program, self._stretches) for rank, program in programs.items()}
            return run(made, inputs, self.mesh, self._perform)

    def _module(self, program: RankProgram, make: Callable[[RankProgram], Any]) -> Any:
        if program not in self._modules:
            self._modules[program] = make(program)
        return self._modules[program]

    def _whole(self, program: RankProgram) -> Any:
        if any(_between_pools(node) for node in program.graph.nodes):
            return partial(_to_the_end, Stretches(program, self._compiled, meets=False))
        return self._compiled(program.module())

    def _compiled(self, module: fx.GraphModule) -> Any:
        return module if self._options is None else torch.compile(module, **self._options)

    def _stretches(self, program: RankProgram) -> Stretches:
        return Stretches(program, self._compiled)


def _between_pools(node: fx.Node) -> bool:
    """Whether a call copies between pools of memory, or waits for that."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and (row.copies or (row.fetches and row.waits))


def _to_the_end(program: Stretches, *inputs: Tensor) -> list[Tensor]:
    """What a program gives that meets nobody."""
    try:
        next(program(*inputs))
    except StopIteration as end:
        results: list[Tensor] = end.value
        return results
    raise AssertionError("a real rank asks its process group, and not who runs it")


@dataclass(frozen=True)
class Stretch:
    """Calls between two collectives, as a module."""

    module: Any
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


class Stretches:
    """A program as a coroutine of modules. ``meets``: it asks for its collectives; else it calls them."""

    def __init__(self, program: RankProgram, compiled: Callable[[fx.GraphModule], Any], meets: bool = True) -> None:
        self._meets = meets
        self.program, self.nodes = program, tuple(program.graph.nodes)
        self._life = Lifetimes(self.nodes)
        self._steps: list[Stretch | fx.Node] = []
        self._at: fx.Node | None = None
        group: list[fx.Node] = []
        for node in self.nodes:
            if self._stands_apart(node):
                self._close(group, compiled)
                self._steps.append(node)
                group = []
            elif node.op == "call_function":
                group.append(node)
        self._close(group, compiled)

    def _stands_apart(self, node: fx.Node) -> bool:
        """Whether a call is in no module."""
        waits = not self._meets and node.target is c10d.wait_tensor.default
        return waits or Request.of(node) is not None or part_in_turns(node) in FRAMES or _between_pools(node)

    def _close(self, group: list[fx.Node], compiled: Callable[[fx.GraphModule], Any]) -> None:
        """Make a module of the calls since the last collective."""
        if not group:
            return
        inside, graph, env = set(group), fx.Graph(), dict[fx.Node, fx.Node]()
        takes = dict.fromkeys(used for node in group for used in node.all_input_nodes if used not in inside)
        for used in takes:
            env[used] = graph.placeholder(used.name)
        for node in group:
            if node.target is c10d.wait_tensor.default:
                env[node] = env[node.args[0]]  # type: ignore[index]
            else:
                env[node] = graph.node_copy(node, env.__getitem__)
        gives = tuple(node for node in group if any(user not in inside for user in node.users))
        graph.output(tuple(env[node] for node in gives))
        module = compiled(fx.GraphModule(torch.nn.Module(), graph))
        self._steps.append(Stretch(module, tuple(takes), gives, tuple(group)))

    def __call__(self, *inputs: Tensor) -> RankCoroutine:
        env: dict[fx.Node, Any] = dict(zip((n for n in self.nodes if n.op == "placeholder"), inputs, strict=True))
        clock = _Clock(self._steps, self._life, env)
        at = 0
        while at < len(self._steps):
            step = self._steps[at]
            at += 1
            if isinstance(step, fx.Node) and part_in_turns(step):
                at, done = clock.next(step, at)
            elif isinstance(step, fx.Node) and not (self._meets and Request.of(step)):
                self._at, done, target = step, (step,), step.target
                assert callable(target)
                env[step] = target(*fx.node.map_arg(step.args, env.__getitem__), **dict(step.kwargs))
            elif isinstance(step, fx.Node):
                self._at, request, into = step, Request.of(step), destination(step)
                assert request is not None
                numbers = {n.name: env[n] for n in step.all_input_nodes if gives_number(n)}
                request, to = request.of_turn(numbers) if numbers else request, None if into is None else env[into]
                given: Any = fx.node.map_arg(step.args[0], env.__getitem__)  # a tensor; of a receive a shape
                env[step] = (yield request, given, to).pop()
                del to
                done = (step,)
            else:
                self._at, done = step.nodes[0], step.nodes
                env.update(zip(step.gives, step.module(*(env[used] for used in step.takes)), strict=True))
            clock.keep(done)
            for used in (used for node in done for used in self._life.dying.get(node, ())):
                env.pop(used, None)
        return [env[node] for node in self.program.result().args[0]]  # type: ignore[union-attr,index]

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The first call of the stretch that raised."""
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
            if begin is not None:
                self._kept[value, self._env[begin]] = self._env[value]
