"""The smallest case that fails in the same way: what can be left out is left out, until nothing can."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from .case import AXES, Case, Net, named
from .shards import NUMBERS
from .staged import Staged

Fails = Callable[[Case], str]
"""The kind of a case's failure; empty where it does not fail."""


def shrink(case: Case, fails: Fails, tries: int = 150) -> Case:
    """Leave out of a failing case all that its failure does not need."""
    kind, tried = fails(case), {case}
    progress = True
    while progress:
        progress = False
        for smaller in candidates(case):
            if smaller in tried:
                continue
            if len(tried) > tries:
                return case
            tried.add(smaller)
            if fails(smaller) == kind:
                case, progress = smaller, True
                break
    return case


def candidates(case: Case) -> Iterator[Case]:
    """Simpler cases, those that leave out most first."""
    simple = replace(case, passes=(), bucket_mb=0, strict=False, memory=())
    yield replace(simple, specs=(), mesh=(2,), staged=None)
    for i in range(len(case.net.layers)):
        yield with_net(case, replace(case.net, layers=(case.net.layers[i],)))
    yield replace(case, specs=())
    for field in ("passes", "bucket_mb", "strict", "memory"):
        yield replace(case, **{field: getattr(simple, field)})
    for i in range(len(case.passes)):
        yield replace(case, passes=case.passes[:i] + case.passes[i + 1 :])
    for i in range(len(case.memory)):
        yield replace(case, memory=case.memory[:i] + case.memory[i + 1 :])
    if case.staged is not None:
        yield from in_fewer_stages(case, case.staged)
    for i in range(len(case.mesh)):
        if len(case.mesh) > 1 or case.staged is not None:
            yield without_axis(case, i)
    for i in range(len(case.specs)):
        yield replace(case, specs=case.specs[:i] + case.specs[i + 1 :])
    for net in nets(case.net):
        yield with_net(case, net)
    for i, size in enumerate(case.mesh):
        if size > 2:
            yield replace(case, mesh=(*case.mesh[:i], 2, *case.mesh[i + 1 :]))
    for i, (name, text) in enumerate(case.specs):
        for axis in AXES[: len(case.mesh)]:
            if axis in text and any(other in text for other in AXES if other != axis):
                fewer = ", ".join(" ".join(a for a in dim.split() if a != axis) or "-" for dim in text.split(", "))
                yield replace(case, specs=(*case.specs[:i], (name, fewer), *case.specs[i + 1 :]))


def in_fewer_stages(case: Case, staged: Staged) -> Iterator[Case]:
    """The case with a simpler pipeline."""
    simple = Staged(2, 2)
    if staged.chunk:
        specs = tuple((name, text) for name, text in case.specs if "chunk" not in text)
        yield replace(case, staged=replace(staged, chunk=0), specs=specs)
    else:
        yield replace(case, staged=simple)
    for field in ("ranks", "iterations", "schedule", "chunks", "stages", "inner"):
        if getattr(staged, field) != getattr(simple, field):
            yield replace(case, staged=replace(staged, **{field: getattr(simple, field)}))


def with_net(case: Case, net: Net) -> Case:
    """The case with another model, and those of its hints that fit."""
    dims = {name: ndim for name, ndim, _ in named(net)}
    return replace(case, net=net, specs=tuple((n, s) for n, s in case.specs if dims.get(n) == s.count(",") + 1))


def without_axis(case: Case, i: int) -> Case:
    """The case on a mesh without its axis ``i``; those behind it move up."""
    moved = {AXES[k]: AXES[k - (k > i)] for k in range(len(case.mesh)) if k != i}
    specs = []
    for name, text in case.specs:
        dims = [[moved[a] for a in dim.split() if a in moved] for dim in text.split(", ")]
        if any(dims):
            specs.append((name, ", ".join(" ".join(dim) or "-" for dim in dims)))
    memory = dict(case.memory)
    left = tuple(moved[axis] for axis in memory.get("zero_axis", ()) if axis in moved)  # type: ignore[attr-defined]
    memory = {**memory, "zero_axis": left} if left else {k: v for k, v in memory.items() if not k.startswith("zero")}
    mesh = case.mesh[:i] + case.mesh[i + 1 :]
    return replace(case, mesh=mesh, specs=tuple(specs), memory=tuple(memory.items()))


def nets(net: Net) -> Iterator[Net]:
    """Simpler models."""
    for i in range(len(net.layers)):
        yield replace(net, layers=net.layers[:i] + net.layers[i + 1 :], skips=())
    simple = replace(net, second="", results="one", loss="squares", tied=False, vocabulary=0, mode="train")
    for field in ("mode", "second", "results", "tied", "vocabulary", "loss"):
        if getattr(net, field) != getattr(simple, field):
            yield replace(net, **{field: getattr(simple, field)})
    for field, least in (("batch", 2), ("time", 4), ("start", 4)):
        if getattr(net, field) > least:
            yield replace(net, **{field: least})
    for i, (kind, numbers) in enumerate(net.layers):
        for k in range(NUMBERS):
            if numbers[k]:
                fewer = (*numbers[:k], 0, *numbers[k + 1 :])
                yield replace(net, layers=(*net.layers[:i], (kind, fewer), *net.layers[i + 1 :]))
