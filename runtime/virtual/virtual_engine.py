"""Engines run the programs of a plan: all ranks in this process (virtual), or this process's own rank.

An engine holds the stored shards of parameters and buffers, and gives for every output its distinct pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Output, OutputKind
from shardfx.ir.program.lower import generate
from shardfx.ir.program.rank_program import Program
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.shards import Shards
from shardfx.runtime.debug.nan_hunt import NanHunt
from shardfx.runtime.rendezvous import run

from .coroutine import Steps, as_generator

Kinds = frozenset[OutputKind]
Results = dict[tuple[OutputKind, str], list[torch.Tensor]]


def seed_tensor() -> torch.Tensor:
    """A fresh seed from torch's default generator: ``torch.manual_seed`` makes a step reproducible."""
    return torch.randint(2**62, ())


@contextmanager
def one_thread() -> Iterator[None]:
    """Virtual ranks take turns, on small tensors: threads within an op would only get in one another's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@dataclass
class VirtualEngine:
    """All ranks in this process. Ranks that hold the same shard share one tensor."""

    graph: Graph
    rules: RuleBook
    shards: dict[str, Shards] = field(default_factory=dict)
    parameters: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    buffers: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    _programs: dict[Kinds, list[Program]] = field(default_factory=dict)
    _compiled: dict[Kinds, list[Steps]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for given in self.graph.inputs:
            assert given.value.spec is not None
            self.shards[given.name] = Shards.of(given.value.spec, given.value.shape, self.graph.mesh)

    def load(self, whole: Mapping[str, torch.Tensor], trainable: Mapping[str, bool]) -> None:
        """Cut whole parameters and buffers into the stored shards; what is stored already is written over."""
        for given in self.graph.inputs:
            if given.kind not in (InputKind.PARAMETER, InputKind.BUFFER) or given.name not in whole:
                continue
            layout = self.shards[given.name]
            pieces = [layout.cut(whole[given.name].detach(), i).clone() for i in range(layout.count)]
            held = self.parameters.get(given.name) or self.buffers.get(given.name)
            if held:
                for old, new in zip(held, pieces, strict=True):
                    old.detach().copy_(new)
            elif given.kind is InputKind.PARAMETER:
                grad = trainable.get(given.name, True)
                self.parameters[given.name] = [nn.Parameter(p, requires_grad=grad) for p in pieces]
            else:
                self.buffers[given.name] = pieces

    @property
    def ranks(self) -> list[int]:
        """The ranks that run in this process."""
        return list(range(self.graph.mesh.size))

    def programs(self, kinds: Kinds) -> list[Program]:
        if kinds not in self._programs:
            mesh = self.graph.mesh
            self._programs[kinds] = [generate(self.graph, r, self.rules, kinds) for r in range(mesh.size)]
        return self._programs[kinds]

    def run(self, kinds: Kinds, inputs: Mapping[str, torch.Tensor], hunt: NanHunt | None = None) -> Results:
        """Run all ranks on whole inputs; gives the distinct pieces of every output. A ``hunt`` looks at every node."""
        programs = self.programs(kinds)
        if kinds not in self._compiled:
            self._compiled[kinds] = [as_generator(p.module) for p in programs]
        seed = seed_tensor() if self.graph.of_kind(InputKind.SEED) else None
        with torch.no_grad(), one_thread():
            local = {g.name: self._pieces(g, inputs, seed) for g in programs[0].inputs}
            given = [
                [local[g.name][self.shards[g.name].by_rank[rank]] for g in program.inputs]
                for rank, program in enumerate(programs)
            ]
            steps = self._compiled[kinds] if hunt is None else self._watched(hunt, programs, given)
            outs = run(steps, given, self.graph.mesh)
        return {
            (output.kind, output.name): self._distinct(output, [o[i] for o in outs])
            for i, output in enumerate(programs[0].outputs)
        }

    def _watched(
        self, hunt: NanHunt, programs: Sequence[Program], given: Sequence[Sequence[torch.Tensor]]
    ) -> list[Steps]:
        watchers = [hunt.watch(rank) for rank in self.ranks]
        for watcher, program, tensors in zip(watchers, programs, given, strict=True):
            watcher.inputs(program.inputs, tensors)
        return [as_generator(p.module, watcher) for p, watcher in zip(programs, watchers, strict=True)]

    def layout(self, output: Output) -> Shards:
        assert output.value.spec is not None
        return Shards.of(output.value.spec, output.value.shape, self.graph.mesh)

    def _distinct(self, output: Output, by_rank: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        layout = self.layout(output)
        pieces = [by_rank[layout.first_rank(i)] for i in range(layout.count)]
        # A gradient becomes its receiver's own: it must not share memory with another, or with an input.
        return [piece.clone() for piece in pieces] if output.kind is OutputKind.GRADIENT else pieces

    def _pieces(
        self, given: Input, inputs: Mapping[str, torch.Tensor], seed: torch.Tensor | None
    ) -> Sequence[torch.Tensor]:
        if given.kind is InputKind.PARAMETER:
            return [p.detach() for p in self.parameters[given.name]]
        if given.kind is InputKind.BUFFER:
            return self.buffers[given.name]
        if given.kind is InputKind.SEED:
            assert seed is not None
            return [seed]
        whole = given.constant if given.kind is InputKind.CONSTANT else inputs[given.name]
        if whole is None:
            raise Error(f"constant {given.name!r} has no content", where="a graph read from text")
        layout = self.shards[given.name]
        return [layout.cut(whole, i) for i in range(layout.count)]

    def rank_inputs(self, rank: int, program: Program, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a rank's program starts from, by input name, as far as it is there: stored pieces, and ``inputs``
        cut."""
        seed, found = torch.zeros((), dtype=torch.int64), {}
        for given in program.inputs:
            stored = given.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            held = self.parameters.get(given.name) or self.buffers.get(given.name) if stored else inputs.get(given.name)
            if held is not None or given.kind in (InputKind.SEED, InputKind.CONSTANT):
                pieces = self._pieces(given, inputs, seed)
                found[given.name] = pieces[self.shards[given.name].by_rank[rank]].clone()
        return found

    def store_buffers(self, results: Results) -> None:
        """Keep the new contents of buffers."""
        for (kind, name), pieces in results.items():
            if kind is OutputKind.BUFFER:
                for held, new in zip(self.buffers[name], pieces, strict=True):
                    held.copy_(new)

    def whole(self, name: str, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The whole tensor of a stored parameter or buffer (or of its gradient) from its shards."""
        return self.shards[name].join(pieces)

    def join(self, output: Output, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return self.layout(output).join(pieces)

    def accepts(self, given: Input, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape may be passed for an input: here the global shape alone."""
        return tuple(shape) == given.value.shape

    def shapes(self, given: Input) -> str:
        return f"the global shape {given.value.shape}"

    def is_local(self, given: Input, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is one rank's part of the batch: never, for virtual ranks."""
        return False


def outputs_of(graph: Graph, kind: OutputKind) -> Iterable[Output]:
    return [output for output in graph.outputs if output.kind is kind]
