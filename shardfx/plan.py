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
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shardfx.hints import Hints, specs_in_iterations
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, factors_text
from shardfx.ir.mesh import Axis, Link, Mesh
from shardfx.ir.names import module_outputs, pattern
from shardfx.ir.ops.alike import key_of, node_keys
from shardfx.ir.spec import Spec
from shardfx.ir.text.parser import parse_spec
from shardfx.passes.context_parallel import Context
from shardfx.passes.expert_parallel import OF_OPS, Experts
from shardfx.passes.pass_text import check_options
from shardfx.passes.sharding.bind_hints import as_spec

if TYPE_CHECKING:
    from shardfx.compile import Compiled


FORMAT = "shardfx plan"
LARGEST = 1 << 28
"""Bytes of a file that is read; more than that is no plan."""

VERSION = 1
"""Of the file's form: raised when an older reader could not make sense of it."""


def _plan_of(content: dict[str, Any]) -> Plan:
    axes = [
        Axis(axis["name"], axis["size"], axis["loop"], Link(axis["bandwidth"], axis["latency"]), axis["interleave"])
        for axis in content["mesh"]
    ]
    for each in axes:
        check_options(each)
    mesh = Mesh(links={axis.name: axis.link for axis in axes}, **{axis.name: axis.extent for axis in axes})
    passes = content["passes"]
    decisions = {each.name: content[each.name] for each in fields(Plan)}
    decisions |= {"mesh": mesh, "passes": tuple(passes) if isinstance(passes, list) else passes}
    check_options(plan := Plan(**decisions))
    for text in (*plan.inputs.values(), *plan.hinted.values()):
        parse_spec(text, plan.mesh)
    for text in plan.said.values():
        _read(text, plan.mesh)
    return plan


class PlannedSpecs(dict[str, "Spec | Context | Experts"]):
    """Specs for ``Hints(specs=...)`` that hold for one model on one mesh only."""

    def __init__(self, plan: Plan) -> None:
        super().__init__(
            {name: parse_spec(text, plan.mesh)[1] for name, text in (*plan.inputs.items(), *plan.hinted.items())}
        )
        self.plan = plan
        self.update((text, each) for text, each in self.said.items() if isinstance(each, OF_OPS))

    @property
    def said(self) -> dict[str, Any]:
        """The hints from which the plan came, by pattern."""
        return {text: _read(hint, self.plan.mesh) for text, hint in self.plan.said.items()}


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
    is what hints said of values, by pattern.
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
    said: Mapping[str, str]

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
        pairs = [
            (key, mine.get(key, "absent"), theirs.get(key, "absent"))
            for mine, theirs in ((self.strategies, _strategies(graph)), (self.inputs, _stored(graph)))
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
        axes = [
            {name: getattr(axis, name) for name in ("name", "size", "loop", "interleave")} | asdict(axis.link)
            for axis in self.mesh.axes
        ]
        decisions = {each.name: getattr(self, each.name) for each in fields(self)}
        content = {"format": FORMAT, "version": VERSION, **decisions, "mesh": axes}
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        return path

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan from its JSON file, each field checked.

        Raises:
            Error: there is no such file; it is cut short, of another version, or no plan at all.
        """
        where = str(path)
        try:
            size = Path(path).stat().st_size
            if size > LARGEST:
                raise Error(
                    "the plan is too large", where=where, expected=f"at most {LARGEST:,} bytes", got=f"{size:,}"
                )
            content = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise Error("the plan cannot be read", where=where, got=error.strerror or str(error)) from None
        except (ValueError, RecursionError) as error:
            what, remedy = "the plan is cut short, or no JSON", "save it again: pm.plan.save(path)"
            raise Error(what, where=where, expected="a complete file", got=error, remedy=remedy) from None
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            expected = f'JSON with "format": "{FORMAT}"'
            raise Error("this file is not a plan", where=where, expected=expected, got=str(content)[:60])
        if content.get("version") != VERSION:
            raise Error(
                "the plan is of another version",
                where=where,
                expected=f"version {VERSION}",
                got=f"version {content.get('version')}, written by shardfx {content.get('shardfx')}",
                remedy="make the plan anew, or read it with that version of shardfx",
            )
        try:
            return _plan_of(content)
        except Error as error:
            at = f"{where}: {error.where or 'mesh'}"
            raise Error(error.what, where=at, expected=error.expected, got=error.got) from None
        except (KeyError, TypeError, AttributeError) as error:
            what = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise Error("the plan is incomplete", where=where, expected="what Plan.save writes", got=what) from None


def make_plan(compiled: Compiled) -> Plan:
    """The plan of a compiled model (see ``ParallelModule.plan``)."""
    graph, (said, hinted) = compiled.after, _hints_of(compiled)
    pins = (node.pin for node in graph.nodes if node.pin is not None)
    return Plan(
        graph.mesh,
        _stored(graph),
        hinted,
        {pin.by: factors_text(pin.shardings) for pin in pins},
        _strategies(graph),
        tuple(str(each) for each in compiled.passes),
        fingerprint(compiled.before),
        version(),
        torch.__version__,
        said,
    )


def _stored(graph: Graph) -> dict[str, str]:
    """The stored placement of each input, as text."""
    inputs = (each for each in graph.inputs if not each.kind.is_of_optimizer)
    return {
        each.name: (each.value.spec or Spec.replicated(each.value.type.ndim)).text(each.value.shape) for each in inputs
    }


def _strategies(graph: Graph) -> dict[str, str]:
    """The shardings of each op's factors, as text."""
    return {key: factors_text(node.strategy.shardings) for key, node in node_keys(graph).items() if node.strategy}


def _hints_of(compiled: Compiled) -> tuple[dict[str, str], dict[str, str]]:
    """Hints of values, by pattern: text as the user wrote it, an exact spec as the graph's text has it; and the
    placements of the module outputs that they name."""
    graph, hints = compiled.before, as_said(compiled.hints)
    shapes = {each.name: each.value.shape for each in graph.inputs}
    shapes |= {name: shapes[known] for name, known in graph.aliases.items() if known in shapes}
    results = {path: values[-1].shape for path, values in module_outputs(graph).items()}
    said, hinted = dict[str, str](), dict[str, str]()
    for text, hint in specs_in_iterations(graph.mesh, hints).items():
        if isinstance(hint, OF_OPS):
            said[text] = hint.text
            continue
        matches = pattern(text).fullmatch
        named = [shape for name, shape in shapes.items() if matches(name)]
        modules = {path: shape for path, shape in results.items() if not named and matches(path)}
        shape = next(iter([*named, *modules.values()]))
        spec = as_spec(hint, graph.mesh, len(shape), text)
        words = ", ".join(" ".join(sharding.axes) or "-" for sharding in spec.dims)
        said[text] = spec.text(shape) if isinstance(hint, Spec) else words
        hinted |= {path: as_spec(hint, graph.mesh, len(of), text).text(of) for path, of in modules.items()}
    return said, hinted


def _read(text: str, mesh: Mesh) -> str | Spec | Context | Experts:
    """Read a hint that ``_hints_of`` wrote."""
    of_op = Context.of_text(text) or Experts.of_text(text)
    return of_op or (parse_spec(text, mesh)[1] if text.startswith("[") else text)


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
