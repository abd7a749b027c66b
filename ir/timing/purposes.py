"""What the calls of a program are done for: the forward, backward or update of a stage, as its schedule says.

    %unit = time.unit(%turns, "F0")
    %mm = aten.mm(%piece, %w)                    F0
    %unit_1 = time.unit(%turns, "B0")
    %mm_1 = aten.mm(%wait_tensor, %w)            B0
    %done = time.done(...)
    %sum = c10d.all_reduce(%grad, "sum", ...)    U0

Turns in units say so themselves. Other programs are parted where the phases of the planned nodes are parted best, for
some of the backward may stand among the forward. What stands behind the turns, such as the reduction of their
gradients, is done for the update; what stands in front of them for no action.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import fx

from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops.sends import is_comm
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.program.looped.within_turns import part_in_turns, regions
from shardfx.ir.program.units.lifetimes import name_of
from shardfx.ir.schedule.actions import KINDS

BEFORE = ""
"""What is done once, in front of all turns."""
RECEIVED = "R"
"""What only takes in what others send."""


class Purpose(NamedTuple):
    """A kind of action (``F``, ``B``, ``I``, ``W``, ``U``), or one of the above, and its stage."""

    kind: str
    stage: int = 0


def main_turns(nodes: Sequence[fx.Node]) -> fx.Node | None:
    """The first call of the turns in which most of a program's forward and backward is done; None where none are."""
    inside = regions(nodes)
    in_units = next((inside[node][0] for node in nodes if _names_action(node)), None)
    if in_units is not None:
        return in_units
    work = [node for node in nodes if _phase(node) in (Phase.FORWARD, Phase.BACKWARD) and not _is_comm(node)]
    sizes: dict[fx.Node, int] = {}
    for node in work:
        if inside[node]:
            sizes[inside[node][0]] = sizes.get(inside[node][0], 0) + 1
    most = max(sizes, key=sizes.__getitem__, default=None)
    return most if most is not None and 2 * sizes[most] > len(work) else None


def purposes(nodes: Iterable[fx.Node]) -> dict[fx.Node, Purpose]:
    """What each call is done for, in the order of the program."""
    calls = [node for node in nodes if node.op == "call_function"]
    turns, inside = main_turns(calls), regions(calls)
    stage = _stage(calls)
    if turns is None:
        return _parted(calls, stage)
    first = calls.index(turns)
    behind = [place for place, node in enumerate(calls) if turns in inside[node]][-1] + 1
    found = dict.fromkeys(calls[: first + 1], Purpose(BEFORE, stage))
    here = calls[first + 1 : behind]
    found |= _in_units(here) if any(map(_names_action, here)) else _parted(here, stage)
    return found | dict.fromkeys(calls[behind:], Purpose("U", stage))


def _stage(calls: Sequence[fx.Node]) -> int:
    """The stage that an update is said to be of: the first that has units, or that in which most is done."""
    units = [int(name[1:]) for name in map(name_of, filter(_names_action, calls)) if name[0] in KINDS]
    counts = Counter(node.at[0] for node in map(_planned, calls) if node is not None and node.at)
    return min(units) if units else max(counts, key=counts.__getitem__, default=0)


def _names_action(node: fx.Node) -> bool:
    """Whether a unit begins that is an action of a schedule; others are stretches of a turn that is interleaved."""
    return part_in_turns(node) == "unit" and re.fullmatch(rf"R?[{''.join(KINDS)}]\d+|O", name_of(node)) is not None


def _in_units(calls: Sequence[fx.Node]) -> dict[fx.Node, Purpose]:
    """By the units' names: ``F0``; ``RB1`` receives what B1 sends, and ``O`` what leaves the program."""
    found, now = dict[fx.Node, Purpose](), Purpose(RECEIVED)
    for node in calls:
        if _names_action(node):
            kind, stage = name_of(node)[0], name_of(node)[1:]
            now = Purpose(kind, int(stage)) if kind in KINDS else Purpose(RECEIVED)
        found[node] = now
    return found


def _parted(calls: Sequence[fx.Node], stage: int) -> dict[fx.Node, Purpose]:
    """Forward, backward, update, one behind the other. What is updated before the last product of the backward is part
    of that."""
    back = _parting(calls, lambda phase: phase is not Phase.FORWARD)
    products = [i for i, node in enumerate(calls) if _phase(node) is Phase.BACKWARD and _is_heavy(node)]
    update = max(back, products[-1] + 1 if products else 0)
    update += _parting(calls[update:], lambda phase: phase is Phase.UPDATE)
    parts = ("F", calls[:back]), ("B", calls[back:update]), ("U", calls[update:])
    return {node: Purpose(kind, stage) for kind, part in parts for node in part}


def _is_heavy(node: fx.Node) -> bool:
    planned = _planned(node)
    return planned is not None and is_heavy(planned)


def _parting(calls: Sequence[fx.Node], behind: Callable[[Phase], bool]) -> int:
    """Where calls are parted best: most in front of it are not of phases that come behind, most behind it are."""
    phases = map(_phase, calls)
    gains = accumulate((0 if phase is None else -1 if behind(phase) else 1 for phase in phases), initial=0)
    best = list(gains)
    return max(range(len(best)), key=best.__getitem__)


def _planned(node: fx.Node) -> Node | None:
    planned = node.meta.get("shardfx")
    return planned if isinstance(planned, Node) else None


def _phase(node: fx.Node) -> Phase | None:
    planned = _planned(node)
    return planned.phase if planned is not None else None


def _is_comm(node: fx.Node) -> bool:
    planned = _planned(node)
    return planned is not None and is_comm(planned)
