"""The results as text for a terminal, and as Markdown for README.md."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from . import aims as of_run
from .results import Results, Row
from .speed import EAGER

BEGIN, END = "<!-- gpu: begin -->", "<!-- gpu: end -->"
GB = 1e9
REHEARSAL = "rehearsal on the CPU: tiny models, and times that mean nothing"
"""What stands for the card's name."""
Table = tuple[list[str], list[list[str]]]
"""Titles of columns, and lines."""


def figure(row: Row, key: str, scale: float = 1.0, digits: int = 1) -> str:
    """A number of a row; empty where there is none."""
    value = row.get(key)
    return "" if value is None else f"{value / scale:.{digits}f}"


def off(row: Row, predicted: str, measured: str) -> str:
    """By how many percent a prediction is off."""
    said, found = row.get(predicted), row.get(measured)
    return f"{(said / found - 1) * 100:+.1f}%" if said and found else ""


def status(row: Row) -> str:
    """In a word, if a row is not as it should be."""
    return "" if row["status"] == "ok" else f"{row['status']}: {row.get('why', '')}".rstrip(": ")


def correctness(results: Results) -> Table:
    """Models down, plans across: the largest relative error, or what was instead."""
    cells = results.of("table")
    names = list(dict.fromkeys(cell.split(" | ")[0] for cell in cells))
    plans = list(dict.fromkeys(cell.split(" | ")[1] for cell in cells))
    lines = []
    for plan in plans:
        row = [plan]
        for name in names:
            found = cells.get(f"{name} | {plan}")
            row.append("" if found is None else _cell(found))
        lines.append(row)
    return ["", *names], lines


def _cell(row: Row) -> str:
    if row["status"] == "ok":
        return f"{row['error']:.0e}" if "error" in row else "ok"
    return {"n/a": "-", "not reached": "?"}.get(row["status"], str(row["status"]).upper())


def speed(results: Results) -> Table:
    titles = ["", "ms", "/ compile", "/ eager", "predicted", "GB", "predicted", "reserved", "predicted", "loss", ""]
    eager = results.of("speed").get(EAGER, {}).get("ratio")
    lines = [
        [
            name,
            figure(row, "ms"),
            figure(row, "ratio", digits=2),
            figure(row, "ratio", eager, 2) if eager else "",
            off(row, "ms_predicted", "ms"),
            figure(row, "allocated", GB),
            off(row, "peak_predicted", "allocated"),
            figure(row, "reserved", GB),
            off(row, "reserved_predicted", "reserved"),
            figure(row, "loss", digits=3),
            status(row)[:60],
        ]
        for name, row in results.of("speed").items()
    ]
    return titles, lines


def memory(results: Results) -> Table:
    titles = ["", "ms", "GB", "predicted", "active", "reserved", "predicted", "host", "moved", "link", "ratio", ""]
    lines = [
        [
            name,
            figure(row, "ms"),
            figure(row, "allocated", GB),
            off(row, "peak_predicted", "allocated"),
            figure(row, "active", GB),
            figure(row, "reserved", GB),
            off(row, "reserved_predicted", "reserved"),
            figure(row, "host", GB),
            figure(row, "moved", GB),
            figure(row, "link_ms"),
            figure(row, "link_ratio", digits=2),
            status(row)[:60],
        ]
        for name, row in results.of("memory").items()
        if "to_host_rate" not in row
    ]
    return titles, lines


def machine(results: Results) -> Table:
    lines: list[list[str]] = []
    for row in results.of("machine").values():
        lines += [[f"{dtype}, TFLOP/s", f"{rate / 1e12:.1f}"] for dtype, rate in row.get("flops", {}).items()]
        lines += [["memory, TB/s", figure(row, "bandwidth", 1e12, 2)], ["a call, us", figure(row, "overhead", 1e-6)]]
        lines += [["host link, GB/s", figure(row, "host_rate", GB)], ["measured in, s", figure(row, "seconds")]]
        lines += [[status(row)[:100], ""]] if status(row) else []
    for row in results.of("memory").values():
        for name in ("to_device", "to_host", "both"):
            if f"{name}_rate" in row:
                lines.append([f"copies {name.replace('_', ' ')}, GB/s", figure(row, f"{name}_rate", GB)])
    return ["", ""], lines


def nccl(results: Results) -> Table:
    lines = [
        [
            name,
            f"{row['error']:.0e}" if "error" in row else "",
            row.get("backend", ""),
            status(row)[:80] or (f"a {row['ranks']} rank" if "ranks" in row else ""),
        ]
        for name, row in results.of("nccl").items()
    ]
    return ["", "error", "backend", ""], lines


def tests(results: Results) -> Table:
    lines = [
        [", ".join(f"{n} {what}" for what, n in row.get("counts", {}).items()), status(row)[:80]]
        for row in results.of("tests").values()
    ]
    lines += [[name, "failed"] for row in results.of("tests").values() for name in row.get("failures", ())]
    return ["", ""], lines


def aims(results: Results) -> Table:
    return ["", "found", "at most", "met"], of_run.lines(results)


TABLES = {
    "Aims": aims,
    "GPU tests": tests,
    "Relative error against one device (float64, virtual ranks)": correctness,
    "One rank under the process group's backend": nccl,
    "A step of a 1.2-billion decoder (16 layers, 4 x 2048 tokens, bf16; AdamW)": speed,
    "Whole steps by plan, one rank": memory,
    "The machine": machine,
}


def heading(results: Results) -> str:
    facts = results.facts
    more = "".join(f", {word} {facts[word]}" for word in ("cuda", "driver") if facts.get(word))
    return f"{facts.get('card')}, torch {facts.get('torch')}{more}, {facts.get('date')}"


def as_text(results: Results) -> str:
    """All tables, in columns; and what is not as it should be."""
    parts = [heading(results)]
    for title, make in TABLES.items():
        titles, lines = make(results)
        if lines:
            parts += ["", title, *_columns([titles, *lines])]
    every: Counter[str] = Counter(row["status"] for cells in results.rows.values() for row in cells.values())
    parts += [
        "",
        *results.facts.get("notes", ()),
        "Cells: " + ", ".join(f"{count} {what}" for what, count in every.most_common()),
    ]
    for name in results.bad:
        part, cell = name.split(": ", 1)
        parts.append(f"  {name[:70]}: {status(results.rows[part][cell])[:120]}")
    return "\n".join(parts)


def _columns(lines: list[list[str]]) -> list[str]:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return [
        "  ".join(
            x.ljust(w) if i == 0 else x.rjust(w) for i, (x, w) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]


def as_markdown(results: Results) -> str:
    """All tables but the aims, for README.md."""
    parts = [f"{heading(results)} (`make gpu`):"]
    for title, make in TABLES.items():
        titles, lines = make(results)
        if lines and make is not aims:
            rule = ["---"] * len(titles)
            parts += ["", f"**{title}**", "", *("| " + " | ".join(line) + " |" for line in (titles, rule, *lines))]
    return "\n".join(parts)


def write_readme(results: Results, path: Path) -> None:
    """Put the tables between the markers of README.md.

    Raises:
        ValueError: the markers are not there.
    """
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(BEGIN)
    _, ends, after = rest.partition(END)
    if not (found and ends):
        raise ValueError(f"{path} has no lines {BEGIN} and {END}")
    path.write_text(f"{before}{BEGIN}\n{as_markdown(results)}\n{END}{after}", encoding="utf-8")
