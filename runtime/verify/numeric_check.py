"""Numeric verification: all ranks' programs, in this process, compared with one device on random numbers.

Floating-point numbers are float64 (dtypes among arguments too), so that another order of summation costs 1e-12 and a
wrong program is told from a rounded one. A program of float64 alone runs as it is, so that a stray cast shows as well.
Weights are random, too: a fresh model's zero biases and unit norms hide mistakes. Dropout masks are drawn shard by
shard, as the ranks draw them. What is shown holds for these numbers only. :class:`Counterexample` looks for numbers
that refute what could not be proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from shardfx.ir.capture.graph_interpreter import Draw, interpret
from shardfx.ir.cost.flops import flops_of
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, OutputKind, Value
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.loops.schedule_actions import local_ends
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.local import NodeShard, is_sharded
from shardfx.ir.shards import Shards, local_shard, wide
from shardfx.ir.spec import Spec
from shardfx.runtime.virtual.virtual_engine import VirtualEngine

from .decomposition import widened
from .fault import Fault, first_line

Tensor = torch.Tensor
aten = torch.ops.aten
P = TypeVar("P", Graph, RankProgram)

MOST_IN_A_VALUE = 1 << 26
"""The most elements of any one value."""
MOST_TO_RUN = 1 << 30
"""The most elements of all values of the model together."""
MOST_IN_ALL = 1 << 28
"""The most elements of all values, of one device and of the ranks, for which a counterexample is searched."""
MOST_CALLS = 200_000
"""The most calls of all ranks' programs for which a counterexample is searched."""
MOST_FLOPS = 1e11
SEEDS = range(3)
"""The seeds of random inputs, tried in turn: a fault may hide behind a relu that is 0 anyway."""
TOLERANCE = 1e-9
FAILS = (Error, *DOES_NOT_RUN)
"""Exceptions of programs that cannot be run."""


# ---- comparison ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sample:
    """Global inputs by name, and graphs in the precision in which they are compared."""

    before: Graph
    after: Graph
    inputs: dict[str, Tensor]
    wide: bool


def compare(
    before: Graph,
    after: Graph,
    modules: Mapping[int, RankProgram],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    known: Mapping[str, Tensor],
    seed: int = 0,
) -> tuple[Fault | None, dict[str, int]]:
    """The first output of a rank that differs from the captured graph's, or None; and the counts of what was checked.

    ``known`` are inputs whose content counts (indices, masks).
    """
    sample, mesh = draw_sample(before, after, known, seed), after.mesh
    counts = {"ranks": len(modules), "outputs": len(outputs) * len(modules)}
    wanted_of = {o.value for o in sample.before.outputs}
    one = interpret(sample.before, sample.inputs, draw_masks(sample.after), wanted_of)
    expected = {(o.kind, o.name): one[o.value] for o in sample.before.outputs}
    lost = [o for o in sample.after.outputs if o.kind is OutputKind.OVERFLOW]
    if lost:
        planned = interpret(sample.after, sample.inputs, draw_masks(sample.after), {o.value for o in lost})
        expected |= {(o.kind, o.name): planned[o.value] for o in lost}
    if any(expected[o.kind, o.name].any() for o in lost):
        what = "there is no room for all rows of random numbers, so that the step would run again with more"
        return Fault(f"{what}; pm.verify() proves it without numbers"), counts
    ends = {r: local_ends(after, inputs, outputs, mesh.coords(r)) for r in range(mesh.size)}
    shards = {
        r: [local_shard(sample.inputs[g.name], _spec(g.value), mesh, r).clone() for g in ends[r][0]] for r in ends
    }
    programs = {r: _widened(modules[r]) if sample.wide else modules[r] for r in ends}
    try:
        got = VirtualEngine(mesh).run(programs, shards)
    except FAILS as error:
        return Fault(f"the programs do not run to their end: {error}", certain=True), counts
    for rank, results in got.items():
        if len(results) != len(ends[rank][1]):
            what = f"the program returns {len(results)} values, not {len(ends[rank][1])}"
            return Fault(what, rank=rank), counts
    for output in outputs:
        for rank, (_, ins) in ends.items():
            if output not in ins:
                continue
            value = got[rank][ins.index(output)]
            wanted = local_shard(expected[output.kind, output.name], _spec(output.value), mesh, rank)
            error_size = distance(value, wanted)
            if not error_size <= TOLERANCE:
                what = f"a relative error of {error_size:.1e} on random float64 inputs"
                numbers = largest_difference(value, wanted, seed)
                return Fault(what, f"{output.kind.value} {output.name}", rank, numbers=numbers, certain=True), counts
    return None, counts


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, relative to the largest finite element of ``b`` (1e-3 at least); infinite where shape,
    dtype or integers differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0:
        return 0.0
    if not (a.dtype.is_floating_point or a.dtype.is_complex):
        return 0.0 if torch.equal(a, b) else float("inf")
    both = torch.isclose(a, b, rtol=0, atol=0, equal_nan=True)
    scale = float(b[torch.isfinite(b)].abs().max()) if torch.isfinite(b).any() else 1.0
    return float(torch.where(both, 0.0, (a - b).abs()).max()) / max(scale, 1e-3)


