"""Are the rules of a plan right? Each distinct op, arguments and strategy of it is executed on small shapes, and called
without numbers on the ranks' own shapes; once for built-in rules, whose answers are cached on disk. By hand
(:func:`wrong_trials`) all that a rule allows of one call is executed."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.dim_sharding import Coords
from shardfx.ir.graph import Graph, Node, Strategy, Value, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.rules.book import RuleBook, RuleEntry, perform
from shardfx.ir.rules.strategy import partial_operands, strategy
from shardfx.ir.rules.template import Template, Tensor

from .draws import as_given, draws, without_zeros
from .findings import JsonCache, default_folder
from .instance import Instance, as_results, bind, describe, instance
from .run_isolated import Lost, isolated
from .shrink import small_share, used_axes
from .soundness import (
    Executor,
    Failure,
    Refutation,
    RuleTrial,
    far_out,
    first_difference,
    one_line,
    trials,
    undisturbed,
)

SECONDS_EACH = 20.0
"""For one share, in a process of its own."""
RANDOM = (dropout,)
"""Ops whose numbers are drawn by where a rank's shard is: one device draws no such numbers."""
MOST_COORDS = 256
_answered: dict[tuple[int, str], tuple[Answer, RuleEntry]] = {}
"""What was found in this process of rules that are not built in, by the entry's id; the entry is kept alive, so that no
other has its id."""


@dataclass(frozen=True)
class Answer:
    """What the oracle says of a share: what is wrong, or why it could not be executed; neither if it is right."""

    wrong: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class PlannedShare:
    """One distinct op, arguments and strategy of a plan, and its rule.

    ``nonzero`` are the operands, by number, no element of which is zero in the plan, where others are partial sums.
    """

    node: Node
    entry: RuleEntry
    built_in: bool
    nonzero: tuple[int, ...] = ()

    def question(self, mesh: Mesh) -> str:
        """All that the answer depends on, beside the code."""
        made = self.node.strategy
        assert made is not None
        sizes = {axis: mesh[axis].size for axis in used_axes(made)}
        there = [value is not None for value in self.node.results]
        limits = f"; nonzero {self.nonzero}" if self.nonzero else ""
        return f"{describe(self.node)} -> {there}; {made}; {sizes}{limits}"


@dataclass(frozen=True)
class PlanChecked:
    """What the oracle says of a plan.

    ``executed`` shares in this process, ``known`` ones in an earlier one; ``left_out`` could not be executed; ``wrong``
    are refuted.
    """

    executed: int
    known: int
    left_out: Mapping[str, str]
    wrong: Sequence[tuple[Node, str]]


def check_plan(
    graph: Graph,
    rules: RuleBook,
    built_in: RuleBook,
    nonzero: Set[Value] = frozenset(),
    only: Sequence[RuleEntry] | None = None,
) -> PlanChecked:
    """Execute the shares of a planned graph.

    Args:
        built_in: rules whose right answers are cached on disk; nobody can say whether the code behind others changed.
        nonzero: values that are sure to have no zero among their elements: by others no partial sum may be divided.
        only: rules of which alone the shares are executed.
    """
    cached = JsonCache(default_folder().parent / "checked" / f"{torch.__version__}-{sources()}")
    asked = [(share, share.question(graph.mesh)) for share in shares(graph, rules, built_in, nonzero)]
    if only is not None:
        asked = [(share, question) for share, question in asked if any(share.entry is entry for entry in only)]
    answers: dict[str, Answer] = {}
    for share, question in asked:
        if share.built_in:
            kept = cached.get({"question": question})
            if isinstance(kept, str):
                answers[question] = Answer(left_out=kept)
        elif (id(share.entry), question) in _answered:
            answers[question] = _answered[id(share.entry), question][0]
    fresh = [(share, question) for share, question in asked if question not in answers]
    for (share, question), answer in zip(fresh, _execute([s for s, _ in fresh], graph.mesh), strict=True):
        answers[question] = answer
        if not share.built_in:
            _answered[id(share.entry), question] = answer, share.entry
        elif not answer.wrong:
            cached.put({"question": question}, answer.left_out)
    found = [(share.node, answers[question]) for share, question in asked]
    left_out = {op_name(node.op): answer.left_out for node, answer in found if answer.left_out}
    wrong = [(node, answer.wrong) for node, answer in found if answer.wrong]
    return PlanChecked(len(fresh), len(asked) - len(fresh), left_out, wrong)


