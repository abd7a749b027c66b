"""Soundness of a rule: every sharding and partial sum that it allows is executed rank by rank and recombined.

Each rank's call is made by :func:`shardfx.ir.rules.book.perform`, as code generation makes it, so a rule's ``local``
function is checked as well.

    >>> wrong = refutations(entry, instance(aten.mm.default, (x, w)))
    []
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from shardfx.ir.dim_sharding import DimSharding, Part, compound, smallest
from shardfx.ir.graph import Node, Strategy
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.pack import aligned, dense_last
from shardfx.ir.rules.book import Contiguous, RuleEntry, perform
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule
from shardfx.ir.rules.strategy import Partial, on_axis, strategy
from shardfx.ir.shards import local_shard
from shardfx.ir.spec import REDUCTIONS, Spec

from .draws import LAYOUTS, as_given, beyond, draws, extremes, not_finite
from .instance import Instance, Results, as_results, bind, call, is_float
from .recombine import difference, rounding, split

aten = torch.ops.aten
UNDEFINED = {
    *(aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.new_empty_strided, aten.empty_permuted)
}
"""Ops whose values are uninitialized: only their shapes are compared."""


@dataclass(frozen=True)
class RuleTrial:
    """One way to shard a node: some factors over the axes of a mesh, some operands partial."""

    mesh: Mesh
    shardings: Mapping[str, DimSharding]
    partial: Partial = field(default_factory=dict)

    def __str__(self) -> str:
        words = []
        for f, sharding in self.shardings.items():
            seen = f" as {sharding.text('')}" if sharding.parts else ""
            words.append(f"{f}{seen} over {' '.join(f'{a}={self.mesh[a].size}' for a in sharding.axes)}")
        words += [f"{kind} of operands {sorted(group)} over {axis}" for axis, (kind, group) in self.partial.items()]
        return ", ".join(words)


def trials(rule: ShardingRule, results: Results, tensors: Sequence[torch.Tensor]) -> Iterator[RuleTrial]:
    """Trials of a rule: each factor in 2 and 3 shards (mostly uneven) and in sub-dims, each linear group, and pairs."""
    barred = rule.replicated | (rule.windows.keys() - rule.alone)
    free = [f for f, size in rule.sizes.items() if f not in barred and size > 1 and f in rule.factors]
    for f, count in itertools.product(free, (2, 3)):
        mesh = Mesh(a=count)
        if smallest(rule.sizes[f], ("a",), mesh) > 0:
            yield RuleTrial(mesh, {f: DimSharding(("a",))})
    floats = all(t is None or is_float(t) for t in results)
    groups = [each.operands for each in rule.linear if not each.along]
    groups = [g for g in groups if g and max(g) < len(tensors) and all(is_float(tensors[i]) for i in g)]
    for group in groups:
        ordered = ("max", "min") if not any(tensors[i].is_complex() for i in group) else ()
        for kind in ("sum", "product", *ordered) if floats else ("sum",):
            if rule.passes(kind, group) is not None:
                yield RuleTrial(Mesh(a=2 if kind != "sum" else 3), {}, {"a": (kind, group)})
    for f, group in on_axis(rule, [t.dtype for t in tensors]):
        if f and (group or f in rule.replicated):
            yield RuleTrial(Mesh(a=2), {f: DimSharding(("a",))}, {"a": ("sum", group)} if group else {})
    two = Mesh(a=2, b=2)
    for f in free:
        sharding = as_two_dims(rule.sizes[f], two) if f not in rule.leaders | rule.alone else None
        if sharding is not None:
            yield RuleTrial(two, {f: sharding})
    for f, g in itertools.islice(itertools.combinations(free, 2), 6):
        if rule.sizes[f] >= 2 and rule.sizes[g] >= 2:
            yield RuleTrial(two, {f: DimSharding(("a",)), g: DimSharding(("b",))})
    for f in free[:3]:
        if smallest(rule.sizes[f], ("b", "a"), two) > 0:
            yield RuleTrial(two, {f: DimSharding(("b", "a"))})
        for group in groups[:2]:
            yield RuleTrial(two, {f: DimSharding(("a",))}, {"b": ("sum", group)})


def as_two_dims(size: int, mesh: Mesh) -> DimSharding | None:
    """A compound sharding of a dim as two, both sharded, so that a rank has several segments; None for a prime."""
    inner = next((n for n in range(2, size // 2 + 1) if size % n == 0), 0)
    return compound([Part(size // inner, ("a",)), Part(inner, ("b",))], mesh) if inner else None


def refutations(entry: RuleEntry, of: Instance, *, seed: int = 0, drawn: bool = False) -> list[str]:
    """The trials of a rule on an op instance whose results are wrong, with the difference.

    Args:
        drawn: use other values, each trial on one of the draws. Partial sums are left out if a result is not finite:
        passes take care of that.
    """
    rule, values = entry.make(of.node), list(draws(of, seed)) if drawn else [of]
    found = []
    for number, trial in enumerate(trials(rule, of.results, of.tensors) if rule is not None and values else ()):
        each = values[(number + seed) % len(values)]
        if drawn and trial.partial and not all(r is None or bool(r.isfinite().all()) for r in each.results):
            continue
        assert rule is not None
        why = refute(entry, rule, each, trial, seed)
        if why:
            found.append(f"{of!r}\n    {trial}: {why}{' (of drawn values)' * drawn}")
    return found


def refute(entry: RuleEntry, rule: ShardingRule, of: Instance, trial: RuleTrial, seed: int) -> str:
    """Why a trial is wrong, or ""."""
    try:
        made = strategy(rule, trial.shardings, trial.mesh, trial.partial)
        shards = shard_operands(made, of, trial.mesh, torch.Generator().manual_seed(seed))
        return Execution(entry, made, of, trial.mesh, shards).difference()
    except Exception as error:  # whatever a kernel says of its arguments
        return one_line(error)


def first_difference(entry: RuleEntry, made: Strategy, of: Instance, mesh: Mesh) -> str:
    """How a strategy's results differ from the op on one device: the first difference on several values, or in another
    memory layout of the first ones, if the kernel accepts it; or "".

    Raises:
        Exception: whatever a kernel says of its arguments.
    """
    for number, each in enumerate((as_given(of), *draws(of), *_far_out(entry, of, made))):
        shards = shard_operands(made, each, mesh, torch.Generator().manual_seed(number))
        why = Execution(entry, made, each, mesh, shards).difference()
        if why:
            return why
        for name, layout in LAYOUTS.items() if not number else ():
            moved = {rank: [layout(shard) for shard in operands] for rank, operands in shards.items()}
            with suppress(Exception):
                why = Execution(entry, made, each, mesh, moved).difference()
            if why:
                return f"{why} (shards {name})"
    return ""


def _far_out(entry: RuleEntry, of: Instance, made: Strategy) -> Iterator[Instance]:
    """Extreme values where a rank's version may differ, if it is another op, or if operands are partial. Not for rules
    by rows: there a kernel may multiply by zero a row of NaN that a rank does not have."""
    if any(spec.partial for spec in made.operands):
        yield from beyond(of)
    elif entry.local is not None and torch.Tag.pointwise in getattr(of.node.op, "tags", ()):
        yield from extremes(of)
    elif entry.local is not None and entry.rows is None:
        yield from not_finite(of)


@contextmanager
def undisturbed() -> Iterator[None]:
    """Run ops on the CPU, without dispatch modes, and preserve the user's random state."""
    functions = torch._C.DisableTorchFunction()  # the user's default device among others
    with _disable_current_modes(), functions, torch.random.fork_rng(devices=[]):
        yield


