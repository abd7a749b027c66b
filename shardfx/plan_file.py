"""What a plan says, and its file: JSON, of which what is read is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Link, Loop, Mesh
from shardfx.ir.text.parser import parse_spec

FORMAT = "shardfx plan"
LARGEST = 1 << 28
"""Bytes of a file that is read; more than that is no plan."""

VERSION = 1
"""Of the file's form: raised when an older reader could not make sense of it."""


@dataclass(frozen=True)
class PlanFields:
    """What a plan says.

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


def write_plan(path: str | Path, plan: PlanFields) -> Path:
    """Write a plan's fields; gives the path."""
    axes = [(axis, axis.link) for axis in plan.mesh.axes]
    content = {
        "format": FORMAT,
        "version": VERSION,
        **{each.name: getattr(plan, each.name) for each in fields(PlanFields)},
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


def read_plan(path: str | Path) -> PlanFields:
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
            "the plan is cut short, or no JSON", where=where, expected="a whole file", got=error, remedy=remedy
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


def _fields_of(content: dict[str, Any], where: str) -> PlanFields:
    try:
        axes = {_text_of("name", a["name"]): _size(a) for a in _list(content["mesh"])}
        links = {a["name"]: Link(a["bandwidth"], a["latency"]) for a in content["mesh"]}
        plan = PlanFields(
            mesh=Mesh(links=links, **axes),
            inputs=_texts("inputs", content["inputs"]),
            hinted=_texts("hinted", content["hinted"]),
            hinted_strategies=_texts("hinted_strategies", content.get("hinted_strategies", {})),
            strategies=_texts("strategies", content["strategies"]),
            passes=tuple(_text_of("passes", each) for each in _list(content["passes"])),
            fingerprint=_text_of("fingerprint", content["fingerprint"]),
            shardfx=_text_of("shardfx", content["shardfx"]),
            torch=_text_of("torch", content["torch"]),
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
        raise Error("the plan is not whole", where=where, expected="what Plan.save writes", got=what) from None
    return plan


def _texts(name: str, content: dict[str, Any]) -> dict[str, str]:
    return {key: _text_of(f"{name}: {key}", text) for key, text in content.items()}


def _text_of(name: str, given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{name!r} is no text: {str(given)[:60]}")
    return given


def _list(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise TypeError(f"no list: {str(given)[:60]}")
    return given


def _size(axis: dict[str, Any]) -> int | Loop:
    size, loop, interleave = axis["size"], axis["loop"], axis.get("interleave", False)
    if type(size) is not int or type(loop) is not bool or type(interleave) is not bool:
        raise TypeError(f"the size of a mesh axis is no whole number, or its time neither true nor false: {axis}")
    return Loop(size, interleave) if loop else size
