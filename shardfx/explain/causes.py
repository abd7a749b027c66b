"""Trails: from a value that is sharded over an axis back to the hint, one decision after the other.

>>> [link.text for link in Trails(graph.reasons, rules, Printer(graph)).follow(value, "tp", 1)]
['%10 dim 1 is sharded over tp, and goes into aten.mm @ layers.0.wq',
 '%layers.0.wq.weight dim 0 is, through aten.t @ layers.0.wq (step 57, elementwise)',
 "the hint 'layers.*.wq.weight' (step 5)"]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from shardfx.ir.cost.replay import source_of
from shardfx.ir.graph import Node, Value, op_name
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.reasons import Carrier, Decision, Reasons
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.sharding_rule import Dim, ShardingRule
from shardfx.ir.text.printer import Printer

NEVER = 1 << 62


@dataclass(frozen=True)
class Because:
    """One link of a trail: ``value`` is sharded over an axis because of what ``text`` says, decided at ``step``."""

    value: str
    text: str
    step: int = 0
    turned_down: str = ""

    def __str__(self) -> str:
        return self.text + (f"; turned down: {self.turned_down}" if self.turned_down else "")


@dataclass
class Trails:
    """Follows the reasons of a graph back; values are called as ``printer`` calls them."""

    reasons: Reasons
    rules: RuleBook
    printer: Printer

    def follow(self, value: Value, axis: str, dim: int | None) -> Iterator[Because]:
        """Why ``value`` is sharded over ``axis`` on ``dim`` (None: why it is a partial sum over it), link by link."""
        before = NEVER
        seen: set[tuple[Value, int | None]] = set()
        while (value, dim) not in seen:
            seen.add((value, dim))
            name = self.name(value)
            made = self._decision(value, axis, dim, before)
            if made is not None:
                carrier = self._carrier(made, axis)
                if carrier is None or not made.op:
                    yield Because(name, self._decided(value, axis, dim), made.step, made.down(self.name))
                    return
                before = made.step
                near, dim = carrier.value, carrier.dim
                text = f"{self._dim(near, dim)} is, through {self._place(made)} (step {made.step}, {made.how})"
                yield Because(name, text, made.step, made.down(self.name))
            else:
                node = value.node
                found = self._operand(value, axis, dim)
                if node is None or found is None:
                    yield Because(name, self._made(node))
                    return
                near, dim = found
                state = f"sharded over {axis}" if dim is not None else f"partial over {axis}"
                yield Because(name, f"{self._dim(near, dim)} is {state}, and goes into {self.op(node)}")
            value = near

    def _made(self, node: Node | None) -> str:
        """Why a value is placed as it is that nobody decided on."""
        if node is None:  # a state
            return "the optimizer's step, which keeps it as its parameter is stored"
        return f"{node.op} makes it so: {node.why}" if isinstance(node.op, OwnOp) else "its op makes it so"

    def _decided(self, value: Value, axis: str, dim: int | None) -> str:
        """All that brought an axis to a dim of a value by themselves: a hint, and ``zero``."""
        brought = (d for d in self.reasons.of(value) if d.dim == dim and axis in d.sharding.axes)
        made = (d for d in brought if not d.op or self._carrier(d, axis) is None)
        return ", and ".join(dict.fromkeys(f"{each.how} (step {each.step})" for each in made))

    def _decision(self, value: Value, axis: str, dim: int | None, before: int = NEVER) -> Decision | None:
        """The decision that brought an axis to a dim of a value."""
        made = self.reasons.of(value)
        return next((d for d in made if d.dim == dim and axis in d.sharding.axes and d.step < before), None)

    def _carrier(self, made: Decision, axis: str) -> Carrier | None:
        """The tensor and dim from which a decision took the axis; or another axis, where it had that before."""
        return next((each for each in made.carriers if each.axis == axis), next(iter(made.carriers), None))

    def _place(self, made: Decision) -> str:
        return f"{made.op}{f' @ {made.where.module}' if made.where.module else ''}"

    def _operand(self, value: Value, axis: str, dim: int | None) -> tuple[Value, int | None] | None:
        """The operand that is sharded over the axis where the value's node computes with it, or is partial over it."""
        node = value.node
        if node is None:
            return None
        if isinstance(node.op, OwnOp):
            source = self.source(value)
            spec = source.spec
            if spec is None or axis not in (*spec.axes, *spec.partial_axes):
                return None
            return source, next((d for d, sharding in enumerate(spec.dims) if axis in sharding.axes), None)
        shardings = {f for f, axes in (node.strategy.shardings if node.strategy is not None else ()) if axis in axes}
        found: list[tuple[Value, int | None]] = []
        for operand, (_, dims) in zip(node.operands, self._tensors(node), strict=False):
            spec = operand.spec
            if spec is not None and axis in spec.partial_axes and dim is None and not shardings:
                return operand, None
            at = [
                d for d, factors in enumerate(dims) if spec and axis in spec.dims[d].axes and shardings & set(factors)
            ]
            found += [(operand, d) for d in at]
        decided = [(v, d) for v, d in found if self._decision(source_of(v), axis, d) is not None]
        return next(iter([*decided, *found]), None)

    def _tensors(self, node: Node) -> Iterator[tuple[Value, tuple[Dim, ...]]]:
        """The operands of a node (those that they are copies of) and its results, with their factors."""
        rule = self._rule(node)
        if rule is None:
            return
        for value, dims in zip(node.operands, rule.operands, strict=False):
            yield source_of(value), dims
        for result, result_dims in zip(node.results, rule.results, strict=False):
            if result is not None and result_dims is not None:
                yield result, result_dims

    def _rule(self, node: Node) -> ShardingRule | None:
        entry = self.rules.entry(node.op)
        return entry.make(node) if entry is not None else None

    # ---- values ---------------------------------------------------------------------------------------------

    def source(self, copy: Value) -> Value:
        """The operand of a comm node that a result of it is made from."""
        assert copy.node is not None
        operands = copy.node.operands
        return operands[copy.index if len(operands) > 1 else 0]

    def name(self, value: Value) -> str:
        """The value's name in the graph's text."""
        return self.printer.use(value) if value in self.printer.tokens else "a value that was taken apart"

    def _dim(self, value: Value, dim: int | None) -> str:
        return self.name(value) + (f" dim {dim}" if dim is not None else "")

    def op(self, node: Node) -> str:
        """The op, and the module that it is called in."""
        return f"{op_name(node.op)}{f' @ {node.where.module}' if node.where.module else ''}"