def one_line(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"


@dataclass(frozen=True)
class Execution:
    """The execution of a strategy of an op instance, rank by rank, on the ranks' operands."""

    entry: RuleEntry
    made: Strategy
    of: Instance
    mesh: Mesh
    shards: Mapping[int, Sequence[torch.Tensor]]

    def difference(self) -> str:
        """The difference between the recombined results of the ranks and the op on one device, or "".

        Raises:
            Exception: whatever a kernel says of its arguments.
        """
        of, ranks = self.of, self.ranks()
        undefined = getattr(of.node.op, "overloadpacket", None) in UNDEFINED
        bound = rounding((*of.tensors, *of.results))
        expected = [(i, r) for i, (r, v) in enumerate(zip(of.results, of.node.results, strict=True)) if v is not None]
        for (i, full), spec in zip(expected, self.made.results, strict=True):
            assert full is not None
            parts: dict[int, torch.Tensor] = {}
            for rank, results in ranks.items():
                result = results[i] if i < len(results) else None
                if result is None:
                    return f"rank {rank} has no result {i}"
                parts[rank] = result
            if undefined:
                full, parts = torch.zeros_like(full), {rank: torch.zeros_like(part) for rank, part in parts.items()}
            if why := difference(parts, full, spec, self.mesh, bound):
                return f"result {i} as {spec.text(full.shape)}: {why}"
        return ""

    def ranks(self) -> dict[int, Results]:
        """Every rank's results."""
        node = replace(self.of.node, strategy=self.made)
        return {rank: run(self.entry, node, self.mesh, rank, tensors) for rank, tensors in self.shards.items()}


def run(entry: RuleEntry, node: Node, mesh: Mesh, rank: int, tensors: Sequence[torch.Tensor]) -> Results:
    """Run one rank's version of a node, by the node's strategy, on the rank's operands."""
    args, kwargs = bind(node, [DENSE[entry.contiguous](at_offset(t)) for t in tensors])
    return as_results(perform(entry, Executor(node, mesh, mesh.coords(rank), args, kwargs)))


def shard_operands(
    made: Strategy, of: Instance, mesh: Mesh, generator: torch.Generator
) -> dict[int, list[torch.Tensor]]:
    """Every rank's operands: its shards, and its terms of partial ones."""
    shards: dict[int, list[torch.Tensor]] = {rank: [] for rank in range(mesh.size)}
    for tensor, spec in zip(of.tensors, made.operands, strict=True):
        terms: dict[tuple[int, ...], torch.Tensor] = {(): tensor}
        for axis, kind in spec.partial:
            assert kind in REDUCTIONS
            terms = {
                (*at, i): part
                for at, term in terms.items()
                for i, part in enumerate(split(term, mesh[axis].size, kind, generator))
            }
        for rank, operands in shards.items():
            term = terms[tuple(mesh.coords(rank)[axis] for axis in spec.partial_axes)]
            operands.append(local_shard(term, Spec(spec.dims), mesh, rank))
    return shards


DENSE: dict[Contiguous, Callable[[torch.Tensor], torch.Tensor]] = {
    Contiguous.ANY: lambda x: x,
    Contiguous.LAST_DIM: lambda x: dense_last(x) if x.dim() else x,
    Contiguous.ALL: torch.Tensor.contiguous,
    Contiguous.ALIGNED: aligned,
}
"""How programs lay out an operand for a kernel in memory."""
OFFSET = 3
"""The number of storage elements before and behind an operand under test."""


def at_offset(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor at an offset in a larger storage, as values in programs may be."""
    if not tensor.numel():
        return tensor
    source = tensor.resolve_conj().resolve_neg()
    span = 1 + sum((size - 1) * stride for size, stride in zip(source.shape, source.stride(), strict=True))
    fill = 1 if source.dtype is torch.bool else 0xFF  # NaN, or -1, for what reads beside its operand
    storage = torch.full(((span + 2 * OFFSET) * source.itemsize,), fill, dtype=torch.uint8).view(source.dtype)
    storage[OFFSET : OFFSET + span] = source.as_strided((span,), (1,))
    return storage.as_strided(source.shape, source.stride(), OFFSET)


@dataclass
class Executor(Emit):
    """Executes a rule's ``local`` function op by op on real tensors."""

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        """The op's result on this rank's shards."""
        return call(op, args, kwargs)
