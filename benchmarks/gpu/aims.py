"""The targets of a run, as data: a figure of the results, and its bound."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from .cells import TOLERANCE
from .results import Results, Row
from .speed import COMMON, EAGER, STEP, STEP_COMPILED, STEP_GRAPHS


@dataclass(frozen=True)
class Aim:
    """A figure that should be at most ``bound``; None where it was not measured."""

    name: str
    bound: float
    figure: Callable[[Results], float | None]


def quotient(name: str, other: str, key: str) -> Callable[[Results], float | None]:
    """One contender's figure over another's."""

    def figure(results: Results) -> float | None:
        one, two = (results.of("speed").get(each, {}).get(key) for each in (name, other))
        return one / two if one and two else None

    return figure


def rows(results: Results) -> Iterable[Row]:
    """The plans whose time and memory were measured."""
    yield from results.of("speed").values()
    yield from results.of("memory").values()


def worst_off(predicted: str, measured: str) -> Callable[[Results], float | None]:
    """By what fraction the worst prediction is off."""

    def figure(results: Results) -> float | None:
        pairs = [(row.get(predicted), row.get(measured)) for row in rows(results)]
        return max((abs(a / b - 1) for a, b in pairs if a and b), default=None)

    return figure


def worst_error(results: Results) -> float | None:
    """The largest error of a cell, over its tolerance; infinite where one has none, and should."""
    cells = [row for row in results.of("table").values() if row["status"] not in ("n/a", "not reached")]
    return max((row.get("error", math.inf) / row.get("tolerance", TOLERANCE) for row in cells), default=None)


def not_right(part: str) -> Callable[[Results], float | None]:
    """How many rows are not as they should be."""

    def figure(results: Results) -> float | None:
        cells = results.of(part).values()
        return sum(row["status"] not in ("ok", "n/a") for row in cells) if cells else None

    return figure


AIMS = (
    Aim("GPU tests that fail, or did not run", 0, not_right("tests")),
    Aim("cells of the table that are not right and proven", 0, not_right("table")),
    Aim("largest error of a cell, over its tolerance", 1.0, worst_error),
    Aim("pm.compile() and pm.step: time over torch.compile's", 1.0, quotient(STEP_COMPILED, COMMON, "ratio")),
    Aim("the same: memory", 1.0, quotient(STEP_COMPILED, COMMON, "allocated")),
    Aim("CUDA graphs and pm.step: time over torch.compile's", 0.97, quotient(STEP_GRAPHS, COMMON, "ratio")),
    Aim("pm.step: time over eager's", 1.05, quotient(STEP, EAGER, "ratio")),
    Aim("predicted peak, off by", 0.02, worst_off("peak_predicted", "allocated")),
    Aim("predicted reserved memory, off by", 0.1, worst_off("reserved_predicted", "reserved")),
    Aim("predicted time, off by", 0.15, worst_off("ms_predicted", "ms")),
    Aim(
        "offload: time of the step over its link's",
        1.1,
        lambda results: max((r["link_ratio"] for r in rows(results) if r.get("link_ratio")), default=None),
    ),
)


def lines(results: Results) -> list[list[str]]:
    """Each aim that was measured: name, figure, bound, and whether it was met."""
    found = [(aim, aim.figure(results)) for aim in AIMS]
    return [
        [aim.name, f"{figure:.3g}", f"{aim.bound:.3g}", "yes" if figure <= aim.bound else "NO"]
        for aim, figure in found
        if figure is not None
    ]
