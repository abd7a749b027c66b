"""Tables of a report on a terminal."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from shardfx.ir.cost.footprint import loop_memory
from shardfx.ir.cost.machine import DEFAULT
from shardfx.ir.graph import op_name
from shardfx.ir.program.arena_layout import arena_use
from shardfx.ir.schedule.simulation import check_schedule
from shardfx.ir.text.printer import size_text
from shardfx.report.console import count_text, seconds_text, table

if TYPE_CHECKING:
    from shardfx.ir.cost.footprint import Peak
    from shardfx.report.figures import Cause, CommRow, Report, Timing
    from shardfx.report.report_rows import TileRow


MOST_CAUSES, MOST_HOLDERS, MOST_LAYERS = 4, 6, 20
FORMULA = (
    "peak = parameters + buffers + states + constants + inputs + the largest sum of live storages over the program\n"
    "Not counted: the states of an optimizer outside of the program, workspaces inside of ops, fragmentation."
)


def report_tables(report: Report, first: Iterable[RenderableType] = ()) -> RenderableType:
    """The tables of a report: the ``first`` ones, memory, communication, time, warnings."""
    mesh, (before, after) = report.mesh, report.ops
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    head = Text.assemble(("Plan", "bold"), f"  {axes}: {mesh.size} ranks; {before} ops captured, {after} planned")
    parts: list[RenderableType] = [head, "", *first, *_memory(report), "", _communication(report), ""]
    parts += [*_tiles(report), *_time(report)]
    if report.notes:
        parts += [Text("notes"), *(Padding(Text(f"- {note}"), (0, 0, 0, 2)) for note in report.notes)]
    if report.warnings:
        parts += ["", Text("Warnings", "bold")]
        parts += [Padding(Text(f"- {warning}", "yellow"), (0, 0, 0, 2)) for warning in report.warnings]
    return Group(*parts)


NEW = ("new buffers", "new parameters", "new states")
"""The outputs that are written to stored values once the program is done."""


def _memory(report: Report) -> list[RenderableType]:
    memory, peak = report.memory, report.memory.footprint.peak
    arena = arena_use(memory.program)
    slots = f"{arena.slots} slots in one arena, of which {size_text(arena.live)} are live at once" if arena else ""
    made = table("Memory of one rank", "", "bytes", "what is counted", right=[1])
    for name, size, note in (
        ("parameters", memory.stored.get("parameters", 0), "the stored shards"),
        ("buffers", memory.stored.get("buffers", 0), "the stored shards"),
        ("states", memory.stored.get("optimizer states", 0), "the stored shards of the optimizer's"),
        ("constants", memory.stored.get("constants", 0), "tensors that the model made when it was captured"),
        ("inputs", memory.stored.get("inputs", 0), "this rank's part of the batch"),
        ("gathered", peak.of("gathered"), "at the peak: stored parameters, gathered"),
        ("fetched", peak.of("fetched"), "at the peak: what was offloaded, shortly before and while it is used"),
        ("activations", peak.of("activations"), "at the peak: made by the forward pass, kept for the backward"),
        ("gradients", peak.of("gradients"), f"at the peak; {size_text(memory.gradients)} when the step is done"),
        ("results", peak.of("results") + sum(map(peak.of, NEW)), "at the peak: loss, results, new contents of buffers"),
        ("communication", peak.of("communication"), "at the peak: what is packed, sent and received"),
        ("kept", peak.of("kept"), "at the peak: memory of gathers and gradients that is kept between steps, idle then"),
        ("arena", peak.of("arena"), slots),
        ("temporaries", peak.of("temporaries"), "at the peak: everything else"),
    ):
        if size or name in ("parameters", "activations", "gradients", "temporaries"):
            made.add_row(name, size_text(size), Text(note, "dim"))
    node = peak.node
    at = f"in %{node.name} = {op_name(node.op)} {node.where}" if node is not None else ""
    made.add_section()
    how = f"their sum, {at}".rstrip(", ")
    made.add_row(Text("peak", "bold"), Text(size_text(memory.peak), "bold"), Text(how))
    for iteration in loop_memory(memory.footprint):
        name, text = (
            f"an iteration of {iteration.axis}",
            f"at its peak: made in each of {iteration.count} iterations, and gone with it",
        )
        if iteration.in_flight > 1:
            name, text = (
                f"iterations of {iteration.axis}",
                f"at the peak of {iteration.in_flight} under way, of {iteration.count}",
            )
        stays = f"{text}; beside it {size_text(iteration.before)} stay"
        made.add_row(name, size_text(iteration.own), Text(stays, "dim"))
    if memory.host:
        made.add_row("offloaded", size_text(memory.host), Text("in other memory than the device's, at most", "dim"))
    machine = report.time.machine
    share = memory.peak / machine.memory
    of = "" if machine.name == DEFAULT else f"\n{share:.2%} of the {size_text(machine.memory)} of {machine.name}."
    return [made, Text(FORMULA + of, "dim"), *_holders(peak)]


def _holders(peak: Peak) -> list[RenderableType]:
    """The largest storages at the peak, those alike in repeated layers merged."""
    alike: dict[tuple[str, str], list[int]] = {}
    for stored in peak.items:
        node = stored.node
        what = f"{op_name(node.op)} @ {node.where.module}" if node is not None and node.where.module else ""
        what = what or (op_name(node.op) if node is not None else "")
        alike.setdefault((stored.category, starred(what)), []).append(stored.nbytes)
    if not alike:
        return []
    made = table("Held at the peak", "by", "bytes", "as", right=[1])
    ranked = sorted(alike.items(), key=lambda item: -sum(item[1]))
    for (category, what), sizes in ranked[:MOST_HOLDERS]:
        made.add_row(f"{what}{times(len(sizes))}", size_text(sum(sizes)), Text(category, "dim"))
    if len(ranked) > MOST_HOLDERS:
        rest = sum(sum(sizes) for _, sizes in ranked[MOST_HOLDERS:])
        made.add_row(f"and {len(ranked) - MOST_HOLDERS} more kinds", size_text(rest), "")
    return ["", made]


def starred(name: str) -> str:
    """A name with its numbers as stars, so that those of repeated layers are equal."""
    return re.sub(r"(?<![^. ])\d+(?![^. ])", "*", name)


def times(count: int) -> str:
    """A count in words: nothing for once."""
    return f" ({count}x)" if count > 1 else ""


def _communication(report: Report) -> RenderableType:
    rows = report.communication.rows
    if not rows:
        return Text.assemble(("Communication", "bold"), "  none")
    columns = ("axes", "kind", "calls", "sent", "time", "because of")
    made = table("Communication of one rank in one step", *columns, right=[2, 3, 4])
    for row in rows:
        axes = ", ".join(row.axes)
        made.add_row(
            Text(axes, "cyan"), row.kind, str(row.calls), size_text(row.nbytes), seconds_text(row.seconds), _causes(row)
        )
    total = report.communication
    made.add_section()
    made.add_row("all", "", str(total.calls), size_text(total.nbytes), seconds_text(total.seconds), "")
    return made


def _tiles(report: Report) -> list[RenderableType]:
    """Costs of image tiles by layer, those alike in repeated layers merged."""
    if not report.tiles:
        return []
    alike: dict[str, list[TileRow]] = {}
    for row in report.tiles:
        alike.setdefault(starred(row.module), []).append(row)
    columns = ("layer", "exchanges", "rows sent", "border recompute", "of the layer")
    made = table("Tiles of one rank by layer; border recompute is work done twice", *columns, right=[1, 2, 3, 4])
    for name, rows in list(alike.items())[:MOST_LAYERS]:
        border, flops = sum(row.border_flops for row in rows), sum(row.flops for row in rows)
        sent, share = size_text(sum(row.nbytes for row in rows)), f"{border / flops:.1%}" if border else ""
        exchanges = str(sum(row.exchanges for row in rows))
        made.add_row(f"{name}{times(len(rows))}", exchanges, sent, count_text(border, "FLOP"), share)
    if len(alike) > MOST_LAYERS:
        made.add_row(f"and {len(alike) - MOST_LAYERS} more layers", "", "", "", "")
    made.add_section()
    sent, border = size_text(sum(row.nbytes for row in report.tiles)), sum(row.border_flops for row in report.tiles)
    share = f"{border / report.time.cost.flops:.1%}" if border else ""
    made.add_row("all", str(sum(row.exchanges for row in report.tiles)), sent, count_text(border, "FLOP"), share)
    return [made, ""]


def _causes(row: CommRow) -> Text:
    """The causes of a row, those alike in repeated layers merged, the most bytes first."""
    alike: dict[str, list[Cause]] = {}
    for cause in row.causes:
        module = "" if " of " in cause.what and cause.what.startswith(("gradient", "new")) else cause.module
        text = f"{cause.what} @ {module}" if module and "is stored" not in cause.what else cause.what
        alike.setdefault(starred(text), []).append(cause)
    ranked = sorted(alike.items(), key=lambda item: -sum(cause.nbytes for cause in item[1]))
    lines = [f"{text}{times(len(causes))}" for text, causes in ranked[:MOST_CAUSES]]
    if len(ranked) > MOST_CAUSES:
        lines.append(f"and {len(ranked) - MOST_CAUSES} more kinds")
    return Text("\n".join(lines), "dim")


def _time(report: Report) -> list[RenderableType]:
    time = report.time
    machine = time.machine
    dtypes = [str(dtype).removeprefix("torch.") for dtype in dict.fromkeys(w.dtype for w in time.cost.work if w.flops)]
    rates = ", ".join(f"{count_text(machine.rate(getattr(torch, d)), 'FLOP/s')} in {d}" for d in dtypes[:2])
    rates = f"{rates or 'no products'}, {count_text(machine.bandwidth, 'B/s')}, {seconds_text(machine.overhead)} a call"
    made = table(f"Time of one step on {machine.name} (an estimate)", "", "time", "", right=[1])
    made.add_row(
        "compute", seconds_text(time.compute), Text(f"{count_text(time.cost.flops, 'FLOP')}, at {rates}", "dim")
    )
    made.add_row("communication", seconds_text(time.communication), Text("by the links of the mesh", "dim"))
    if time.cost.copied:
        made.add_row("offloaded and fetched", seconds_text(time.carrying), Text("by the link to other memory", "dim"))
    if time.exposed or time.hidden:
        note = f"communication that no compute hides; {seconds_text(time.hidden)} are hidden"
        made.add_row("exposed", seconds_text(time.exposed), Text(note, "dim"))
    made.add_section()
    idle = f", and {time.timeline.bubble:.1%} bubble" if report.stages else ""
    made.add_row(
        Text("step", "bold"),
        Text(seconds_text(time.total), "bold"),
        Text(f"compute and exposed communication{idle}", "dim"),
    )
    passes = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in report.passes.items())
    return [made, "", Text.assemble(("Passes  ", "bold"), (passes or "none", "dim"))]


MOST_ROWS = 8
SHOWN = 12
"""The most actions of a row that are shown."""


def stage_tables(report: Report) -> list[RenderableType]:
    """Tables of stages, schedule and step time; empty for a plan that has no stages and was not measured."""
    made: list[RenderableType] = []
    if report.stages:
        made += [_stages(report), ""]
    if report.timing is not None:
        made += [*_schedule(report.timing, bool(report.stages)), _step(report.timing), ""]
    return made


def _stages(report: Report) -> RenderableType:
    columns = "stage", "ranks", "modules", "parameters", "on a rank", "sent an iteration", "operations"
    made = table("Stages", *columns, right=[0, 3, 4, 5, 6])
    for row in report.stages:
        ranks = f"{row.ranks[0]}" if len(row.ranks) == 1 else f"{row.ranks[0]} .. {row.ranks[-1]}"
        numbers = size_text(row.nbytes), size_text(row.sent), count_text(row.flops, "FLOP")
        made.add_row(f"{row.stage}", ranks, ", ".join(row.modules), count_text(row.parameters, "").strip(), *numbers)
    return made


def _schedule(timing: Timing, staged: bool) -> list[RenderableType]:
    """The rows, and the live iterations of each."""
    if not staged:
        return []
    schedule = timing.predicted.planned
    assert schedule is not None
    report = check_schedule(schedule, stages=len(schedule.stages), microbatches=len(schedule.microbatches))
    made = table("Schedule", "place", "live iterations", "actions", right=[0, 1])
    for place, row in enumerate(schedule.rows[:MOST_ROWS]):
        more = f" ... ({len(row)})" if len(row) > SHOWN else ""
        made.add_row(f"{place}", f"{report.peaks[place]}", Text(" ".join(map(str, row[:SHOWN])) + more, "dim"))
    if len(schedule.rows) > MOST_ROWS:
        made.add_row("...", "", Text(f"and {len(schedule.rows) - MOST_ROWS} rows more", "dim"))
    return [made, ""]


def _step(timing: Timing) -> RenderableType:
    seen, measured = timing.predicted, timing.measured
    columns = ["predicted"] if measured is None else ["predicted", "measured"]
    made = table("A step, over all ranks", "", *columns, right=[1, 2])

    def add(name: str, predicted: str, then: str) -> None:
        made.add_row(name, predicted, *([then] if measured is not None else []))

    add("step", seconds_text(seen.step), "" if measured is None or timing.virtual else seconds_text(measured.step))
    if measured is not None and timing.virtual:
        add("all ranks' work in one process", seconds_text(timing.as_measured), seconds_text(measured.step))
    bubble = "" if measured is None or timing.virtual else f"{measured.bubble:.1%}"
    add("bubble", f"{seen.bubble:.1%}", bubble)
    add("communication that nothing hides", seconds_text(seen.exposed), "")
    return made
