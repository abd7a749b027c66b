"""``shardfx schedule 1f1b --stages 4 --microbatches 8 --out 1f1b.svg``: the rows, what they keep and cost, and a
picture."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from rich.console import Console

from shardfx.ir.errors import Error
from shardfx.ir.schedule.actions import Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, ScheduleReport, check_schedule
from shardfx.passes.loops import SCHEDULES, make_schedule
from shardfx.report.console import table

from .timeline import Timeline, simulate

COST = re.compile(r"(\w+)\s*=\s*(\d+\.?\d*(?:e-?\d+)?)", re.ASCII)


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(SCHEDULES)}, auto, or a file of rows")
    parser.add_argument("--stages", type=int, required=True, metavar="N", help="stages on all ranks together")
    parser.add_argument(
        "--microbatches", type=int, required=True, metavar="N", help="micro-batches (micro-batches) of a step"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks (default: as many as the stages need)")
    parser.add_argument("--max-in-flight", type=int, metavar="N", help="micro-batches that may be in flight on a rank")
    parser.add_argument("--costs", default="", metavar="F=1,B=2,...", help="how long each kind of action takes")
    parser.add_argument("--comm", type=float, default=0.0, metavar="TIME", help="how long a transfer takes")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw it, as SVG")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write it as a trace for Perfetto")


def run_schedule(arguments: argparse.Namespace, out: Console) -> int:
    """Print the rows, and for each rank what it keeps and how long it waits; draw on request."""
    costs = {**COSTS, **parse_costs(arguments.costs)}
    schedule = _schedule(arguments, costs)
    report = check_schedule(schedule, stages=arguments.stages, microbatches=arguments.microbatches, costs=costs)
    timeline = simulate(schedule, costs, arguments.comm)
    out.print(str(schedule), markup=False, soft_wrap=True)
    out.print()
    _print_ranks(report, timeline, out)
    out.print(f"\nA step takes {timeline.step:.4g}, of which {timeline.bubble:.1%} is bubble; ", end="")
    out.print(f"{timeline.period:.4g} where ranks begin the next without the others.", soft_wrap=True)
    if arguments.out is not None:
        title = f"{Path(arguments.name).name}, {len(schedule.ranks)} ranks"
        out.print(f"\nDrawn   {timeline.draw(arguments.out, title)}", soft_wrap=True)
    if arguments.trace is not None:
        out.print(f"\nTraced  {timeline.trace(arguments.trace)}", soft_wrap=True)
    return 0


def parse_costs(text: str) -> dict[str, float]:
    """The costs that ``F=1,B=2.5`` says.

    Raises:
        Error: it cannot be read.
    """
    items = [COST.fullmatch(item.strip()) for item in text.split(",") if item.strip()]
    if not all(items):
        expected = "kind=time, with commas between: F=1,B=2.5"
        raise Error("the costs cannot be read", where="--costs", expected=expected, got=text)
    return {item[1]: float(item[2]) for item in items if item}


def _schedule(arguments: argparse.Namespace, costs: Costs) -> Schedule:
    """The schedule of that name, or in that file."""
    path = Path(arguments.name)
    if arguments.name not in SCHEDULES and path.is_file():
        if arguments.ranks is not None or arguments.max_in_flight is not None:
            raise Error(
                "a file of rows says itself how many ranks there are, and what is live",
                where=str(path),
                expected="no --ranks and no --max-in-flight",
                got=f"--ranks {arguments.ranks} --max-in-flight {arguments.max_in_flight}",
            )
        return Schedule.parse(path.read_text(encoding="utf-8"))
    numbers = {each: getattr(arguments, each) for each in ("stages", "microbatches", "ranks", "max_in_flight")}
    return make_schedule(arguments.name, costs=costs, **numbers)


def _print_ranks(report: ScheduleReport, timeline: Timeline, out: Console) -> None:
    made = table("Ranks", "rank", "stages", "live micro-batches", "works", "waits inside", right=(2, 3, 4))
    for rank in timeline.schedule.ranks:
        stages = ", ".join(map(str, timeline.schedule.stages_of(rank)))
        numbers = f"{report.peaks[rank]}", f"{timeline.busy[rank]:.4g}", f"{timeline.waits[rank]:.4g}"
        made.add_row(f"{rank}", stages, *numbers)
    out.print(made)
