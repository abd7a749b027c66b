"""Verification of a plan's rules: each distinct op, arguments and strategy is executed on small shapes, and run with
fake tensors on the ranks' own shapes; answers for built-in rules are cached on disk. :func:`wrong_trials` executes
all strategies that a rule allows for one call."""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from shardfx.ir.dim_sharding import Coords
from shardfx.ir.graph import Graph, Node, Strategy, op_name
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.alike import alike
from shardfx.ir.ops.dropout import dropout
from shardfx.ir.rules.book import RuleBook, RuleEntry, perform
from shardfx.ir.rules.strategy import strategy

from .instance import Instance, as_results, bind, describe
from .run_isolated import Lost, isolated
from .shrink import small_share, used_axes
from .soundness import Executor, first_difference, one_line, trials, undisturbed

SECONDS_EACH = 20.0
"""The time limit of one share, which runs in a subprocess."""
RANDOM = (dropout,)
"""Ops whose random numbers depend on the position of a rank's shard: one device draws others."""
MOST_COORDS = 64
_answered: dict[tuple[int, str], tuple[Answer, RuleEntry]] = {}
"""Answers in this process for rules that are not built in, by the entry's id; the entry is kept alive, so that the id
is not reused."""


@dataclass(frozen=True)
class Answer:
    """The oracle's answer for a share: what is wrong, or why it was not executed; both empty if it is right."""

    wrong: str = ""
    left_out: str = ""


@dataclass(frozen=True)
class PlannedShare:
    """A planned share: one distinct op, arguments and strategy of a plan, and its rule."""

    node: Node
    entry: RuleEntry
    built_in: bool

    def question(self, mesh: Mesh) -> str:
        """The cache key of a share: all that the answer depends on, besides the code."""
        made = self.node.strategy
        assert made is not None
        sizes = {axis: mesh[axis].size for axis in used_axes(made)}
        there = [value is not None for value in self.node.results]
        return f"{describe(self.node)} -> {there}; {made}; {sizes}"


@dataclass(frozen=True)
class PlanChecked:
    """The oracle's answers for a plan.

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
    only: Sequence[RuleEntry] | None = None,
) -> PlanChecked:
    """Check the shares of a planned graph by executing them.

    Args:
        built_in: rules whose right answers are cached on disk; changes in the code of others would go unnoticed.
        only: the rules to check; all by default.
    """
    asked = [(share, share.question(graph.mesh)) for share in shares(graph, rules, built_in)]
    if only is not None:
        asked = [(share, question) for share, question in asked if any(share.entry is entry for entry in only)]
    answers = {question: known for share, question in asked if (known := _recalled(share, question)) is not None}
    fresh = [(share, question) for share, question in asked if question not in answers]
    for (share, question), answer in zip(fresh, _execute([s for s, _ in fresh], graph.mesh), strict=True):
        answers[question] = answer
        _remember(share, question, answer)
    found = [(share.node, answers[question]) for share, question in asked]
    left_out = {op_name(node.op): answer.left_out for node, answer in found if answer.left_out}
    wrong = [(node, answer.wrong) for node, answer in found if answer.wrong]
    return PlanChecked(len(fresh), len(asked) - len(fresh), left_out, wrong)


def _recalled(share: PlannedShare, question: str) -> Answer | None:
    """The cached answer for a share: of built-in rules from disk, of others from this process."""
    if not share.built_in:
        return _answered.get((id(share.entry), question), (None, None))[0]
    with suppress(OSError, ValueError):
        return Answer(left_out=_file(question).read_text(encoding="utf-8"))
    return None


def _remember(share: PlannedShare, question: str, answer: Answer) -> None:
    """Cache an answer: of a built-in rule on disk, if it is right (the file is replaced atomically)."""
    if not share.built_in:
        _answered[id(share.entry), question] = answer, share.entry
    elif not answer.wrong:
        path = _file(question)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            new = path.with_suffix(f".{os.getpid()}")
            new.write_text(answer.left_out, encoding="utf-8")
            new.replace(path)


def _file(question: str) -> Path:
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    digest = hashlib.sha256(question.encode()).hexdigest()
    return home / "shardfx" / "checked" / f"{torch.__version__}-{_sources()}" / digest[:32]


@cache
def _sources() -> str:
    """A digest of all code that decides whether a rule is right: the source files of ``shardfx.ir``."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def shares(graph: Graph, rules: RuleBook, built_in: RuleBook) -> list[PlannedShare]:
    """The distinct shares of a planned graph that are sharded, or partial, and have a rule."""
    found: dict[Any, PlannedShare | None] = {}
    for node in graph.nodes:
        if node.strategy is None:
            continue
        key = (alike(node), node.strategy)
        if key in found:
            continue
        entry = rules.entry(node.op) if used_axes(node.strategy) else None
        own = entry is not None and built_in.entry(node.op) is entry
        found[key] = None if entry is None else PlannedShare(node, entry, own)
    return [share for share in found.values() if share is not None]


