"""Plug-ins from installed packages: passes (entry points ``shardfx.passes``), op rules (``shardfx.rules``) and ops that
are not torch's (``shardfx.ops``).

In the ``pyproject.toml`` of a plugin::

    [project.entry-points."shardfx.passes"]
    count-nodes = "count_nodes:CountNodes"       # a subclass of shardfx.Pass whose name is count-nodes

    [project.entry-points."shardfx.rules"]
    mylib = "mylib.sharding:RULES"               # a tuple of rules, or a function that gives one

    [project.entry-points."shardfx.ops"]
    mylib = "mylib.rows:OPS"                     # a tuple of rows, as of shardfx.ir.ops.table

A pass is used by its text, ``Hints(passes=["count-nodes{mb=2}"])``; rules and ops as soon as they are installed.
See docs/writing_passes.md and docs/writing_rules.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.ops.table import LocalOp, OwnOp
from shardfx.ir.oracle.discover import Discovery
from shardfx.ir.registry import register, unregister
from shardfx.ir.rulebook import default_rules
from shardfx.ir.rules.book import RuleBook, RuleEntry
from shardfx.passes import BUILT_IN, Pass
from shardfx.passes.pass_text import parse_pass
from shardfx.passes.rank import BUILT_IN as RANK_BUILT_IN
from shardfx.passes.rank import RankPass

PASSES = "shardfx.passes"
RANK_PASSES = "shardfx.rank_passes"
RULES = "shardfx.rules"
OPS = "shardfx.ops"
T = TypeVar("T", Pass, RankPass)


@cache
def _entry_points(group: str) -> tuple[EntryPoint, ...]:
    """The entry points of a group; the same one found twice (in a checkout and installed) counts once."""
    return tuple({(e.name, e.value, _origin(e)): e for e in entry_points(group=group)}.values())


def refresh() -> None:
    """Clear the cache of plug-ins: packages were installed or removed while this process runs."""
    _entry_points.cache_clear()
    _plugin_rules.cache_clear()
    unregister(*(row for rows in _registered.values() for row in rows))
    _registered.clear()


def all_passes() -> Iterator[tuple[str, str, type[Pass] | Error]]:
    """Every pass with its origin, built-in ones first; of a plugin that cannot be used, its error."""
    for name, kind in BUILT_IN.items():
        yield name, "built-in", kind
    for point in sorted(_entry_points(PASSES), key=lambda point: point.name):
        try:
            yield point.name, _origin(point), _load_pass(point, Pass, BUILT_IN)
        except Error as error:
            yield point.name, _origin(point), error


def find_pass(name: str) -> type[Pass]:
    """Find a pass by name.

    Raises:
        Error: there is none, there are two, or the plugin that has it cannot be used.
    """
    return _find(name, Pass, BUILT_IN, PASSES, "Hints(passes=...)")


def _find(name: str, base: type[T], built_in: Mapping[str, type[T]], group: str, where: str) -> type[T]:
    if name in built_in:
        return built_in[name]
    points = [point for point in _entry_points(group) if point.name == name]
    if len(points) == 1:
        return _load_pass(points[0], base, built_in)
    if points:
        raise Error(
            f"two plugins have a pass {name!r}",
            where=f"entry points {group}",
            expected="one pass of each name",
            got=" and ".join(map(_origin, points)),
            remedy="uninstall one, or pass an instance instead of text",
        )
    known = [*built_in, *(point.name for point in _entry_points(group))]
    raise Error(
        f"unknown pass {name!r}",
        where=where,
        expected=f"one of {', '.join(known)}",
        got=name,
        remedy=did_you_mean(name, known, "install its package; see `shardfx passes`", count=3),
    )


def as_passes(given: Iterable[Pass | str]) -> tuple[Pass, ...]:
    """Passes from instances or text."""
    return tuple(parse_pass(each, find_pass) if isinstance(each, str) else each for each in given)


def as_rank_passes(given: Iterable[RankPass | str]) -> tuple[RankPass, ...]:
    """Rank passes from instances or text."""

    def find(name: str) -> type[RankPass]:
        return _find(name, RankPass, RANK_BUILT_IN, RANK_PASSES, "Hints(rank_passes=...)")

    return tuple(parse_pass(each, find) if isinstance(each, str) else each for each in given)


def all_rules(given: Iterable[RuleEntry] = (), discover: bool = True) -> RuleBook:
    """The rule book: built-in rules, those of installed plugins, which win, and ``given`` ones, which win over both.
    The rule of an op without one is discovered, unless disabled.

    Raises:
        Error: a plugin's rules cannot be had: to leave them out in silence would be another plan.
    """
    register_ops()
    written = default_rules().extended((*_plugin_rules(), *given))
    return written.with_fallback(_discovery().entry) if discover else written


def plugin_rules() -> list[tuple[RuleEntry, str]]:
    """The rules of installed plugins, each with its distribution.

    Raises:
        Error: a plugin's rules cannot be had.
    """
    return [
        (rule, _origin(point)) for point in _entry_points(RULES) for rule in _load_rows(point, (RuleEntry,), "rules")
    ]


def register_ops() -> None:
    """Register the ops of installed plugins, as our own modules register theirs.

    Raises:
        Error: a plugin's ops cannot be had, or one has the name of another op.
    """
    for point in _entry_points(OPS):
        for row in () if point in _registered else _load_rows(point, (OwnOp, LocalOp), "ops"):
            try:
                register(row)
            except Error as error:
                raise _wrong(point, f"cannot be used: {error.what}", str(error.expected), row.name) from error
            _registered.setdefault(point, []).append(row)


_registered: dict[EntryPoint, list[OwnOp | LocalOp]] = {}
"""The ops that are in the registry, by entry point."""


@cache
def _discovery() -> Discovery:
    return Discovery()


@cache
def _plugin_rules() -> tuple[RuleEntry, ...]:
    return tuple(rule for rule, _ in plugin_rules())


def _load_pass(point: EntryPoint, base: type[T], built_in: Mapping[str, type[T]]) -> type[T]:
    kind: Any = _load(point)
    if not isinstance(kind, type) or not issubclass(kind, base):
        expected = f"a subclass of shardfx.{base.__name__} (the class, not an instance)"
        raise _wrong(point, "is not a pass", expected, repr(kind))
    if kind.name != point.name:
        raise _wrong(point, "is called otherwise than its entry point", f"name = {point.name!r}", f"{kind.name!r}")
    if point.name in built_in:
        raise _wrong(point, "has the name of a built-in pass", "a name of its own", point.name)
    return kind


def _load_rows(point: EntryPoint, kinds: tuple[type, ...], what: str) -> Sequence[Any]:
    """The rows of an entry point: a tuple, or a function that makes one."""
    rows = _load(point)
    if callable(rows):
        try:
            rows = rows()
        except Exception as error:
            got = f"{type(error).__name__}: {error}"
            raise _wrong(point, "fails when it is called", f"a tuple of {what}", got) from error
    if not isinstance(rows, (tuple, list)) or not all(isinstance(each, kinds) for each in rows):
        expected = f"a tuple of {' or '.join(kind.__name__ for kind in kinds)}"
        raise _wrong(point, f"is not a set of {what}", expected, repr(rows)[:200])
    return rows


def _load(point: EntryPoint) -> object:
    try:
        return point.load()
    except Exception as error:  # whatever a module does when it is imported
        expected, got = f"{point.value} to be there", f"{type(error).__name__}: {error}"
        raise _wrong(point, "cannot be imported", expected, got, f"mend or uninstall {_origin(point)}") from error


def _origin(point: EntryPoint) -> str:
    """The distribution that an entry point belongs to, with its version."""
    return f"{point.dist.name} {point.dist.version}" if point.dist is not None else point.value


def _wrong(point: EntryPoint, what: str, expected: str, got: str, remedy: str | None = None) -> Error:
    return Error(
        f"plugin {point.name!r} of {_origin(point)} {what}",
        where=f"entry point {point.group}: {point.name} = {point.value}",
        expected=expected,
        got=got,
        remedy=remedy,
    )
