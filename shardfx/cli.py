"""The command line: ``shardfx demo | passes | rules | plan | explain | schedule`` (also ``python -m shardfx``).

    shardfx passes
    shardfx rules
    shardfx plan shardfx.demo.demo_model:make --mesh dp=2,tp=2 --draw out --save plan.json
    shardfx explain my/model.py:make --mesh dp=2,tp=2 layers.0.wo
    shardfx schedule 1f1b --stages 4 --microbatches 8 --out 1f1b.svg

``MODULE:FUNCTION`` names a function without arguments that returns ``(model, hints)``; MODULE is importable from the
current folder, or a file. A mistake is printed as text, and the exit code is 2.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import nn

from shardfx.api import parallelize
from shardfx.demo.run_demo import demo
from shardfx.hints import Hints
from shardfx.ir.errors import Error, ShardfxWarning
from shardfx.ir.graph import op_name
from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.schedule.actions import Schedule
from shardfx.ir.schedule.simulation import COSTS, Costs, ScheduleReport, check_schedule
from shardfx.module.parallel_module import ParallelModule
from shardfx.module.rule_checks import example, refutations
from shardfx.passes import Pass, options_text
from shardfx.passes.stages import SCHEDULES, make_schedule
from shardfx.plan import version
from shardfx.plugins import all_passes, plugin_rules
from shardfx.report.console import table
from shardfx.schedules.timeline import Timeline, simulate


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; gives the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.run is None:
        parser.print_help()
        return 2
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ShardfxWarning)  # the report has them
            code: int = arguments.run(arguments, console())
    except Error as error:
        print(error, file=sys.stderr)
        return 2
    return code


def console() -> Console:
    """Standard output: with colours on a terminal, as wide as a report elsewhere."""
    tty = sys.stdout.isatty()
    return Console(width=None if tty else 120, emoji=False, highlight=False)


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="shardfx", description="A graph-level parallelizing compiler for PyTorch.")
    made.add_argument("--version", action="version", version=f"shardfx {version()}")
    made.set_defaults(run=None)
    commands = made.add_subparsers(metavar="COMMAND")

    def command(name: str, run: Callable[[Any, Console], int], text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(run=run)
        return added

    text = "train a small model on 4 virtual ranks against one device, prove it, draw it"
    shown = command("demo", lambda arguments, out: demo(out, arguments.out, arguments.steps), text)
    shown.add_argument("--steps", type=int, default=40, metavar="N", help="training steps (default: 40)")
    shown.add_argument(
        "--out", type=Path, default=Path("demo_out"), metavar="DIR", help="where to write (default: demo_out)"
    )
    command("passes", run_passes, "list the passes that there are, built-in ones and those of plugins")
    command("rules", run_rules, "list the op rules of installed packages, and check them by running the ops")
    plan = command("plan", _plan, "plan a model, and say what the plan costs")
    explain = command("explain", _explain, "say why something is sharded as it is")
    for each in (plan, explain):
        each.add_argument("target", metavar="MODULE:FUNCTION", help="a function that returns (model, hints)")
        each.add_argument("--mesh", required=True, help="the axes of ranks, outermost first: dp=2,tp=2")
        each.add_argument("--machine", metavar="NAME", help="what a rank runs on: h100-dgx, or a JSON file like those")
    plan.add_argument("--draw", type=Path, metavar="DIR", help="draw the program before and after, as SVG")
    plan.add_argument("--every-pass", action="store_true", help="with --draw: draw it after each pass too")
    plan.add_argument("--save", type=Path, metavar="FILE", help="save the decisions as JSON")
    add_schedule_arguments(command("schedule", run_schedule, "make the schedule of a pipeline, simulate it, draw it"))
    explain.add_argument("name", metavar="NAME", help="a parameter, args.N, a module's path, or a value such as %%12")
    return made


def run_passes(arguments: argparse.Namespace, out: Console) -> int:
    """The table of passes; a plugin that cannot be used is named below it, and makes the exit code 2."""
    made = table("Passes", "name", "what it does", "options", "requires", "establishes", "from")
    broken = list[Error]()
    for name, origin, kind in all_passes():
        if isinstance(kind, Error):
            made.add_row(Text(name, "red"), Text("see below", "red"), "", "", "", origin)
            broken.append(kind)
            continue
        names = ("\n".join(sorted(each)) for each in (kind.requires, kind.establishes))
        made.add_row(Text(name, "bold"), summary(kind), options_text(kind, "\n"), *names, origin)
    out.print(made)
    for error in broken:
        print(f"\n{error}", file=sys.stderr)
    return 2 if broken else 0


def run_rules(arguments: argparse.Namespace, out: Console) -> int:
    """The table of the rules that packages bring, each checked on a call that follows from its template; what is wrong
    is named below it, and makes the exit code 2."""
    found = plugin_rules()
    if not found:
        out.print("No installed package brings rules of its own, by entry points in 'shardfx.rules'.")
        return 0
    made, wrong = table("Rules", "op", "rule", "checked", "from"), list[str]()
    for rule, origin in found:
        for op in rule.ops:
            of = example(rule, op)
            why = refutations(rule, of) if of is not None else []
            said = f"{'wrong' if why else 'right'} on {of!r}" if of is not None else "not checked: see sx.check_rule"
            made.add_row(Text(op_name(op), "red" if why else "bold"), Text(rule.text), Text(said), origin)
            wrong += why
    out.print(made)
    for text in wrong:
        print(f"\n{text}", file=sys.stderr)
    return 2 if wrong else 0


def summary(kind: type[Pass]) -> str:
    """What the docstring of a pass says first."""
    text = (inspect.getdoc(kind) or "").partition("\n\n")[0]
    return "" if text.startswith(f"{kind.__name__}(") else " ".join(text.split())  # a dataclass without one


def _plan(arguments: argparse.Namespace, out: Console) -> int:
    pm = planned(arguments)
    out.print(pm.report())
    if arguments.draw is not None:
        paths = pm.draw(arguments.draw, every_pass=arguments.every_pass)
        out.print(f"\nDrawn   {', '.join(map(str, paths))}", soft_wrap=True)
    if arguments.save is not None:
        out.print(f"\nSaved   {pm.plan.save(arguments.save)}", soft_wrap=True)
    return 0


def _explain(arguments: argparse.Namespace, out: Console) -> int:
    out.print(str(planned(arguments).explain(arguments.name)), markup=False, soft_wrap=True)
    return 0


def planned(arguments: argparse.Namespace) -> ParallelModule:
    """The model of the command line, parallel on its mesh."""
    mesh = parse_mesh(arguments.mesh)
    model, hints = load(arguments.target)
    if arguments.machine is not None:
        hints = replace(hints, machine=arguments.machine)
    return parallelize(model, mesh, hints, virtual=True)


def parse_mesh(text: str) -> Mesh:
    """The mesh that ``dp=2,tp=2`` says; an axis of iterations is ``mb=Loop(8)``, or ``mb=Loop(8, interleave=True)``."""
    axes: dict[str, int | Loop] = {}
    for item in re.split(r",(?![^(]*\))", text):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(?:(\d+)|Loop\((\d+)(\s*,\s*interleave=True)?\))\s*", item)
        if match is None or match[1] in axes:
            expected = "name=ranks for each axis, with commas between: dp=2,tp=2"
            raise Error("the mesh cannot be read", where="--mesh", expected=expected, got=text)
        axes[match[1]] = int(match[2]) if match[2] else Loop(int(match[3]), bool(match[4]))
    return Mesh(links=None, **axes)


def load(target: str) -> tuple[nn.Module, Hints]:
    """Call the function that ``MODULE:FUNCTION`` names.

    Raises:
        Error: there is no such module or function; it fails, or returns something else.
    """
    name, _, function = target.partition(":")
    if not name or not function:
        expected = "package.module:function"
        raise Error("this does not name a function", where="MODULE:FUNCTION", expected=expected, got=target)
    module = _import(name, target)
    make = getattr(module, function, None)
    if not callable(make):
        found = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        expected = ", ".join(found) or "a function"
        raise Error(f"no function {function!r} in {name}", where=target, expected=expected, got=function)
    try:
        made = make()
    except Error:
        raise
    except Exception as error:
        raise _failed(f"{function}() failed", error, target) from error
    match made:
        case (nn.Module() as model, Hints() as hints):
            return model, hints
    what, got = f"{function}() returns something else", repr(made)[:200]
    raise Error(what, where=target, expected="(model, Hints(...))", got=got)


def _import(name: str, target: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        if not name.endswith(".py"):
            return importlib.import_module(name)
        spec = importlib.util.spec_from_file_location(Path(name).stem, name)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        spec.loader.exec_module(module)
        return module
    except Exception as error:
        raise _failed(f"{name} cannot be imported", error, target) from error


def _failed(what: str, error: Exception, target: str) -> Error:
    """An error in the user's own code: its last line, without the whole traceback."""
    ours = (__file__, importlib.__file__)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if each.filename not in ours]
    lines = [f"{each.filename}:{each.lineno} in {each.name}" for each in frames if "<frozen" not in each.filename]
    expected, got = "a function that returns (model, hints)", f"{type(error).__name__}: {error}"
    return Error(what, where=[target, *lines][-1], expected=expected, got=got)


COST = re.compile(r"(\w+)\s*=\s*(\d+\.?\d*(?:e-?\d+)?)", re.ASCII)


def add_schedule_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of the command."""
    parser.add_argument("name", metavar="NAME", help=f"{', '.join(SCHEDULES)}, auto, or a file of rows")
    parser.add_argument("--stages", type=int, required=True, metavar="N", help="stages on all ranks together")
    parser.add_argument("--microbatches", type=int, required=True, metavar="N", help="micro-batches of a step")
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
