"""Dynamic verification: all ranks, in this process, beside the captured program run whole, on random numbers.

Every floating-point number is a float64 (dtypes that the programs name among their arguments too), so that another
order of summation costs 1e-12 and a wrong program is told from a rounded one. A program of float64 alone runs as it
is, so that a stray cast shows as well. Weights are random, too: a fresh model's zero biases and unit norms hide
mistakes. Random masks are drawn box by box, as the ranks draw them. What is shown is shown for these numbers only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardfx.ir.capture.compared.whole_run import Draw, run_whole
from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Graph, Input, InputKind, Node, Output, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.program.loops.schedule_actions import ends_here
from shardfx.ir.program.plain import plain
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.local import Share, is_cut
from shardfx.ir.shards import Shards, cut_local, wide
from shardfx.ir.spec import Spec
from shardfx.runtime.verify.decomposition import widened
from shardfx.runtime.verify.fault import Fault
from shardfx.runtime.verify.first_change import where
from shardfx.runtime.virtual.virtual_engine import VirtualEngine

from .ranks_alike import GroupsAlike, RanksAlike
from .whole import apart_at, distance, first_difference

Tensor = torch.Tensor
aten = torch.ops.aten


MOST = 1 << 26
"""The most elements that any one value may have."""


@dataclass(frozen=True)
class Sample:
    """Whole inputs by name, and graphs in the precision in which they are compared."""

    before: Graph
    after: Graph
    inputs: dict[str, Tensor]
    wide: bool


def verify(
    before: Graph,
    after: Graph,
    book: RuleBook,
    modules: Mapping[int, RankProgram],
    own: Mapping[int, RankProgram],
    inputs: Sequence[Input],
    outputs: Sequence[Output],
    known: Mapping[str, Tensor],
    tolerance: float = 1e-9,
    locate: bool = True,
    seed: int = 0,
    alike: RanksAlike | None = None,
) -> tuple[Fault | None, dict[str, int]]:
    """The first output of a rank that differs from the captured program's, or None; and how much was checked.

    ``own`` are the programs that the plan itself gives: where ``modules`` are others, the first node that computes
    something else than its namesake is named. ``known`` are inputs whose content counts (indices, masks). With
    ``alike`` the ranks that it says are run for all, on inputs that are the same for ranks that are alike; nothing is
    located.
    """
    sample = draw_sample(before, after, known, seed)
    counts = {"ranks": len(modules), "outputs": len(outputs) * len(modules)}
    mesh = after.mesh
    ranks: Sequence[int] = range(mesh.size) if alike is None else alike.ranks
    if alike is not None:
        placed = {given.name: _spec(given.value) for given in after.inputs}
        sample = replace(sample, inputs={name: alike.same(x, placed[name]) for name, x in sample.inputs.items()})
    wanted_of = {o.value for o in sample.before.outputs}
    whole = run_whole(sample.before, sample.inputs, by_boxes(sample.after, alike), wanted_of)
    expected = {(o.kind, o.name): whole[o.value] for o in sample.before.outputs}
    ends = {r: ends_here(after, inputs, outputs, mesh.coords(r)) for r in ranks}
    given = {r: [cut_local(sample.inputs[g.name], _spec(g.value), mesh, r) for g in ends[r][0]] for r in ranks}
    programs = {r: _widened(modules[r]) if sample.wide else modules[r] for r in ranks}
    try:
        got = _run(mesh, programs, given, alike)
    except (Error, *DOES_NOT_RUN) as error:
        return Fault(f"the programs do not run to their end: {error}", certain=True), counts
    for rank, results in got.items():
        if len(results) != len(ends[rank][1]):
            what = f"the program returns {len(results)} values, not {len(ends[rank][1])}"
            return Fault(what, rank=rank), counts
    for output in outputs:
        for rank in ranks:
            if output not in ends[rank][1]:
                continue
            i = ends[rank][1].index(output)
            wanted = cut_local(expected[output.kind, output.name], _spec(output.value), mesh, rank)
            apart = distance(got[rank][i], wanted)
            if not apart <= tolerance:
                name = f"{output.kind.value} {output.name}"
                what = f"a relative error of {apart:.1e} on random float64 inputs"
                fault = Fault(what, name, rank, numbers=apart_at(got[rank][i], wanted, seed), certain=True)
                return _located(fault, sample, book, modules, own, given) if locate else fault, counts
    return None, counts


def alike(before: Graph, after: Graph, known: Mapping[str, Tensor], tolerance: float = 1e-9) -> bool:
    """Whether two graphs, each run whole, give the same outputs: what a plan in other sizes may not do."""
    sample = draw_sample(before, after, known)
    try:
        draw = by_boxes(sample.after)
        mine, theirs = (run_whole(graph, sample.inputs, draw) for graph in (sample.before, sample.after))
    except DOES_NOT_RUN:
        return False
    given = {(o.kind, o.name): theirs[o.value] for o in sample.after.outputs}
    return all(distance(given[o.kind, o.name], mine[o.value]) <= tolerance for o in sample.before.outputs)


def _located(
    fault: Fault,
    sample: Sample,
    book: RuleBook,
    modules: Mapping[int, RankProgram],
    own: Mapping[int, RankProgram],
    given: Mapping[int, Sequence[Tensor]],
) -> Fault:
    """The same fault, at the first node that differs."""
    if modules is own:
        draw = by_boxes(sample.after)
        found = first_difference(sample.after, book, sample.inputs, draw=draw)
        if found is None:
            return fault
        what = f"{fault.what}, first seen at %{found.value.name} on rank {found.rank}"
        return Fault(what, fault.output, fault.rank, found.value.name, str(found.value.where))
    mine, theirs = ({r: _every(ms[r], sample.wide) for r in given} for ms in (own, modules))
    values = [_run(sample.after.mesh, {r: ms[r][0] for r in ms}, given) for ms in (mine, theirs)]
    apart: list[tuple[int, bool, int, str]] = []
    for rank, (_, names) in theirs.items():
        right = dict(zip(mine[rank][1], values[0][rank], strict=True))
        for at, (name, value) in enumerate(zip(names, values[1][rank], strict=True)):
            if isinstance(value, Tensor) and not (name in right and distance(value, right[name]) <= 1e-12):
                apart.append((at, modules[rank] is own[rank], rank, name))
                break
    if not apart:
        return fault
    _, _, rank, name = min(apart)
    node = next(n for n in theirs[rank][0].graph.nodes if n.name == name)
    return replace(fault, rank=rank, node=name, where=where(node))


def _run(
    mesh: Mesh,
    programs: Mapping[int, RankProgram],
    given: Mapping[int, Sequence[Tensor]],
    alike: RanksAlike | None = None,
) -> Mapping[int, Sequence[Tensor]]:
    """Run programs on copies of their inputs."""
    inputs = {rank: [t.clone() for t in each] for rank, each in given.items()}
    engine = VirtualEngine(mesh) if alike is None else VirtualEngine(mesh, groups=GroupsAlike(alike))
    return engine.run(programs, inputs)


def _every(program: RankProgram, wide: bool) -> tuple[RankProgram, list[str]]:
    """The program returning every value that it computes, each in memory of its own, and their names."""
    made = plain(_widened(program) if wide else program)
    nodes = [n for n in made.graph.nodes if n.op == "call_function"]
    made.result().args = (tuple(nodes),)
    return made, [n.name for n in nodes]


def _widened(program: RankProgram) -> RankProgram:
    made = program.copy()
    for node in made.graph.nodes:
        node.args, node.kwargs = widened(tuple(node.args)), widened(dict(node.kwargs))
    return made


# ---- random inputs -----------------------------------------------------------------------------------------------


def draw_sample(before: Graph, after: Graph, known: Mapping[str, Tensor], seed: int = 0) -> Sample:
    """Random inputs of the captured shapes.

    Raises:
        Error: a value is too large to be computed here.
    """
    for value in before.values():
        if value.type.numel > MOST:
            raise Error(
                "the model is too large to be run here on one device",
                where=str(value.where),
                expected=f"values of at most {MOST} elements",
                got=value.shape,
                remedy="verify() without run=True, or run a smaller configuration of the model",
            )
    used = {v.type.dtype for v in before.values() if v.type.dtype.is_floating_point}
    wide = used != {torch.float64}
    random = torch.Generator().manual_seed(seed)
    inputs: dict[str, Tensor] = {}
    for given in before.inputs:
        content = given.constant if given.kind is InputKind.CONSTANT else known.get(given.name)
        inputs[given.name] = _random(before, given, content, random)
    return Sample(_wide(before) if wide else before, _wide(after) if wide else after, inputs, wide)


POSITIVE = (InputKind.BUFFER, InputKind.STATE, InputKind.OPTION)
"""Variances, averages of squares, counts and rates are among them."""


def _random(graph: Graph, given: Input, content: Tensor | None, random: torch.Generator) -> Tensor:
    type = given.value.type
    if given.kind is InputKind.SEED:
        return torch.tensor(1234)
    continuous = type.dtype.is_floating_point or type.dtype.is_complex
    if continuous and given.kind is InputKind.CONSTANT and content is not None:
        return wide(content)
    if not continuous and content is not None:
        return content.detach().clone()
    if given.kind is InputKind.CONSTANT:
        raise Error(f"constant {given.name!r} has no content", where="a graph read from text")
    if not continuous:
        return torch.randint(0, _range(graph, given.value), type.shape, generator=random).to(type.dtype)
    dtype = torch.complex128 if type.dtype.is_complex else torch.float64
    if given.kind in POSITIVE or (given.kind is InputKind.PARAMETER and type.ndim < 2):
        return torch.rand(type.shape, dtype=dtype, generator=random) + 0.5
    scale = (type.shape[0] / max(type.numel, 1)) ** 0.5 if given.kind is InputKind.PARAMETER else 1.0
    return torch.randn(type.shape, dtype=dtype, generator=random) * scale


def _range(graph: Graph, value: Value) -> int:
    """Below what an index must lie: it is followed to the ops that look something up."""
    same, least = {value}, 2
    limits = []
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
    return min(limits, default=least)


def _wide(graph: Graph) -> Graph:
    made = graph.copy()
    for node in made.nodes:
        node.args, node.kwargs = widened(node.args), widened(node.kwargs)
    return made


# ---- random masks ------------------------------------------------------------------------------------------------


def by_boxes(after: Graph, alike: RanksAlike | None = None) -> Draw:
    """Draws a mask of the whole as the ranks of the plan draw it, box by box; for ranks that are not run as the rank
    does which is run for them."""
    drawn = {n.args[3]: n for n in after.nodes if not isinstance(n.op, OwnOp) and n.op is dropout}

    def draw(node: Node, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        x, p, seed, number, *_ = args
        planned = drawn[number]
        spec = _spec(planned.outs[0])
        shards = Shards.of(spec, tuple(x.shape), after.mesh)
        pieces = []
        for i in range(shards.count):
            first = shards.first_rank(i)
            share = Share(planned, after.mesh, after.mesh.coords(first if alike is None else alike.of(first)))
            box = [share.result_held(0, d).first for d in range(x.dim())] if is_cut(planned) else args[4]
            pieces.append(dropout(shards.cut(x, i), p, seed, number, box))
        return shards.join([a for a, _ in pieces]), shards.join([b for _, b in pieces])

    return draw


def _spec(value: Value) -> Spec:
    return value.spec if value.spec is not None else Spec.whole(value.type.ndim)