@cache
def sources() -> str:
    """A digest of what decides whether a rule is right: the source files of ``shardfx.ir``."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def shares(graph: Graph, rules: RuleBook, built_in: RuleBook, nonzero: Set[Value] = frozenset()) -> list[PlannedShare]:
    """The distinct shares of a planned graph that are sharded, or partial, by a rule."""
    found: dict[Any, PlannedShare | None] = {}
    for node in graph.nodes:
        if node.strategy is None:
            continue
        sure = tuple(i for i, value in enumerate(node.operands) if value in nonzero)
        sure = sure if partial_operands(node.strategy) else ()
        key = (alike(node), node.strategy, sure)
        if key in found:
            continue
        entry = rules.entry(node.op) if used_axes(node.strategy) else None
        own = entry is not None and built_in.entry(node.op) is entry
        found[key] = None if entry is None else PlannedShare(node, entry, own, sure)
    return [share for share in found.values() if share is not None]


def _execute(asked: Sequence[PlannedShare], mesh: Mesh) -> list[Answer]:
    """The answers, found in a process of its own: those of built-in rules in one, unless that is lost."""

    def answers(several: Sequence[PlannedShare]) -> list[Answer]:
        return [check_share(share.node, share.entry, mesh, share.nonzero) for share in several]

    together = [share for share in asked if share.built_in]
    found: dict[int, Answer] = {}
    if len(together) > 1:
        try:
            made = isolated(lambda: answers(together), SECONDS_EACH * len(together))
            found = {id(share): answer for share, answer in zip(together, made, strict=True)}
        except Lost:  # by one of them: each is asked alone then, and that one is left out
            found = {}
    for share in asked:
        if id(share) not in found:
            try:
                (found[id(share)],) = isolated(lambda share=share: answers([share]), SECONDS_EACH)  # type: ignore[misc]
            except Lost as lost:
                found[id(share)] = Answer(left_out=str(lost))
    return [found[id(share)] for share in asked]


# ---- one share -------------------------------------------------------------------------------------------------------


def check_share(node: Node, entry: RuleEntry, mesh: Mesh, nonzero: Collection[int] = ()) -> Answer:
    """What is wrong with a node's strategy, or with how its rule's ``local`` writes a rank's version.

    Args:
        nonzero: operands, by number, that have no zero among their elements: on no others is the share executed.
    """
    with undisturbed():
        wrong = fails_without_numbers(node, entry, mesh)
        if wrong:
            return Answer(wrong=wrong)
        if node.op in RANDOM:
            return Answer(left_out="its numbers are drawn")
        small = small_share(node, entry, mesh)
        if small is None:
            return Answer(left_out="it could not be made small")
        values = as_given(small.of), *draws(small.of), *far_out(entry, small.of, small.made)
        on = f"on {describe(small.of.node)}: "
        try:
            given = (without_zeros(each, nonzero) for each in values)
            why = first_difference(entry, small.made, given, small.mesh)
        except Failure as failure:
            return Answer(wrong=f"{on}{failure}") if small.as_it_stands else Answer(left_out=f"{on}{failure}")
        return Answer(wrong=f"{on}{why}" if why else "")


@cache
def _fake_mode() -> FakeTensorMode:
    """One for all, since making one costs more than a call."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fails_without_numbers(node: Node, entry: RuleEntry, mesh: Mesh) -> str:
    """Why a rank's version of a node cannot run on the rank's own shapes, or gives other shapes; or "".

    A dtype that depends on the device is right if the CPU's fake version gives it, or that of no device.
    """
    made = node.strategy
    assert made is not None
    seen = set()
    for coords in _coords(made, node, mesh):
        shapes = [s.local_shape(v.shape, mesh, coords) for v, s in zip(node.operands, made.operands, strict=True)]
        if tuple(shapes) in seen:
            continue
        seen.add(tuple(shapes))

        def results(device: str, shapes: Sequence[tuple[int, ...]] = shapes, coords: Coords = coords) -> list[Any]:
            pairs = zip(shapes, node.operands, strict=True)
            with _fake_mode():
                tensors = [torch.empty(shape, dtype=value.type.dtype, device=device) for shape, value in pairs]
                args, kwargs = bind(node, tensors)
                return as_results(perform(entry, Executor(node, mesh, coords, args, kwargs)))

        try:
            why = _other_shapes(results("cpu"), node, made, mesh, coords)
        except Exception as error:  # whatever an op says of its arguments
            return f"it fails on a rank's shapes {shapes}: {one_line(error)}"
        if why and _other_shapes(results("meta"), node, made, mesh, coords):
            return why
    return ""


