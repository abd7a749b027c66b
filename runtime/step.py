"""Execution of a step: inputs by name, through a store's shards and an engine, to the distinct shards of outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Output, OutputKind
from shardfx.ir.ops.experts.dispatch import Overflow, check_room
from shardfx.ir.ops.pools.transfer import finish
from shardfx.ir.program.aliasing import destination
from shardfx.ir.program.lower import select
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.program.store_layout import contiguous_tensors
from shardfx.ir.shards import Shards
from shardfx.ir.spec import with_dim_order

from .engine import Engine, Probe, on_device
from .local_device import as_current
from .store import Store

Kinds = frozenset[OutputKind]
Inputs = Mapping[str, torch.Tensor]
Results = dict[tuple[OutputKind, str], list[torch.Tensor]]
STORED = (InputKind.PARAMETER, InputKind.BUFFER)
"""The kinds of inputs that are the model's own."""
HELD = (*STORED, InputKind.STATE)
"""The kinds of inputs whose shards are in the store."""


class RunStart(NamedTuple):
    """Overrides of a run's start: a seed, and buffers by name and rank, in place of the store's."""

    seed: torch.Tensor | None
    buffers: Mapping[tuple[str, int], torch.Tensor]


@dataclass(frozen=True)
class _StepInputs:
    """The inputs of a run: passed tensors, overrides of the store's, the owner of each shard that is overwritten, by
    name and number, and the shards of inputs, which ranks share."""

    inputs: Inputs
    start: RunStart
    owners: Mapping[tuple[str, int], int]
    shards: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


