"""What was found of an op, free of sizes: the shardings that go together, and the rule of a node made of them.

They are cached on disk: one small JSON file for an op, the class of its shapes and a version of torch.

FoundSharding((0, 1), None) -> ((0, 1),)    of x[n, d] and w[d] dim 0 of x is sharded, and dim 0 of the result with it
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import string
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from shardfx.ir.graph import Node, Value
from shardfx.ir.rules.sharding_rule import SAME, Dim, Linear, ShardingRule
from shardfx.ir.rules.template import parse_linear

from .sharding_search import ValidSharding

Place = tuple[int, int]
"""A dim, and how many elements in a row are distributed together."""


WORDS = ("equal", "sum", "max", "min", "mean")
"""What a result may be that is not sharded, the best first; a mean is the sum of the ranks' results by their shares."""


@dataclass(frozen=True)
class FoundSharding:
    """One sharding: the place of every operand that is sharded, and of every result the place or the reduction."""

    operands: tuple[Place | None, ...]
    results: tuple[Place | str, ...]
    sized: tuple[tuple[int, ...], ...] = ()
    """The places of arguments that are sizes and follow the sharding."""


@dataclass(frozen=True)
class Findings:
    """The shardings of an op that go together, and the sets of operands that may be partial sums."""

    shardings: tuple[FoundSharding, ...] = ()
    linear: tuple[Linear, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shardings or self.linear)

    def without(self, sharding: int | None = None, group: frozenset[int] | None = None) -> Findings:
        """The findings but for one."""
        shardings = tuple(c for i, c in enumerate(self.shardings) if i != sharding)
        return replace(self, shardings=shardings, linear=tuple(g for g in self.linear if g.operands != group))