def _other_shapes(results: list[Any], node: Node, made: Strategy, mesh: Mesh, coords: Coords) -> str:
    specs = iter(made.results)
    for i, value in enumerate(node.results):
        if value is None:
            continue
        shape = next(specs).local_shape(value.shape, mesh, coords)
        given = results[i] if i < len(results) else None
        if given is None or tuple(given.shape) != shape or given.dtype != value.type.dtype:
            got = "no tensor" if given is None else f"{given.dtype} of shape {list(given.shape)}"
            return f"result {i} of a rank is {got}, by its fake version; expected {value.type.dtype} of {list(shape)}"
    return ""


def _coords(made: Strategy, node: Node, mesh: Mesh) -> Iterator[Coords]:
    """The ranks to look at: the first and the last along each axis that is used, where sizes do not divide all."""
    used = used_axes(made)
    pairs = [*zip(node.operands, made.operands, strict=True), *zip(node.outs, made.results, strict=True)]
    even = all(
        sharding.is_even(size, mesh)
        for value, spec in pairs
        for size, sharding in zip(value.shape, spec.dims, strict=True)
    )
    counts = [mesh[axis].size for axis in used]
    every = not even and math.prod(counts) <= MOST_COORDS
    options = [range(n) if every else sorted({0, n - 1}) for n in counts]
    rest = dict.fromkeys(mesh.names, 0)
    for chosen in itertools.product(*options):
        yield {**rest, **dict(zip(used, chosen, strict=True))}


# ---- rules by hand ---------------------------------------------------------------------------------------------------

SECONDS = 120.0
"""For all that a rule allows on one call."""


def wrong_trials(entry: RuleEntry, of: Instance, most: int = 3) -> list[Refutation]:
    """The first trials of a rule that give another result than the op on one device, on some values or in some memory
    layout."""
    with undisturbed():
        rule = entry.make(of.node)
        if rule is None:
            return []
        found: list[Refutation] = []
        values = [of, *draws(of)]
        for trial in trials(rule, of.results, of.tensors):
            made = strategy(rule, trial.shardings, trial.mesh, trial.partial)
            why = _wrong(entry, made, [*values, *far_out(entry, of, made)], trial)
            if why:
                found.append(Refutation(repr(of), str(trial), why))
            if len(found) >= most:
                break
        return found


def _wrong(entry: RuleEntry, made: Strategy, values: list[Instance], trial: RuleTrial) -> str:
    node = values[0].node
    before, node.strategy = node.strategy, made
    try:
        failure = fails_without_numbers(node, entry, trial.mesh)
    finally:
        node.strategy = before
    try:
        return failure or first_difference(entry, made, values, trial.mesh, strict=True)
    except Failure as error:
        return f"it fails on shards: {error}"


def example(entry: RuleEntry, op: Any) -> Instance | None:
    """A call of an op by its rule's template, with defaults for all that is no tensor; None where that is no call.

    Factors become sizes of their own: ``n d, n -> n d`` is a call with tensors of shapes (4, 6) and (4,).
    """
    if not isinstance(entry.make, Template) or entry.make.more[0]:
        return None
    letters = dict.fromkeys(f for tensor in entry.make.operands for word in tensor.words for f in word.factors)
    sizes = dict(zip(letters, (4, 6, 8, 10, 12, 14), strict=False))
    tensors = iter(entry.make.operands)
    args = []
    for argument in op._schema.arguments:
        given = next(tensors, None) if "Tensor" in str(argument.type) else None
        if given is not None:
            shape = _shape(given, sizes)
            if shape is None or "List" in str(argument.type):
                return None
            args.append(torch.randn(shape, dtype=torch.float64))
        elif not argument.has_default_value():
            return None
        elif argument.kwarg_only:
            break
        else:
            args.append(argument.default_value)
    with undisturbed():
        try:
            return instance(op, args)
        except Exception:  # the op takes other arguments than these
            return None


def _shape(tensor: Tensor, sizes: dict[str, int]) -> tuple[int, ...] | None:
    shape = []
    for factors, many, at in tensor.words:
        if at or many not in ("", "..") or any(f not in sizes for f in factors):
            return None
        shape.append(math.prod(sizes[factor] for factor in factors))
    return tuple(shape)
