"""The engine under ``torchrun``: this process is one rank of the mesh, and runs that rank's program.

Parameters are DTensors (see :mod:`.homes`), so that optimizers, ``clip_grad_norm_`` and
``torch.distributed.checkpoint`` work as they do elsewhere. What is asked of all ranks (``load``, ``whole``, ``join``)
must be called on all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Input, InputKind, Output, OutputKind
from shardfx.ir.ops.comm import CommOp, all_gather, fused
from shardfx.ir.program.lower import generate
from shardfx.ir.program.rank_program import Program
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.shards import Shards, cut_local
from shardfx.ir.spec import Spec
from shardfx.runtime.debug.nan_hunt import NanHunt, Stepper
from shardfx.runtime.virtual.virtual_engine import Kinds, Results, seed_tensor

from .dtensor_shard import DTensorShard
from .eager import Eager
from .groups import axes_of, device_mesh, make_groups
from .peer_failure import ended, ending_together, finish_together

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


@dataclass
class DistributedEngine:
    """Runs this process's rank, and holds its pieces of parameters and buffers."""

    graph: Graph
    rules: RuleBook
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    parameters: dict[str, list[nn.Parameter]] = field(default_factory=dict)
    buffers: dict[str, list[Tensor]] = field(default_factory=dict)
    _programs: dict[Kinds, Eager] = field(default_factory=dict)
    _homes: dict[str, DTensorShard] = field(default_factory=dict)
    _constants: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        mesh = self.mesh = self.graph.mesh
        self.rank = dist.get_rank()
        self.device_mesh = device_mesh(mesh, self.device.type)
        with ending_together("comparing the ranks' plans"):
            self._agree()
            make_groups(mesh, axes_of(self.graph))
        self._specs = {given.name: _spec(given) for given in self.graph.inputs}
        self._shapes = {given.name: given.value.shape for given in self.graph.inputs}
        for given in self.graph.inputs:
            if given.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                type_ = given.value.type
                self._homes[given.name] = DTensorShard.of(
                    _spec(given), type_.shape, type_.dtype, mesh, self.device_mesh, self.rank
                )

    def _agree(self) -> None:
        """All ranks have made the same plan: else they would wait for one another for ever."""
        lines = [f"{n.op} {n.kwargs} {n.outs[0].type}" for n in self.graph.nodes if isinstance(n.op, CommOp)]
        lines += [f"{g.name} {g.value.type} {g.value.spec}" for g in self.graph.inputs]
        mine = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        every: list[str | None] = [None] * self.mesh.size
        dist.all_gather_object(every, mine)
        other = [rank for rank, theirs in enumerate(every) if theirs != every[0]]
        if other:
            raise Error(
                "the ranks have made different plans",
                where=f"ranks 0 and {other[0]}",
                expected="the same model, mesh, hints and shapes of example inputs on all ranks",
                got=f"{len(set(every))} different plans",
                remedy="let nothing in the model or the hints depend on the rank; examples are of the global batch",
            )

    # ---- state ----------------------------------------------------------------------------------------------

    def load(self, whole: Mapping[str, Tensor], trainable: Mapping[str, bool]) -> None:
        """Cut rank 0's whole parameters and buffers into the stored pieces; what is stored already is written over."""
        memory = {} if self.parameters else self._neighbours()
        for given in self.graph.inputs:
            name = given.name
            if name not in self._homes or name not in whole:
                continue
            given_whole = whole[name].detach()
            if isinstance(given_whole, DTensor):
                given_whole = given_whole.full_tensor()
            tensor = given_whole.to(self.device, copy=True).contiguous()
            with ending_together(f"the broadcast of {name!r}"):
                dist.broadcast(tensor, 0)
            piece = cut_local(tensor, self._specs[name], self.mesh, self.rank)
            held = self.parameters if given.kind is InputKind.PARAMETER else self.buffers
            if name in held:
                self._homes[name].unwrap(held[name][0].detach()).copy_(piece)
                continue
            home = self._homes[name]
            if given.kind is InputKind.PARAMETER:
                own = memory[name].copy_(piece) if name in memory else piece.clone()
                made = nn.Parameter(home.wrap(own), requires_grad=trainable.get(name, True))
                self.parameters[name] = [made]
            else:
                self.buffers[name] = [home.wrap(piece.clone()) if self._specs[name].axes else piece.clone()]

    def _neighbours(self) -> dict[str, Tensor]:
        """Memory for parameters that are gathered together: side by side, so that nothing is copied before a gather."""
        names = {given.value: given.name for given in self.graph.of_kind(InputKind.PARAMETER)}
        found: dict[str, Tensor] = {}
        for node in self.graph.nodes:
            if node.op is not fused[all_gather] or not all(v in names and names[v] not in found for v in node.operands):
                continue
            together = [(names[value], self.local_shape(names[value])) for value in node.operands]
            sizes = [torch.Size(shape).numel() for _, shape in together]
            flat = torch.empty(sum(sizes), dtype=node.operands[0].type.dtype, device=self.device)
            for (name, shape), part in zip(together, flat.split(sizes), strict=True):
                found[name] = part.view(shape)
        return found

    def whole(self, name: str, pieces: Sequence[Tensor]) -> Tensor:
        """The whole tensor of a stored parameter or buffer (or of its gradient). All ranks call it alike."""
        return self._gather(self._specs[name], self._shapes[name], self._homes[name].unwrap(pieces[0].detach()))

    def join(self, output: Output, pieces: Sequence[Tensor]) -> Tensor:
        """The whole of an output. All ranks call it alike."""
        assert output.value.spec is not None
        return self._gather(output.value.spec, output.value.shape, pieces[0])

    def _gather(self, spec: Spec, shape: Sequence[int], piece: Tensor) -> Tensor:
        """Every rank's piece, padded to one size, then put where it belongs."""
        axes = self.mesh.sort(spec.axes)
        if not axes:
            return piece.clone()
        largest = spec.local_numel(shape, self.mesh)
        padded = piece.new_zeros(largest)
        padded[: piece.numel()].copy_(piece.reshape(-1))
        make_groups(self.mesh, [axes])
        n, group = self.mesh.extent(axes), self.mesh.group_name(self.rank, axes)
        with ending_together("gathering a whole tensor"):
            everyone = c10d.wait_tensor.default(c10d.all_gather_into_tensor.default(padded, n, group))
        shards = Shards.of(spec, shape, self.mesh)
        pieces: dict[int, Tensor] = {}
        for rank, sent in zip(self.mesh.group(self.rank, axes), everyone.split(largest), strict=True):
            which = shards.by_rank[rank]
            local = shards.local_shapes[which]
            pieces[which] = sent[: torch.Size(local).numel()].reshape(local)
        return shards.join([pieces[i] for i in range(shards.count)])

    # ---- running --------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> list[int]:
        """The ranks that run in this process."""
        return [self.rank]

    def program(self, kinds: Kinds) -> Eager:
        """This rank's program for the outputs of some kinds, made once."""
        if kinds not in self._programs:
            self._programs[kinds] = Eager(generate(self.graph, self.rank, self.rules, kinds), self.device)
        return self._programs[kinds]

    def run(self, kinds: Kinds, inputs: Mapping[str, Tensor], hunt: NanHunt | None = None) -> Results:
        """Run this rank's program on global or local inputs; gives its piece of every output. A ``hunt`` looks at
        every node.

        Raises:
            Error: the program raised here, or on another rank while this one waited for it (see :mod:`.lost`).
        """
        eager = self.program(kinds)
        program = eager.program
        with torch.no_grad():
            seed = self._seed() if any(g.kind is InputKind.SEED for g in program.inputs) else None
            given = [self._piece(g, inputs, seed) for g in program.inputs]
            runner = eager if hunt is None else Stepper(program, hunt.watch(self.rank))
            try:
                outs = runner(*given)
            except Exception as error:
                raise ended(runner.node_of(error), error) from error
            if hunt is not None:
                finish_together()
            return {
                (o.kind, o.name): [self._homes[o.name].wrap(out) if o.kind is OutputKind.GRADIENT else out]
                for o, out in zip(program.outputs, outs, strict=True)
            }

    def _seed(self) -> Tensor:
        """Rank 0's draw. All ranks draw, so that generators that start alike stay alike."""
        seed = seed_tensor().to(self.device)
        with ending_together("the broadcast of the step's seed"):
            dist.broadcast(seed, 0)
        return seed

    def _piece(self, given: Input, inputs: Mapping[str, Tensor], seed: Tensor | None) -> Tensor:
        name = given.name
        if given.kind is InputKind.PARAMETER:
            return self._homes[name].unwrap(self.parameters[name][0])
        if given.kind is InputKind.BUFFER:
            return self._homes[name].unwrap(self.buffers[name][0])
        if given.kind is InputKind.SEED:
            assert seed is not None
            return seed
        if given.kind is InputKind.CONSTANT:
            if name not in self._constants:
                if given.constant is None:
                    raise Error(f"constant {name!r} has no content", where="a graph read from text")
                piece = cut_local(given.constant, self._specs[name], self.mesh, self.rank)
                self._constants[name] = piece.to(self.device)
            return self._constants[name]
        tensor = inputs[name].to(self.device)
        if tuple(tensor.shape) == self._shapes[name]:
            return cut_local(tensor, self._specs[name], self.mesh, self.rank)
        return tensor

    def rank_inputs(self, rank: int, program: Program, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What a rank's program starts from, by input name: this rank's own, and of others nothing."""
        seed, found = torch.zeros((), dtype=torch.int64), {}
        for given in program.inputs if rank == self.rank else ():
            stored = given.kind in (InputKind.PARAMETER, InputKind.BUFFER)
            held = self.parameters.get(given.name) or self.buffers.get(given.name) if stored else inputs.get(given.name)
            if held is not None or given.kind in (InputKind.SEED, InputKind.CONSTANT):
                found[given.name] = self._piece(given, inputs, seed).cpu().clone()
        return found

    def store_buffers(self, results: Results) -> None:
        """Keep the new contents of buffers."""
        for (kind, name), pieces in results.items():
            if kind is OutputKind.BUFFER:
                self._homes[name].unwrap(self.buffers[name][0]).copy_(pieces[0])

    def local_shape(self, name: str) -> tuple[int, ...]:
        return self._specs[name].local_shape(self._shapes[name], self.mesh, self.mesh.coords(self.rank))

    def accepts(self, given: Input, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape may be passed for an input: the global shape, or this rank's own."""
        return tuple(shape) in (given.value.shape, self.local_shape(given.name))

    def shapes(self, given: Input) -> str:
        return f"the global shape {given.value.shape}, or this rank's {self.local_shape(given.name)}"

    def is_local(self, given: Input, shape: Sequence[int]) -> bool:
        """Whether a tensor of this shape is this rank's own part, and not the global batch."""
        return tuple(shape) != given.value.shape


def _spec(given: Input) -> Spec:
    assert given.value.spec is not None
    return given.value.spec
