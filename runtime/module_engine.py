"""Engines that execute the GraphModules themselves, through ``torch.compile`` where it is wanted.

A real rank runs its program as one module, collectives and all. Virtual ranks run theirs in stretches between the
collectives, each stretch a module, and meet as always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.program.looped.within_turns import gives_number, part_in_turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.sharing import destination

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
    """

    def __init__(
        self, engine: Engine, mesh: Mesh, options: Mapping[str, Any] | None, perform: Perform | None = None
    ) -> None:
        self.mesh, self.device = mesh, engine.device
        self._engine, self._options, self._perform = engine, options, perform
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
                return {rank: self._module(programs[rank], self._whole)(*inputs[rank])}
            made = {rank: self._module(program, self._stretches) for rank, program in programs.items()}
            return run(made, inputs, self.mesh, self._perform)

    def _module(self, program: RankProgram, make: Callable[[RankProgram], Any]) -> Any:
        if program not in self._modules:
            self._modules[program] = make(program)
        return self._modules[program]

    def _whole(self, program: RankProgram) -> Any:
        return self._compiled(program.module())

    def _compiled(self, module: fx.GraphModule) -> Any:
        return module if self._options is None else torch.compile(module, **self._options)

    def _stretches(self, program: RankProgram) -> Stretches:
        return Stretches(program, self._compiled)


@dataclass(frozen=True)
class Stretch:
    """Calls between two collectives, as a module."""

    module: Any
    takes: tuple[fx.Node, ...]
    gives: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]


class Stretches:
    """A program as a coroutine of modules."""

    def __init__(self, program: RankProgram, compiled: Callable[[fx.GraphModule], Any]) -> None:
        self.program, self.nodes = program, tuple(program.graph.nodes)
        self._steps: list[Stretch | fx.Node] = []
        self._at: fx.Node | None = None
        group: list[fx.Node] = []
        for node in self.nodes:
            if Request.of(node) is not None or part_in_turns(node) in ("opens", "closes"):
                self._close(group, compiled)
                self._steps.append(node)
                group = []
            elif node.op == "call_function":
                group.append(node)
        self._close(group, compiled)

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
        last = {used: node for node in self.nodes for used in node.all_input_nodes}
        at = 0
        while at < len(self._steps):
            step = self._steps[at]
            at += 1
            if isinstance(step, fx.Node) and part_in_turns(step):
                again = self._next_turn(step, env)
                if again is not None:
                    at = self._steps.index(again) + 1
                    continue
                done = {step}
            elif isinstance(step, fx.Node):
                self._at, request, into = step, Request.of(step), destination(step)
                assert request is not None
                numbers = {n.name: env[n] for n in step.all_input_nodes if gives_number(n)}
                request, to = request.of_turn(numbers) if numbers else request, None if into is None else env[into]
                env[step] = (yield request, env[step.args[0]], to).pop()  # type: ignore[index]
                del to
                done = {step}
            else:
                self._at, done = step.nodes[0], set(step.nodes)
                env.update(zip(step.gives, step.module(*(env[used] for used in step.takes)), strict=True))
            for used in [used for used in env if last.get(used) in done]:
                del env[used]
        return [env[node] for node in self.program.result().args[0]]  # type: ignore[union-attr,index]

    def _next_turn(self, step: fx.Node, env: dict[fx.Node, Any]) -> fx.Node | None:
        """Begin turns, or go on; gives where the next one begins, if there is one."""
        if part_in_turns(step) == "opens":
            env[step] = 0
            return None
        begin: Any = step.args[0]
        env[begin] += 1
        return begin if env[begin] < begin.args[1] else None

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The first call of the stretch that raised."""
        return self._at

    def position(self, node: fx.Node | None) -> int:
        """How many calls stand before a node."""
        return self.nodes.index(node) if node is not None else 0