def _execute(asked: Sequence[PlannedShare], mesh: Mesh) -> list[Answer]:
    """The answers, computed in a subprocess; if it crashes, in one for each share."""

    def answers() -> list[Answer]:
        return [check_share(share.node, share.entry, mesh) for share in asked]

    try:
        return isolated(answers, SECONDS_EACH * len(asked)) if asked else []
    except Lost as lost:
        if len(asked) == 1:
            return [Answer(left_out=str(lost))]
        return [answer for share in asked for answer in _execute([share], mesh)]


# ---- one share -------------------------------------------------------------------------------------------------------


def check_share(node: Node, entry: RuleEntry, mesh: Mesh) -> Answer:
    """Check a node's strategy, and the rank's version that its rule's ``local`` writes."""
    with undisturbed():
        wrong = fails_without_numbers(node, entry, mesh)
        if wrong:
            return Answer(wrong=wrong)
        if node.op in RANDOM:
            return Answer(left_out="its numbers are drawn")
        small = small_share(node, entry, mesh)
        if small is None:
            return Answer(left_out="it could not be made small")
        on = f"on {describe(small.of.node)}: "
        try:
            why = first_difference(entry, small.made, small.of, small.mesh)
        except Exception as error:  # whatever a kernel says of its arguments
            said = f"{on}{one_line(error)}"
            return Answer(wrong=said) if small.as_it_stands else Answer(left_out=said)
        return Answer(wrong=f"{on}{why}" if why else "")


@cache
def _fake_mode() -> FakeTensorMode:
    """The shared fake mode, since creating one costs more than a call."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fails_without_numbers(node: Node, entry: RuleEntry, mesh: Mesh) -> str:
    """Why a rank's version of a node fails with fake tensors of its shapes, or gives other shapes; or "".

    The result dtype may depend on the device: it must match that of the CPU's fake version, or of the meta device.
    """
    made = node.strategy
    assert made is not None
    seen = set()
    for coords in _coords(made, mesh):
        shapes = tuple(s.local_shape(v.shape, mesh, coords) for v, s in zip(node.operands, made.operands, strict=True))
        if shapes in seen:
            continue
        seen.add(shapes)
        pairs = zip(node.outs, made.results, strict=True)
        expected = [f"{v.type.dtype} of {list(spec.local_shape(v.shape, mesh, coords))}" for v, spec in pairs]
        try:
            found = _fake_results(node, entry, mesh, coords, shapes, "cpu")
            if found != expected and _fake_results(node, entry, mesh, coords, shapes, "meta") != expected:
                return f"the results of a rank are {found}, by its fake version; expected {expected}"
        except Exception as error:  # whatever an op says of its arguments
            return f"it fails on a rank's shapes {list(shapes)}: {one_line(error)}"
    return ""


def _fake_results(
    node: Node, entry: RuleEntry, mesh: Mesh, coords: Coords, shapes: Sequence[tuple[int, ...]], device: str
) -> list[str]:
    """Dtype and shape of a rank's results on fake operands of these shapes."""
    with _fake_mode():
        pairs = zip(shapes, node.operands, strict=True)
        args, kwargs = bind(node, [torch.empty(s, dtype=v.type.dtype, device=device) for s, v in pairs])
        results = as_results(perform(entry, Executor(node, mesh, coords, args, kwargs)))
    both = itertools.zip_longest(results[: len(node.results)], node.results)
    return ["no tensor" if r is None else f"{r.dtype} of {list(r.shape)}" for r, v in both if v is not None]


def _coords(made: Strategy, mesh: Mesh) -> Iterator[Coords]:
    """The coordinates to check: all along the used axes; on a large mesh the first and the last along each axis."""
    used = used_axes(made)
    every = mesh.extent(used) <= MOST_COORDS
    options = [range(n) if every else sorted({0, n - 1}) for n in (mesh[axis].size for axis in used)]
    for chosen in itertools.product(*options):
        yield {**dict.fromkeys(mesh.names, 0), **dict(zip(used, chosen, strict=True))}


# ---- rules by hand ---------------------------------------------------------------------------------------------------

SECONDS = 120.0
"""The time limit for all that a rule allows on one call."""


def wrong_trials(entry: RuleEntry, of: Instance, most: int = 3) -> list[str]:
    """The first trials of a rule that give another result than the op on one device, on some values or in some memory
    layout."""
    with undisturbed():
        rule = entry.make(of.node)
        if rule is None:
            return []
        found: list[str] = []
        for trial in trials(rule, of.results, of.tensors):
            made = strategy(rule, trial.shardings, trial.mesh, trial.partial)
            why = fails_without_numbers(replace(of.node, strategy=made), entry, trial.mesh)
            try:
                why = why or first_difference(entry, made, of, trial.mesh)
            except Exception as error:  # whatever a kernel says of its arguments
                why = f"it fails on shards: {one_line(error)}"
            if why:
                found.append(f"{of!r}\n    {trial}: {why}")
            if len(found) == most:
                break
        return found
