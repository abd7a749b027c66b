"""The decisions of a plan as a JSON file, to be compared, kept, and passed as hints.

    >>> pm.plan.save("plan.json")
    >>> plan = Plan.load("plan.json")
    >>> again = sx.parallelize(model, plan.mesh, sx.Hints(args=(x,), loss=loss, targets=(y,), specs=plan.specs))

``plan.specs`` has the stored placement of every input and that of every hinted value. Given as hints they bring along
what was said to come to the plan (``plan.said``, and ``plan.hinted_strategies`` on ops), and that alone is said again:
a placement that followed from hints would decide more as a hint than it did. The same model then gets the same program;
another model, another mesh, or other options under which an op is sharded otherwise, is an error. ``dict(plan.specs)``
are plain hints. The file is JSON; placements are in the text form of graphs::

    "inputs": {"layers.0.qkv.weight": "[(3 64{tp}), 64]", "args.0": "[8{dp}, 16]"}
    "strategies": {"forward layers.0.wo aten.mm 0": "m{dp} k{tp}"}
    "said": {"layers.*.qkv.weight": "tp, -"}
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, Node, Value, factors_text
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.ops.alike import key_of, node_keys
from shardfx.ir.spec import Spec
from shardfx.ir.text.parser import parse_spec
from shardfx.passes.sharding.bind_hints import as_spec
from shardfx.schedules.accumulate import specs_in_iterations

if TYPE_CHECKING:
    from shardfx.compiled import Compiled
    from shardfx.hints import Hints


T = TypeVar("T")
FORMAT = "shardfx plan"
LARGEST = 1 << 28
"""Bytes of a file that is read; more than that is no plan."""

VERSION = 1
"""Of the file's form: raised when an older reader could not make sense of it."""


def read_plan(path: str | Path) -> Plan:
    """The fields of the plan in a file, each checked.

    Raises:
        Error: there is no such file; it is cut short, of another version, or no plan at all.
    """
    where = str(path)
    try:
        size = Path(path).stat().st_size
        if size > LARGEST:
            raise Error("the plan is too large", where=where, expected=f"at most {LARGEST:,} bytes", got=f"{size:,}")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise Error("the plan cannot be read", where=where, got=error.strerror or str(error)) from None
    except (ValueError, RecursionError) as error:
        remedy = "save it again: pm.plan.save(path)"
        raise Error(
            "the plan is cut short, or no JSON", where=where, expected="a complete file", got=error, remedy=remedy
        ) from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise Error(
            "this file is not a plan",
            where=where,
            expected=f'JSON with "format": "{FORMAT}"',
            got=str(content)[:60],
        )
    if content.get("version") != VERSION:
        raise Error(
            "the plan is of another version",
            where=where,
            expected=f"version {VERSION}",
            got=f"version {content.get('version')}, written by shardfx {content.get('shardfx')}",
            remedy="make the plan anew, or read it with that version of shardfx",
        )
    return _fields_of(content, where)


