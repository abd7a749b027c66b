"""Tables and figures on a terminal: with colours where it has them, or as plain text."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

WIDTH = 110


def render(what: RenderableType, width: int = WIDTH) -> str:
    """Render a table as plain text, without colours."""
    from rich.console import Console  # imported where it is used: plans and steps need no rich

    out = io.StringIO()
    Console(file=out, width=width, color_system=None, legacy_windows=False, emoji=False).print(what)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def table(title: str, *columns: str, right: Iterable[int] = ()) -> Table:
    """A table without vertical rules; the columns of the numbers ``right`` are flush right."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    numbers = set(right)
    for i, name in enumerate(columns):
        flush = "right" if i in numbers else "left"
        made.add_column(name, justify=flush, no_wrap=i in numbers, header_style="dim")  # type: ignore[arg-type]
    return made


def seconds_text(seconds: float) -> str:
    """``12.3 ms``: three digits at most."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns" if seconds else "0 s"


def count_text(number: float, unit: str) -> str:
    """``402 MFLOP``: three digits at most, in powers of 1000."""
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5:
            return f"{number:.3g} {prefix}{unit}"
        number /= 1000
    return f"{number:.3g} P{unit}"