@dataclass
class ProgramRunner:
    """Runs the programs of one planned graph on a store.

    Args:
        graph: planned.
        program: ``program(rank, kinds)``: the program of a rank for the outputs of some kinds, made anew.
        store: of parameters and buffers.
        make_engine: called at the first run.
        more_room: gives the runner of the same plan with more room for the rows of experts.
    """

    graph: Graph
    program: Callable[[int, Kinds], RankProgram]
    store: Store
    make_engine: Callable[[], Engine]
    more_room: Callable[[], ProgramRunner] | None = None
    larger: ProgramRunner | None = None
    """What runs in its place, once a step had no room for all rows."""
    changed: dict[tuple[int, Kinds], RankProgram] = field(default_factory=dict)
    """A user's programs, which replace the plan's own."""
    _engine: Engine | None = None
    _programs: dict[Kinds, dict[int, RankProgram]] = field(default_factory=dict)
    _drawing: dict[Kinds, bool] = field(default_factory=dict)
    """Whether the programs for some outputs draw random numbers."""
    _shards: dict[tuple[type, str, str], Shards] = field(default_factory=dict)
    _constants: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    _written: WeakKeyDictionary[RankProgram, frozenset[str]] = field(default_factory=WeakKeyDictionary)
    """The names of stored values that a program may overwrite."""

    def __getstate__(self) -> dict[str, Any]:
        """A copy's state: its engine is made anew."""
        return {**self.__dict__, "_engine": None}

    @property
    def engine(self) -> Engine:
        """The engine, made on first access, which all ranks make alike."""
        if self._engine is None:
            self._engine = self.make_engine()
        return self._engine

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of this process."""
        return range(self.graph.mesh.size) if self.store.rank is None else [self.store.rank]

    def programs(self, kinds: Kinds) -> Mapping[int, RankProgram]:
        """The programs that run in this process, by rank."""
        if kinds not in self._programs:
            made = {r: self.changed.get((r, kinds)) or self.program(r, kinds) for r in self.ranks}
            self._programs[kinds] = made
        return self._programs[kinds]

    def has_run(self, kinds: Kinds) -> bool:
        """Whether this process has made the programs for these outputs."""
        return kinds in self._programs

    def put(self, rank: int, kinds: Kinds, program: RankProgram) -> None:
        """Run ``program`` on a rank from now on."""
        self.changed[rank, kinds] = program
        self._programs.pop(kinds, None)

    def renew(self, make_engine: Callable[[], Engine]) -> None:
        """Replace the engine, and discard the programs."""
        self.make_engine, self._engine = make_engine, None
        self._programs.clear()

    def draws(self, kinds: Kinds) -> bool:
        """Whether a run draws random numbers, and so needs a seed that is the same on all ranks."""
        if kinds not in self._drawing:  # asked of the whole graph: all ranks draw together
            self._drawing[kinds] = any(given.kind is InputKind.SEED for given in select(self.graph, kinds)[0])
        return self._drawing[kinds]

    def seed(self, kinds: Kinds) -> torch.Tensor | None:
        """A seed for a run, the same on all ranks; None where nothing is random."""
        return self.engine.seed() if self.draws(kinds) else None

    def run(self, kinds: Kinds, inputs: Inputs, watch: Probe | None = None, kept: RunStart | None = None) -> Results:
        """Run the ranks of this process on global inputs, or on this rank's shard of each; commit new content of stored
        values.

        Returns the distinct shards of every output (under ``torchrun`` this rank's own). ``kept`` is the start of an
        earlier run, to be replayed.

        Raises:
            Error: a guard fails: the model would take another path for these inputs. Nothing is stored.
        """
        start = RunStart(self.seed(kinds), {}) if kept is None else kept
        if self.larger is not None:
            return self.larger.run(kinds, inputs, watch, start)
        programs, engine = self.programs(kinds), self.engine
        autocast = torch.autocast(engine.device.type, enabled=False)  # casts are in the programs
        with torch.no_grad(), as_current(engine.device), autocast:
            self.store.refresh()
            run = _StepInputs(inputs, start, self._owners(programs) if len(programs) > 1 else {})
            values = {rank: self._given(each, rank, run) for rank, each in programs.items()}
            try:
                outs = engine.run(programs, values, watch)
                for rank, out in outs.items():
                    for output, lost in zip(programs[rank].outputs, out, strict=True):
                        if output.kind is OutputKind.OVERFLOW:
                            check_room(lost)
            except Overflow:
                assert self.more_room is not None
                self.larger = self.more_room()
                return self.larger.run(kinds, inputs, watch, start)
            except Error:
                guarded = any(output.guard for each in programs.values() for output in each.outputs)
                if kinds and guarded and len(programs) == self.graph.mesh.size:
                    self.run(frozenset(), inputs)  # the guards alone, of which one may say why
                raise
            for rank, out in outs.items():
                check_guards(programs[rank].outputs, out)
            return self._kept(programs, outs)

    def _kept(self, programs: Mapping[int, RankProgram], outs: Mapping[int, Sequence[torch.Tensor]]) -> Results:
        """The distinct shards of the ranks' results; new content of stored values is committed."""
        made: dict[Output, dict[int, torch.Tensor]] = {}
        for rank in sorted(outs):
            for output, new in zip(programs[rank].outputs, outs[rank], strict=True):
                own_shards, shard = made.setdefault(output, {}), self.shards(output).by_rank[rank]
                if shard not in own_shards:
                    own_shards[shard] = new
                    if output.kind.is_kept:
                        self.store.commit(output.name, rank, new)
        self.store.publish()
        return {(output.kind, output.name): [each[i] for i in sorted(each)] for output, each in made.items()}

    def full(self, output: Output, own_shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The global tensor of an output."""
        assert output.value.spec is not None
        return self.store.assemble(output.value.spec, output.value.shape, own_shards)

    def shards(self, of: Input | Output) -> Shards:
        """The shard layout of an input or output: the shard number of each rank."""
        key = type(of), of.kind, of.name
        if key not in self._shards:
            assert of.value.spec is not None
            self._shards[key] = Shards.of(of.value.spec, of.value.shape, self.graph.mesh)
        return self._shards[key]

    def _given(self, program: RankProgram, rank: int, run: _StepInputs) -> list[torch.Tensor]:
        """The input tensors of a rank: ranks with equal shards share one tensor. Where some of them overwrite it, its
        owner gets the store's, and the others copies."""
        made = [self._shard(each, rank, run) for each in program.inputs]
        copied: dict[torch.dtype, list[int]] = {}
        for place, each in enumerate(program.inputs if run.owners else ()):
            if each.kind in HELD and run.owners.get((each.name, self.shards(each).by_rank[rank]), rank) != rank:
                if each.pool or not made[place].is_contiguous():
                    made[place] = made[place].clone()
                else:
                    copied.setdefault(made[place].dtype, []).append(place)
        for dtype, places in copied.items():  # one kernel for all
            shared = [made[place] for place in places]
            copies = contiguous_tensors([each.shape for each in shared], dtype, shared[0].device)
            torch._foreach_copy_(copies, shared)
            for place, copy in zip(places, copies, strict=True):
                made[place] = copy
        return made

    def _owners(self, programs: Mapping[int, RankProgram]) -> Mapping[tuple[str, int], int]:
        """The owner of each shard that is overwritten: the first rank that does so, whose result is kept."""
        found: dict[tuple[str, int], int] = {}
        for rank in sorted(programs):
            renewed = self._renewed(programs[rank])
            for each in programs[rank].inputs:
                if each.kind in HELD and each.name in renewed:
                    found.setdefault((each.name, self.shards(each).by_rank[rank]), rank)
        return found

    def _shard(self, inp: Input, rank: int, run: _StepInputs) -> torch.Tensor:
        """A rank's shard of one input."""
        name, kept = inp.name, run.start
        if inp.kind in HELD:
            return kept.buffers[name, rank] if (name, rank) in kept.buffers else self.store.shard(name, rank)
        if inp.kind is InputKind.SEED:
            assert kept.seed is not None
            return kept.seed
        known = self._constants if inp.kind is InputKind.CONSTANT else run.shards
        which = self.shards(inp).by_rank[rank]
        if (name, which) not in known:
            full = inp.constant if inp.kind is InputKind.CONSTANT else run.inputs[name]
            if full is None:
                raise Error(f"constant {name!r} has no content", where="a graph read from text")
            device = self._engine.device if self._engine is not None else full.device
            is_local = tuple(full.shape) != inp.value.shape
            shard = full if is_local else self.shards(inp).sharding(full, which)
            known[name, which] = with_dim_order(on_device(shard, device), inp.dim_order)
        return known[name, which]

    def _renewed(self, program: RankProgram) -> frozenset[str]:
        """The names of stored values that a program may overwrite."""
        if program not in self._written:
            results: Any = program.result().args[0]
            pairs = zip(program.outputs, results, strict=True)
            written = (o.name for o, r in pairs if o.kind.is_kept and (o.kind.is_stepped or destination(r) is not None))
            self._written[program] = frozenset(written)
        return self._written[program]

    def local_shapes(self, inp: Input) -> set[tuple[int, ...]]:
        """The local shapes that a rank of this process may pass for an input, beside the global one."""
        if len(self.ranks) == self.graph.mesh.size:  # all are here
            return set()
        shards = self.shards(inp)
        return {shards.local_shapes[shards.by_rank[rank]] for rank in self.ranks}

    def rank_inputs(self, rank: int, program: RankProgram, inputs: Inputs) -> dict[str, torch.Tensor]:
        """The inputs of a rank's program by name, as far as they are known here."""
        finish(self.engine.device)
        self.store.refresh()
        run, store = _StepInputs(inputs, RunStart(torch.zeros((), dtype=torch.int64), {}), {}), self.store
        known = {*inputs, *store.parameters, *store.buffers, *store.states}
        given = [g for g in program.inputs if g.kind in (InputKind.SEED, InputKind.CONSTANT) or g.name in known]
        return {g.name: self._shard(g, rank, run).cpu().clone() for g in given if rank in self.ranks}


def check_guards(outputs: Sequence[Output], out: Sequence[torch.Tensor]) -> None:
    """Raise where a guarded value differs from that of the example with which the program was captured.

    Raises:
        Error: naming the model's line, and both values.
    """
    for output, value in zip(outputs, out, strict=True):
        guard = output.guard
        if guard is None or guard.holds(value := value.cpu()):
            continue
        where = "  ".join(part for part in (str(guard.where), guard.where.code) if part)
        unlike = "these data lead the model elsewhere than the example did"
        raise Error(
            f"{guard.op} cannot be computed of these data" if guard.op else unlike,
            where=where,
            expected=f"{guard.expected!r:.200}, as for the example that was captured",
            got=f"{value.tolist()!r:.200}",
            remedy="call the model on one device, which says more of such data; or parallelize it once more, with an "
            "example that takes this way",
        )