def _fields_of(content: dict[str, Any], where: str) -> Plan:
    try:
        axes = {_typed(str, a["name"], "name"): _size(a) for a in _typed(list, content["mesh"], "mesh")}
        links = {a["name"]: Link(a["bandwidth"], a["latency"]) for a in content["mesh"]}
        plan = Plan(
            mesh=Mesh(links=links, **axes),
            inputs=_texts("inputs", content["inputs"]),
            hinted=_texts("hinted", content["hinted"]),
            hinted_strategies=_texts("hinted_strategies", content.get("hinted_strategies", {})),
            strategies=_texts("strategies", content["strategies"]),
            passes=tuple(_typed(str, each, "passes") for each in _typed(list, content["passes"], "passes")),
            fingerprint=_typed(str, content["fingerprint"], "fingerprint"),
            shardfx=_typed(str, content["shardfx"], "shardfx"),
            torch=_typed(str, content["torch"], "torch"),
            said=_texts("said", content["said"]) if content.get("said") is not None else None,
        )
        exact = [text for text in (plan.said or {}).values() if text.startswith("[")]
        for text in (*plan.inputs.values(), *plan.hinted.values(), *exact):
            parse_spec(text, plan.mesh)
    except Error as error:
        raise Error(
            error.what, where=f"{where}: {error.where or 'mesh'}", expected=error.expected, got=error.got
        ) from None
    except (KeyError, TypeError, AttributeError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise Error("the plan is incomplete", where=where, expected="what Plan.save writes", got=what) from None
    return plan


def _typed(kind: type[T], value: Any, name: str) -> T:
    if type(value) is not kind:
        raise TypeError(f"{name!r} is no {kind.__name__}: {str(value)[:60]}")
    return value


def _texts(name: str, content: dict[str, Any]) -> dict[str, str]:
    return {key: _typed(str, text, f"{name}: {key}") for key, text in content.items()}


def _size(axis: dict[str, Any]) -> int | Loop:
    size, loop = _typed(int, axis["size"], "size"), _typed(bool, axis["loop"], "loop")
    interleave = _typed(bool, axis.get("interleave", False), "interleave")
    return Loop(size, interleave) if loop else size


class PlannedSpecs(dict[str, Spec]):
    """Specs for ``Hints(specs=...)`` that hold for one model on one mesh only."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            {name: parse_spec(text, plan.mesh)[1] for name, text in (*plan.inputs.items(), *plan.hinted.items())}
        )
        self.plan = plan

    @property
    def said(self) -> dict[str, Any]:
        """The hints from which the plan came, by pattern."""
        said = self.plan.said
        return dict(self) if said is None else {text: _read(hint, self.plan.mesh) for text, hint in said.items()}


def as_said(hints: Hints) -> Hints:
    """The hints with a plan's in place of the plan."""
    if not isinstance(hints.specs, PlannedSpecs):
        return hints
    return replace(hints, specs=hints.specs.said, strategies={**hints.specs.plan.hinted_strategies, **hints.strategies})


@dataclass(frozen=True)
class Plan:
    """The decisions of a plan: all else follows from them, the model, and the hints' other options.

    ``inputs`` and ``hinted`` are placements as text, by name; ``hinted_strategies`` the hints on ops; ``strategies``
    the shardings of each op's factors, by the op's key: phase, module, op, and its number among those alike. ``said``
    is what hints said of values, by pattern; None in a file of before it was kept.
    """

    mesh: Mesh
    inputs: Mapping[str, str]
    hinted: Mapping[str, str]
    hinted_strategies: Mapping[str, str]
    strategies: Mapping[str, str]
    passes: tuple[str, ...]
    fingerprint: str
    shardfx: str
    torch: str
    said: Mapping[str, str] | None = None

    @property
    def specs(self) -> PlannedSpecs:
        """Hints that reproduce this plan."""
        return PlannedSpecs(self)

    def check(self, graph: Graph) -> None:
        """Raise if the plan is not for this captured graph, on its mesh.

        Raises:
            Error: another mesh; or another model, or other shapes of inputs.
        """
        here, there = repr(graph.mesh), repr(self.mesh)
        if here != there:
            raise Error("the plan is one for another mesh", where="Hints(specs=plan.specs)", expected=there, got=here)
        found = fingerprint(graph)
        if found == self.fingerprint:
            return
        names = {inp.name for inp in graph.inputs if not inp.kind.is_of_optimizer}
        missing = [name for name in self.inputs if name not in names]
        fresh = [name for name in names if name not in self.inputs]
        other = "its inputs have the same names"
        if missing or fresh:
            other = f"{some(missing)} is in the plan alone, {some(sorted(fresh))} in the model alone"
        raise Error(
            "the plan is one for another model, or for other shapes of its inputs",
            where="Hints(specs=plan.specs)",
            expected=f"{self.fingerprint}, captured with torch {self.torch}",
            got=f"{found}, captured with torch {torch.__version__}; {other}",
            remedy="plan this model anew; or pass dict(plan.specs) to use the placements as plain hints",
        )

    def differences(self, graph: Graph) -> list[str]:
        """Differences to a planned graph, in words: ops sharded otherwise, and inputs stored otherwise."""
        there = {key: shardings_text(node) for key, node in node_keys(graph).items() if node.strategy is not None}
        stored = _stored(graph)
        pairs = [
            (key, mine.get(key, "absent"), theirs.get(key, "absent"))
            for mine, theirs in ((self.strategies, there), (self.inputs, stored))
            for key in dict.fromkeys([*mine, *theirs])
        ]
        return [f"{key}: {planned} in the plan, {found} here" for key, planned, found in pairs if planned != found]

    def check_planned(self, compiled: Compiled) -> None:
        """Raise if a model that was given this plan was planned otherwise.

        Raises:
            Error: an op is sharded, or an input stored, otherwise than here.
        """
        others = self.differences(compiled.after)
        if not others:
            return
        passes = [str(each) for each in compiled.passes]
        changed = [each for each in (*self.passes, *passes) if (each in self.passes) != (each in passes)]
        made = f"the plan was made by shardfx {self.shardfx}, torch {self.torch}"
        raise Error(
            f"{len(others)} ops or inputs came out otherwise than in the plan given",
            where="Hints(specs=plan.specs)",
            expected=f"the plan's own; {made}",
            got=f"{some(others)}" + (f"; passes of one alone: {some(changed)}" if changed else ""),
            remedy="plan under the options that the plan was made with; or pass "
            "specs=dict(plan.specs), strategies=plan.hinted_strategies "
            "to use it as plain hints, from which other strategies may follow",
        )

    def save(self, path: str | Path) -> Path:
        """Write the plan as JSON; returns the path."""
        axes = [(axis, axis.link) for axis in self.mesh.axes]
        content = {
            "format": FORMAT,
            "version": VERSION,
            **{each.name: getattr(self, each.name) for each in fields(self)},
            "mesh": [
                {
                    "name": a.name,
                    "size": a.size,
                    "loop": a.loop,
                    "interleave": a.interleave,
                    "bandwidth": link.bandwidth,
                    "latency": link.latency,
                }
                for a, link in axes
            ],
        }
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from its JSON file.

        Raises:
            Error: there is no such file; it is cut short, of another version, or no plan at all.
        """
        return read_plan(path)


def make_plan(compiled: Compiled) -> Plan:
    """The plan of a compiled model (see ``ParallelModule.plan``)."""
    graph = compiled.after
    return Plan(
        graph.mesh,
        _stored(graph),
        dict(_hinted(compiled)),
        _pinned(graph),
        {key: shardings_text(node) for key, node in node_keys(graph).items() if node.strategy is not None},
        tuple(str(each) for each in compiled.passes),
        fingerprint(compiled.before),
        version(),
        torch.__version__,
        _said(compiled),
    )


def _stored(graph: Graph) -> dict[str, str]:
    """The stored placement of each input, as text."""
    return {g.name: _text(g.value, g.value.spec) for g in graph.inputs if not g.kind.is_of_optimizer}


def _said(compiled: Compiled) -> dict[str, str]:
    """Hints of values, by pattern: text as the user wrote it, an exact spec as the graph's text has it."""
    graph, hints = compiled.before, as_said(compiled.hints)
    sizes = {each.name: each.value.shape for each in graph.inputs}
    sizes |= {name: sizes[known] for name, known in graph.aliases.items() if known in sizes}
    sizes |= {path: values[-1].shape for path, values in module_outputs(graph).items() if path not in sizes}
    found = {}
    for text, hint in specs_in_iterations(graph.mesh, hints).items():
        matcher = pattern(text)
        shape = next(shape for name, shape in sizes.items() if matcher.fullmatch(name))
        spec = as_spec(hint, graph.mesh, len(shape), text)
        words = ", ".join(" ".join(sharding.axes) or "-" for sharding in spec.dims)
        found[text] = spec.text(shape) if isinstance(hint, Spec) else words
    return found


def _read(text: str, mesh: Mesh) -> str | Spec:
    """Read a hint that ``_said`` wrote."""
    return parse_spec(text, mesh)[1] if text.startswith("[") else text


def _hinted(compiled: Compiled) -> dict[str, str]:
    """The modules whose output a hint places, each by its own path."""
    graph = compiled.before
    names = {inp.name for inp in graph.inputs} | set(compiled.captured.aliases)
    modules = module_outputs(graph)
    found = {}
    for text, hint in compiled.hints.specs.items():
        matcher = pattern(text)
        if any(matcher.fullmatch(name) for name in names):
            continue
        for path, values in modules.items():
            if matcher.fullmatch(path):
                found[path] = _text(values[-1], as_spec(hint, graph.mesh, values[-1].type.ndim, text))
    return found


def _pinned(graph: Graph) -> dict[str, str]:
    """Hints on ops, as ``Hints(strategies=...)`` takes them."""
    pins = (node.pin for node in graph.nodes if node.pin is not None)
    return {pin.by: factors_text(pin.shardings) for pin in pins}


def _text(value: Value, spec: Spec | None) -> str:
    return (spec or Spec.replicated(value.type.ndim)).text(value.shape)


def shardings_text(node: Node) -> str:
    """``m{dp} k{tp}``, or ``-`` where nothing is sharded."""
    assert node.strategy is not None
    return factors_text(node.strategy.shardings)


def fingerprint(graph: Graph) -> str:
    """A hash of a captured graph: names and types of its inputs, ops, how they are connected, outputs.

    Not in it: source lines, so that a comment does not make another model, and the mesh.
    """
    numbers = {value: number for number, value in enumerate(graph.values())}
    digest = hashlib.sha256()

    def note(*words: Any) -> None:
        digest.update(f"{words}\n".encode())

    for inp in graph.inputs:
        note(inp.kind.value, inp.name, inp.value.shape, str(inp.value.type.dtype))
    for node in graph.nodes:
        note(node.phase.value, key_of(node, lambda value: (numbers[value], value.type)))
    for output in graph.outputs:
        expected = () if output.guard is None else (output.guard.expected,)
        note(output.kind.value, output.name, numbers[output.value], *expected)
    return f"sha256:{digest.hexdigest()[:32]}"


def version() -> str:
    """The installed version of shardfx; ``0`` for a checkout that is not installed."""
    try:
        return importlib.metadata.version("shardfx")
    except importlib.metadata.PackageNotFoundError:
        return "0"


def some(names: Sequence[str], count: int = 3) -> str:
    """A few of the names, for messages."""
    more = f" and {len(names) - count} more" if len(names) > count else ""
    return (", ".join(names[:count]) or "nothing") + more
