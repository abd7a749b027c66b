"""Tables of a report on a terminal."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

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
from shardfx.runtime.expert_load import busiest

if TYPE_CHECKING:
    from shardfx.ir.cost.footprint import Peak, Storage
    from shardfx.ir.cost.machine import Machine
    from shardfx.memory.rank_memory import RankMemory
    from shardfx.report.figures import CommRow, Report, TileRow


MOST_CAUSES, MOST_HOLDERS, MOST_LAYERS = 4, 6, 20
COUNTED = (
    "peak = parameters + buffers + states + constants + inputs + the largest sum of live storages over the program\n"
    "Not counted: the states of an optimizer outside of the program, workspaces inside of ops, fragmentation."
)
NOTES = {
    "parameters": "the stored shards",
    "buffers": "the stored shards",
    "optimizer states": "the stored shards",
    "constants": "tensors that the model made when it was captured",
    "inputs": "this rank's part of the batch",
    "gathered parameters": "stored parameters, gathered",
    "cast parameters": "in the dtype of mixed precision",
    "fetched": "what was offloaded, shortly before and while it is used",
    "activations": "made by the forward pass, kept for the backward",
    "results": "loss and results",
    "communication buffers": "what is packed, sent and received, and memory for it that is kept between steps",
    "temporaries": "everything else",
}
"""What is counted at the peak, by category."""
T = TypeVar("T")


def report_tables(report: Report) -> RenderableType:
    """The tables of a report: stages, memory, communication, tiles, time, warnings."""
    mesh, (before, after) = report.mesh, report.ops
    axes = " x ".join(f"{axis.name} {axis.size}" for axis in mesh.axes)
    head = Text.assemble(("Plan", "bold"), f"  {axes}: {mesh.size} ranks; {before} ops captured, {after} planned")
    parts: list[RenderableType] = [head, "", *_stages(report), *memory_tables(report.memory, report.time.machine), ""]
    parts += [_communication(report), "", *_tiles(report), *_experts(report), *_time(report)]
    for title, style, texts in (("notes", "", report.notes), ("Warnings", "yellow", report.warnings)):
        if texts:
            parts += ["", Text(title, "bold"), *(Padding(Text(f"- {text}", style), (0, 0, 0, 2)) for text in texts)]
    return Group(*parts)


def memory_tables(memory: RankMemory, machine: Machine | None = None) -> list[RenderableType]:
    """The bytes of a rank at the peak by category, and the largest storages; as a share of those of ``machine``."""
    peak, arena = memory.footprint.peak, arena_use(memory.program)
    basis = " (predicted; torch.compile plans memory itself)" if memory.compiled else ""
    notes = NOTES | {"gradients": f"{size_text(memory.gradients)} when the step is done"}
    if arena:
        notes["arena"] = f"{arena.slots} slots in one arena, of which {size_text(arena.live)} are live at once"
    made = table(f"Memory of rank {memory.rank}{basis}", "at the peak", "bytes", "what is counted", right=[1])
    for name, nbytes in memory.by_category.items():
        made.add_row(name, size_text(nbytes), Text(notes.get(name, ""), "dim"))
    at = f"in %{peak.node.name} = {op_name(peak.node.op)} {peak.node.where}".rstrip() if peak.node is not None else ""
    made.add_section()
    made.add_row(Text("peak", "bold"), Text(size_text(memory.peak), "bold"), f"their sum, {at}".rstrip(", "))
    for each in loop_memory(memory.footprint):
        name, text = f"an iteration of {each.axis}", f"made in each of {each.count} iterations, and gone with it"
        if each.in_flight > 1:
            name, text = f"iterations of {each.axis}", f"{each.in_flight} in flight, of {each.count}"
        made.add_row(name, size_text(each.own), Text(f"{text}; beside it {size_text(each.before)} stay", "dim"))
    if memory.host:
        made.add_row("offloaded", size_text(memory.host), Text("in other memory than the device's, at most", "dim"))
    if machine is None:
        made.add_row("reserved on CUDA", size_text(memory.reserved), Text("with rounding and fragmentation", "dim"))
    share, named = "", machine is not None and machine.name != DEFAULT
    if machine is not None and named:
        share = f"\n{memory.peak / machine.memory:.2%} of the {size_text(machine.memory)} of {machine.name}."
    return [made, Text(COUNTED + share, "dim"), *_holders(peak)]


def _holders(peak: Peak) -> list[RenderableType]:
    """The largest storages at the peak."""
    found: list[tuple[str, Storage]] = []
    for item in peak.items:
        node = item.node
        module = f" @ {node.where.module}" if node is not None and node.where.module else ""
        found.append((f"{item.category}: {op_name(node.op)}{module}" if node is not None else item.category, item))
    made = table("Held at the peak", "by", "bytes", right=[1])
    ranked = merged(found, nbytes=lambda item: item.nbytes)
    for text, items in ranked[:MOST_HOLDERS]:
        made.add_row(text, size_text(sum(item.nbytes for item in items)))
    if rest := ranked[MOST_HOLDERS:]:
        made.add_row(f"and {len(rest)} more kinds", size_text(sum(item.nbytes for _, items in rest for item in items)))
    return ["", made] if ranked else []


def merged(named: Iterable[tuple[str, T]], nbytes: Callable[[T], float] | None = None) -> list[tuple[str, list[T]]]:
    """Things by their names, those of repeated layers as one (``layers.* (8x)``), most bytes first."""
    alike: dict[str, list[T]] = {}
    for name, each in named:
        alike.setdefault(re.sub(r"(?<![^. ])\d+(?![^. ])", "*", name), []).append(each)
    found = [(f"{name} ({len(each)}x)" if len(each) > 1 else name, each) for name, each in alike.items()]
    return found if nbytes is None else sorted(found, key=lambda pair: -sum(map(nbytes, pair[1])))


def _communication(report: Report) -> RenderableType:
    total = report.communication
    if not total.rows:
        return Text.assemble(("Communication", "bold"), "  none")
    columns = ("axes", "kind", "calls", "sent", "time", "because of")
    made = table("Communication of one rank in one step", *columns, right=[2, 3, 4])
    for row in total.rows:
        figures = str(row.calls), size_text(row.nbytes), seconds_text(row.seconds)
        made.add_row(Text(", ".join(row.axes), "cyan"), row.kind, *figures, _causes(row))
    made.add_section()
    made.add_row("all", "", str(total.calls), size_text(total.nbytes), seconds_text(total.seconds), "")
    return made


def _causes(row: CommRow) -> Text:
    """The causes of a row, the most bytes first."""
    named = []
    for cause in row.causes:
        in_name = "is stored" in cause.what or cause.what.startswith(("gradient of", "new content of"))
        named.append((f"{cause.what} @ {cause.module}" if cause.module and not in_name else cause.what, cause))
    ranked = merged(named, nbytes=lambda cause: cause.nbytes)
    more = [f"and {len(ranked) - MOST_CAUSES} more kinds"] if len(ranked) > MOST_CAUSES else []
    return Text("\n".join([*(text for text, _ in ranked[:MOST_CAUSES]), *more]), "dim")


def _tiles(report: Report) -> list[RenderableType]:
    """Costs of image tiles by layer."""
    if not report.tiles:
        return []
    columns = ("layer", "exchanges", "rows sent", "border recompute", "of the layer")
    made = table("Tiles of one rank by layer; border recompute is work done twice", *columns, right=[1, 2, 3, 4])

    def add(name: str, rows: Sequence[TileRow], flops: float) -> None:
        border, sent = sum(row.border_flops for row in rows), size_text(sum(row.nbytes for row in rows))
        share = f"{border / flops:.1%}" if border else ""
        made.add_row(name, str(sum(row.exchanges for row in rows)), sent, count_text(border, "FLOP"), share)

    layers = merged((row.module, row) for row in report.tiles)
    for name, rows in layers[:MOST_LAYERS]:
        add(name, rows, sum(row.flops for row in rows))
    if len(layers) > MOST_LAYERS:
        made.add_row(f"and {len(layers) - MOST_LAYERS} more layers")
    made.add_section()
    add("all", report.tiles, report.time.cost.flops)
    return [made, ""]


def _experts(report: Report) -> list[RenderableType]:
    """The load of experts in the last step that was recorded."""
    loads = report.measured.loads if report.measured is not None else {}
    made = table(
        "Load of experts", "module", "rows of the busiest rank", "over the mean", "of its room", right=[1, 2, 3]
    )
    for module, of_ranks in loads.items():
        rows, over, share = busiest([*of_ranks.values()])
        made.add_row(module, f"{rows:,}", f"{over:.2f}", f"{share:.0%}")
    return [made, ""] if loads else []


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
    idle = f", and {time.bubble:.1%} bubble" if report.stages else ""
    made.add_row(
        Text("step", "bold"),
        Text(seconds_text(time.total), "bold"),
        Text(f"compute and exposed communication{idle}", "dim"),
    )
    if measured := report.measured:
        note = f"{measured.bubble:.1%} bubble"
        if report.virtual:
            note = f"all ranks' work in one process: predicted {seconds_text(report.as_measured)}"
        made.add_row("measured", seconds_text(measured.step), Text(note, "dim"))
    passes = ", ".join(f"{name} {seconds_text(seconds)}" for name, seconds in report.passes.items())
    return [made, "", Text.assemble(("Passes  ", "bold"), (passes or "none", "dim"))]


MOST_ROWS = 8
SHOWN = 12
"""The most actions of a row that are shown."""


def _stages(report: Report) -> list[RenderableType]:
    """The stages, and the schedule with the live iterations of each row."""
    schedule = report.time.planned
    if schedule is None:
        return []
    columns = "stage", "ranks", "modules", "parameters", "on a rank", "sent an iteration", "operations"
    stages = table("Stages", *columns, right=[0, 3, 4, 5, 6])
    for each in report.stages:
        ranks = " .. ".join(map(str, dict.fromkeys((each.ranks[0], each.ranks[-1]))))
        figures = size_text(each.nbytes), size_text(each.sent), count_text(each.flops, "FLOP")
        count = count_text(each.parameters, "").strip()
        stages.add_row(f"{each.stage}", ranks, ", ".join(each.modules), count, *figures)
    peaks = check_schedule(schedule, stages=len(schedule.stages), microbatches=len(schedule.microbatches)).peaks
    rows = table("Schedule", "place", "live iterations", "actions", right=[0, 1])
    for place, row in enumerate(schedule.rows[:MOST_ROWS]):
        more = f" ... ({len(row)})" if len(row) > SHOWN else ""
        rows.add_row(f"{place}", f"{peaks[place]}", Text(" ".join(map(str, row[:SHOWN])) + more, "dim"))
    if len(schedule.rows) > MOST_ROWS:
        rows.add_row("...", "", Text(f"and {len(schedule.rows) - MOST_ROWS} rows more", "dim"))
    return [stages, "", rows, ""]