def together(
    shardings: Iterable[ValidSharding], operands: Sequence[Sequence[int]], results: Sequence[Sequence[int]]
) -> tuple[FoundSharding, ...]:
    """Of all valid shardings those that fit in one rule: each dim is sharded one way, each result reduced one way.

    Those of more operands, and those that leave less to be reduced, come first.
    """

    def joined(sharding: ValidSharding) -> int:
        return sum(any(isinstance(o, int) for o in outcome) for outcome in sharding.results)

    taken: set[tuple[str, int, int]] = set()
    words: dict[int, frozenset[str]] = {}
    found = []
    for sharding in sorted(shardings, key=lambda c: (-sum(d is not None for d in c.operands), -joined(c), -c.size)):
        inputs = {("operand", t, d) for t, d in enumerate(sharding.operands) if d is not None}
        ends: list[Place | str] = []
        outputs: set[tuple[str, int, int]] = set()
        fresh = dict(words)
        for r, outcome in enumerate(sharding.results):
            dims = [o for o in outcome if isinstance(o, int) and ("result", r, o) not in taken]
            said = frozenset(o for o in outcome if isinstance(o, str))
            if dims:
                ends.append((dims[0], results[r][dims[0]] // sharding.size))
                outputs.add(("result", r, dims[0]))
                continue
            fresh[r] = fresh.get(r, said) & said
            ends.append("")
        if taken & (inputs | outputs) or not all(fresh.values()):
            continue
        taken |= inputs | outputs
        words = fresh
        places = tuple(
            None if d is None else (d, operands[t][d] // sharding.size) for t, d in enumerate(sharding.operands)
        )
        found.append(FoundSharding(places, tuple(ends), sharding.sized))
    chosen = {r: _word(options) for r, options in words.items()}
    return tuple(replace(f, results=tuple(chosen[r] if e == "" else e for r, e in enumerate(f.results))) for f in found)


def _word(options: frozenset[str]) -> str:
    return next(word for word in WORDS if word in options)


def as_rule(found: Findings, node: Node) -> ShardingRule:
    """The rule of a node; a sharding that its sizes do not allow is left out."""
    letters = _letters()
    sizes: dict[str, int] = {}
    whole: set[str] = set()
    dims: dict[tuple[str, int, int], Dim] = {}
    reductions: dict[int, str] = {}
    outs = node.outs
    for sharding in found.shardings:
        ends = [
            (("operand", t, p[0]), node.operands[t].shape[p[0]], p[1]) for t, p in enumerate(sharding.operands) if p
        ]
        ends += [
            (("result", r, p[0]), outs[r].shape[p[0]], p[1])
            for r, p in enumerate(sharding.results)
            if isinstance(p, tuple)
        ]
        counts = {size // block for _, size, block in ends if size % block == 0}
        if len(counts) != 1 or any(size % block for _, size, block in ends):
            continue
        factor = next(letters)
        sizes[factor] = counts.pop()
        for key, _, block in ends:
            dims[key] = (factor,)
            if block > 1:
                rest = next(letters)
                sizes[rest] = block
                whole.add(rest)
                dims[key] = (factor, rest)
        reductions.update((r, word) for r, word in enumerate(sharding.results) if isinstance(word, str))

    def of(kind: str, t: int, value: Value) -> tuple[Dim, ...]:
        made: list[Dim] = []
        for d, size in enumerate(value.shape):
            if (kind, t, d) in dims:
                made.append(dims[kind, t, d])
            elif size == 1:
                made.append(())
            else:
                name = next(letters)
                sizes[name] = size
                whole.add(name)
                made.append((name,))
        return tuple(made)

    operands = tuple(of("operand", t, value) for t, value in enumerate(node.operands))
    number = {value: r for r, value in enumerate(outs)}
    results = tuple(None if value is None else of("result", number[value], value) for value in node.results)
    words = [
        "sum" if value is None else {"equal": SAME, "mean": "sum"}.get(w := reductions.get(number[value], "sum"), w)
        for value in node.results
    ]
    return ShardingRule(operands, results, sizes, frozenset(whole), _precise(found.linear, node), ", ".join(words))


def _precise(groups: Iterable[Linear], node: Node) -> tuple[Linear, ...]:
    """The groups whose partial sums are not rounded before they are added."""

    def digits(value: Value) -> float:
        return -torch.finfo(value.type.dtype).eps if value.type.dtype.is_floating_point else -1.0

    def kept(group: Linear) -> bool:
        made = [v for v in node.outs if group.results is None or v.index in group.results]
        least = min(map(digits, made), default=math.inf)
        return all(digits(node.operands[i]) <= least for i in group.operands)

    return tuple(filter(kept, groups))


def _letters() -> Iterator[str]:
    yield from string.ascii_lowercase
    yield from (f"{letter}{i}" for i in range(1, 1000) for letter in string.ascii_lowercase)


def to_json(found: Findings) -> dict[str, Any]:
    """Findings as what JSON can hold."""
    return {"shardings": [vars(c) for c in found.shardings], "linear": [str(each) for each in found.linear]}


def from_json(given: Any) -> Findings:
    """Findings as :func:`to_json` wrote them. Whether they are right for an op is checked where they are used."""

    def as_tuple(each: Any) -> Any:
        return tuple(map(as_tuple, each)) if isinstance(each, list) else each

    shardings = tuple(FoundSharding(**{name: as_tuple(each) for name, each in s.items()}) for s in given["shardings"])
    return Findings(shardings, tuple(group for text in given["linear"] for group in parse_linear(text)))


def default_folder() -> Path:
    """``shardfx/rules`` where the user's caches are: under ``XDG_CACHE_HOME``, or ``~/.cache``."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "shardfx" / "rules"


@dataclass(frozen=True)
class JsonCache:
    """A folder of JSON files, one for a key. What cannot be read is as if it were not there; where nothing can be
    written, nothing is."""

    folder: Path

    def path(self, key: Mapping[str, str]) -> Path:
        """The file of a key."""
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self.folder / f"{digest[:32]}.json"

    def get(self, key: Mapping[str, str]) -> Any:
        """What is stored under a key, or None."""
        try:
            given = json.loads(self.path(key).read_text(encoding="utf-8"))
            return given["found"] if given["key"] == dict(key) else None
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, key: Mapping[str, str], found: Any) -> None:
        """Store a value; a reader never sees half a file."""
        path = self.path(key)
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                json.dump({"key": dict(key), "found": found}, file, indent=1)
            Path(name).replace(path)