def largest_difference(got: Tensor, wanted: Tensor, seed: int) -> str:
    """A description of the element in which two tensors differ most; ``seed`` is that of the inputs."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return f"it is {tuple(got.shape)} of {got.dtype}, and {tuple(wanted.shape)} of {wanted.dtype} of the model"
    same = torch.isclose(got, wanted, rtol=0, atol=0, equal_nan=True)
    off = torch.where(same, 0.0, (wide(got) - wide(wanted)).abs())
    at = int(torch.nan_to_num(off, nan=torch.inf).reshape(-1).argmax())
    place = ", ".join(str(int(i)) for i in torch.unravel_index(torch.tensor(at), got.shape)) if got.dim() else ""
    mine, theirs = wanted.reshape(-1)[at].item(), got.reshape(-1)[at].item()
    digits = next((n for n in (6, 9, 12) if f"{theirs:.{n}g}" != f"{mine:.{n}g}"), 17)
    return (
        f"element [{place}] is {theirs:.{digits}g}, and {mine:.{digits}g} of the model, on random inputs (seed {seed})"
    )


# ---- random inputs ---------------------------------------------------------------------------------------------------


def draw_sample(before: Graph, after: Graph, known: Mapping[str, Tensor], seed: int = 0) -> Sample:
    """Random inputs of the captured shapes.

    Raises:
        Error: the model is too large to be computed here.
    """
    largest, total = max(before.values(), key=lambda value: value.type.numel), _elements(before)
    if largest.type.numel > MOST_IN_A_VALUE or total > MOST_TO_RUN:
        raise Error(
            "the model is too large to be run here on one device",
            where=str(largest.where),
            expected=f"values of at most {MOST_IN_A_VALUE:,} elements, and of {MOST_TO_RUN:,} all together",
            got=f"{largest.shape}, and {total:,} elements all together",
            remedy="verify() without run=True, or run a smaller configuration of the model",
        )
    used = {v.type.dtype for v in before.values() if v.type.dtype.is_floating_point}
    random = torch.Generator().manual_seed(seed)
    inputs = {inp.name: _random(before, inp, known.get(inp.name), random) for inp in before.inputs}
    if used == {torch.float64}:
        return Sample(before, after, inputs, False)
    return Sample(_widened(before), _widened(after), inputs, True)


POSITIVE = (InputKind.BUFFER, InputKind.STATE, InputKind.OPTION)
"""The kinds of inputs that are drawn positive: they include variances, averages of squares, counts and rates."""


def _random(graph: Graph, inp: Input, content: Tensor | None, random: torch.Generator) -> Tensor:
    type, kind = inp.value.type, inp.kind
    content = inp.constant if kind is InputKind.CONSTANT else content
    if kind is InputKind.SEED:
        return torch.tensor(1234)
    continuous = type.dtype.is_floating_point or type.dtype.is_complex
    if content is not None and (kind is InputKind.CONSTANT or not continuous):
        return wide(content) if continuous else content.detach().clone()
    if kind is InputKind.CONSTANT:
        raise Error(f"constant {inp.name!r} has no content", where="a graph read from text")
    if not continuous:
        return torch.randint(0, _index_bound(graph, inp.value), type.shape, generator=random).to(type.dtype)
    dtype = torch.complex128 if type.dtype.is_complex else torch.float64
    if kind is InputKind.STATE and type.ndim == 0:  # a number of steps, which fused kernels take in float32
        return torch.randint(1, 9, (), generator=random).to(dtype)
    if kind in POSITIVE or (kind is InputKind.PARAMETER and type.ndim < 2):
        return torch.rand(type.shape, dtype=dtype, generator=random) + 0.5
    scale = (type.shape[0] / max(type.numel, 1)) ** 0.5 if kind is InputKind.PARAMETER else 1.0
    return torch.randn(type.shape, dtype=dtype, generator=random) * scale


def _index_bound(graph: Graph, value: Value) -> int:
    """The exclusive upper bound of an index, found by following it to the ops that look something up."""
    same, limits = {value}, []
    for node in graph.nodes:
        if not same & set(node.operands):
            continue
        if node.op is aten.embedding.default and node.operands[1] in same:
            limits.append(node.operands[0].shape[0])
        elif node.op is aten.nll_loss_forward.default and node.operands[1] in same:
            limits.append(node.operands[0].shape[-1])
        elif node.op in (aten.nll_loss2d_forward.default, aten.gather.default) and node.operands[1] in same:
            limits.append(node.operands[0].shape[node.args[1] if node.op is aten.gather.default else 1])
        elif len(node.outs) == 1 and node.outs[0].type.dtype == value.type.dtype:
            same.add(node.outs[0])
    return min(limits, default=2)


def draw_masks(after: Graph) -> Draw:
    """Draws the dropout mask of one device as the ranks of the plan draw it, shard by shard."""
    drawn = {n.args[3]: n for n in after.nodes if not isinstance(n.op, OwnOp) and n.op is dropout}

    def draw(node: Node, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        x, p, seed, number, *_ = args
        planned = drawn[number]
        shards = Shards.of(_spec(planned.outs[0]), tuple(x.shape), after.mesh)
        made = []
        for i in range(shards.count):
            share = NodeShard(planned, after.mesh, after.mesh.coords(shards.by_rank.index(i)))
            box = [share.result_shard(0, d).first for d in range(x.dim())] if is_sharded(planned) else args[4]
            made.append(dropout(shards.sharding(x, i), p, seed, number, box))
        return shards.join([a for a, _ in made]), shards.join([b for _, b in made])

    return draw


def _widened(program: P) -> P:
    """A program or a graph in float64."""
    made = program.copy()
    for node in made.nodes if isinstance(made, Graph) else made.graph.nodes:
        node.args, node.kwargs = widened(tuple(node.args)), widened(dict(node.kwargs))
    return made


def _spec(value: Value) -> Spec:
    return value.spec if value.spec is not None else Spec.replicated(value.type.ndim)


# ---- counterexamples -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counterexample:
    """The search for numbers that refute a plan, where a proof is incomplete."""

    before: Graph
    after: Graph
    known: Mapping[str, Tensor]

    def of_graph(self, fault: Fault) -> Fault:
        """The fault with numbers in which the planned graph, run on one device, differs; or how many draws agree."""
        return self._search(fault, self._of_graph) if _elements(self.before) <= MOST_IN_ALL else fault

    def _search(self, fault: Fault, run: Callable[[Fault, int], Fault | None]) -> Fault:
        """The fault by ``run`` with the first seed that refutes; ``run`` returns None where nothing can be run."""
        agree = 0
        for seed in SEEDS:
            found = run(fault, seed)
            if found is not None and found.certain:
                return found
            agree += found is not None
        on = f"on {agree} random draw{'s' * (agree > 1)}"
        return replace(fault, agrees=on) if agree else fault

    def _of_graph(self, fault: Fault, seed: int) -> Fault | None:
        try:
            sample = draw_sample(self.before, self.after, self.known, seed)
            right = interpret(sample.before, sample.inputs, draw_masks(sample.after))
        except FAILS:
            return None
        try:
            got = interpret(sample.after, sample.inputs, draw_masks(sample.after))
        except FAILS as error:
            return replace(fault, numbers=f"the planned graph does not run: {first_line(error)}", certain=True)
        wanted = {(o.kind, o.name): right[o.value] for o in sample.before.outputs}
        if any(got[o.value].any() for o in sample.after.outputs if o.kind is OutputKind.OVERFLOW):
            return None  # such a step is run again
        outputs = [o for o in sample.after.outputs if o.kind is not OutputKind.OVERFLOW]
        for output in sorted(outputs, key=lambda o: f"{o.kind.value} {o.name}" != fault.output):
            mine, name = wanted[output.kind, output.name], f"{output.kind.value} {output.name}"
            if not distance(got[output.value], mine) <= TOLERANCE:
                numbers = largest_difference(got[output.value], mine, seed)
                return replace(fault, output=name, numbers=numbers, certain=True)
        return fault

    @property
    def affordable(self) -> bool:
        """Whether it is cheap enough to run all ranks."""
        ranks, extent = self.after.mesh.size, self.after.mesh.extent
        local = sum(v.type.numel // extent(v.spec.axes if v.spec else ()) for v in self.after.values())
        if _elements(self.before) + local * ranks > MOST_IN_ALL or len(self.after.nodes) * ranks > MOST_CALLS:
            return False
        return 2 * sum(flops_of(node) for node in self.before.nodes if not isinstance(node.op, OwnOp)) <= MOST_FLOPS

    def of_ranks(
        self,
        fault: Fault,
        program: Callable[[int], RankProgram],
        inputs: Sequence[Input],
        outputs: Sequence[Output],
    ) -> Fault:
        """The fault with numbers in which the ranks' programs differ; or with how many draws agree."""
        if not self.affordable:
            return fault
        modules = {rank: program(rank) for rank in range(self.after.mesh.size)}

        def run(fault: Fault, seed: int) -> Fault | None:
            try:
                found, _ = compare(self.before, self.after, modules, inputs, outputs, self.known, seed)
            except FAILS:
                return None
            if found is None:
                return fault
            numbers = found.numbers or found.what
            return replace(fault, output=found.output or fault.output, numbers=numbers, certain=True)

        return self._search(fault, run)


def _elements(graph: Graph) -> int:
    return sum(value.type.numel for value in graph.values())
