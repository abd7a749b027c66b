"""Scope check of loops and schedule actions: what a call uses must be visible where it stands.

- A loop declares what it uses of what was made before; what it makes stays in it, but for what it accumulates.
- An action runs once for each iteration. It uses what earlier actions made of the same iteration; every call but
  induction variables stands in an action.
- What one action makes and another uses lies in memory of that iteration, which no other iteration writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import fx

from shardfx.ir.ops.local_ops import row_of

from .aliasing import Aliasing
from .loops.loop_regions import DELIMITERS, ActionOrder, action_name, action_order, loop_role, regions, sibling_actions


class ScopeCheck:
    """Checks the scopes of a program, call by call; ``fail`` raises, of what is wrong at which call."""

    def __init__(self, nodes: Sequence[fx.Node], share: Aliasing, fail: Callable[..., NoReturn]) -> None:
        self._share, self._fail = share, fail
        self._parts = {node: part for node in nodes if (part := loop_role(node))}
        self._inside = regions(nodes) if self._parts else {}
        self._open: tuple[fx.Node, ...] = ()
        """The iterations and actions that are open at the call at hand."""
        self._orders: dict[fx.Node, ActionOrder] = {}
        self._begun: dict[fx.Node, dict[str, None]] = {}
        """By iterations: their actions so far."""
        self._written: dict[fx.Node, set[fx.Node]] = {}
        """By iterations that have actions: the memory that is written in them."""
        self._touched: dict[tuple[fx.Node, fx.Node], dict[str, bool]] = {}
        """By iterations and memory that is made and written in them: the actions that use it so far, and whether they
        write it."""
        self._into: dict[fx.Node, fx.Node] = {}
        """The memory that a call writes."""
        if "unit" in self._parts.values():
            self._find_written(nodes)

    def _find_written(self, nodes: Sequence[fx.Node]) -> None:
        for node in nodes:
            row = row_of(node.target) if node.op == "call_function" else None
            into = row.destination(node) if row is not None else None
            if into is not None:
                self._into[node] = self._share.root(into)
                for loop in self._inside[node]:
                    self._written.setdefault(loop, set()).add(self._share.root(into))

    def take(self, node: fx.Node) -> None:
        """Check the next call."""
        if not self._parts:
            return
        part, before = self._parts.get(node, ""), self._open
        self._open = self._inside[node]
        if part in DELIMITERS and node.kwargs:
            self._fail(f"{node.name} takes its arguments by place", node)
        if part in ("unit", "closes"):
            last = [each for each in before[-2:] if self._parts[each] == "opens"]
            if not last or node.args[0] is not last[-1]:
                self._fail(f"{node.name} is a unit, or the end, of iterations that did not begin last", node)
            self._unit(node, last[-1]) if part == "unit" else self._close(node, last[-1])
        else:
            self._used(node)
            if part == "opens":
                self._begin(node)
        if part in ("opens", "unit"):
            self._open = (*self._open, node)

    def end(self) -> None:
        """Finish the check."""
        if self._open:
            self._fail("iterations begin here and do not end", self._open[0])

    # ---- iterations and actions ----

    def _begin(self, node: fx.Node) -> None:
        try:
            order = ActionOrder.of(action_order(node).split())
        except ValueError as wrong:
            self._fail(str(wrong), node)
        args: Any = node.args
        if what := order.incomplete(args[1]) if order.words else "":
            self._fail(what, node, expected=f"each unit once for each of {args[1]} iterations", got=str(order))
        self._orders[node], self._begun[node] = order, {}

    def _unit(self, node: fx.Node, begin: fx.Node) -> None:
        name = action_name(node)
        if name not in self._orders[begin].units or name in self._begun[begin]:
            known = ", ".join(self._orders[begin].units) or "no units"
            self._fail(f"{name} is no unit of these iterations, or stands twice", node, expected=known, got=name)
        self._begun[begin][name] = None

    def _close(self, node: fx.Node, begin: fx.Node) -> None:
        missing = [unit for unit in self._orders[begin].units if unit not in self._begun[begin]]
        if missing:
            self._fail(f"there is no unit {missing[0]}, which the order of {begin.name} names", node)

    # ---- uses -----------------------------------------------------------------------------------------------

    def _used(self, node: fx.Node) -> None:
        top = self._open[-1] if self._open else None
        alone = top is not None and self._parts[top] == "opens" and self._orders[top].words
        if alone and self._parts.get(node) != "number":
            self._fail(f"{node.name} stands in no unit of its iterations", node, expected="it in a unit")
        for used in node.all_input_nodes:
            if self._open or self._inside[used]:
                self._reaches(used, node)
        for value in (*node.all_input_nodes, node) if self._written else ():
            self._touches(value, node)

    def _reaches(self, used: fx.Node, node: fx.Node) -> None:
        """Whether a value is in scope: its iterations have not ended, or an action made it that runs before."""
        made = self._inside[used]
        if self._parts.get(used) == "opens":
            made = (*made, used)
        collected = self._parts.get(used) == "collects"
        shared = next((i for i, (a, b) in enumerate(zip(made, self._open, strict=False)) if a is not b), None)
        shared = min(len(made), len(self._open)) if shared is None else shared
        at = sibling_actions(made, self._open)
        if at is not None:
            self._handed_on(used, node, at)
        if len(made) > shared + (at is not None) and not collected:
            self._fail(f"{used.name} is used behind its iterations, which do not collect it", node)
        for loop in self._open[shared:]:
            if self._parts.get(loop) == "opens" and used not in loop.args[2]:  # type: ignore[operator]
                self._fail(f"{used.name} is used in iterations that do not say so", node, expected=f"it in {loop.name}")

    def _handed_on(self, used: fx.Node, node: fx.Node, at: int) -> None:
        """What another action of the same iteration made: it was done before, and its memory is this iteration's."""
        begin, maker, unit = self._open[at - 1], action_name(self._inside[used][at]), action_name(self._open[at])
        iteration = self._orders[begin].first_violation(maker, unit)
        if iteration is not None:
            what = f"{used.name} is used in {unit} of iteration {iteration}, before {maker} makes it"
            self._fail(
                what, node, expected=f"{maker}.{iteration} before {unit}.{iteration}", got=str(self._orders[begin])
            )
        root = self._share.root(used)
        if begin not in self._inside[root] and root in self._written.get(begin, ()):
            what = f"{used.name} is used in {unit}, and made in {maker} in the memory {root.name} of all iterations"
            self._fail(what, node, expected=f"memory that {maker} makes, which is each iteration's own")

    def _touches(self, value: fx.Node, node: fx.Node) -> None:
        """Of memory that actions write, the order of its uses is the same in all iterations."""
        for at, unit in enumerate(self._open):
            if self._parts.get(unit) != "unit":
                continue
            begin, name, root = self._open[at - 1], action_name(unit), self._share.root(value)
            if root not in self._written.get(begin, ()) or begin not in self._inside[root]:
                continue
            before = self._touched.setdefault((begin, root), {})
            writes = self._into.get(node) is root
            for other, wrote in before.items():
                iteration = self._orders[begin].first_violation(other, name) if other != name else None
                if iteration is not None and (wrote or writes):
                    what = f"{value.name} lies in memory that is written over, and {name} uses it before {other}"
                    self._fail(
                        f"{what} in iteration {iteration}",
                        node,
                        expected=f"{other}.{iteration} before {name}.{iteration}",
                    )
            before[name] = before.get(name, False) or writes
