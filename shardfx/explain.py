"""Explanations: why a value is sharded, as trails from it back to the hint, one decision after the other.

>>> [link.text for link in explain(graph, rules, "%12").entries[0].trails[0].because]
['%10 dim 1 is sharded over tp, and goes into aten.mm @ layers.0.wq',
 '%layers.0.wq.weight dim 0 is, through aten.t @ layers.0.wq (step 57, elementwise)',
 "the hint 'layers.*.wq.weight' (step 5)"]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardfx.ir.cost.replay import source_of
from shardfx.ir.cost.traffic import traffic
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, Input, Node, Output, OutputKind, Phase, Value, Where, factors_text, op_name
from shardfx.ir.ops.pools.pool_ops import moves_pool
from shardfx.ir.ops.table import OwnOp
from shardfx.ir.reasons import Carrier, ShardingDecision
from shardfx.ir.rules.book import RuleBook
from shardfx.ir.rules.sharding_rule import rule_text
from shardfx.ir.spec import Spec
from shardfx.ir.text.printer import Printer, size_text

NEVER = 1 << 62


@dataclass(frozen=True)
class Because:
    """One link of a trail: ``value`` is sharded over an axis because of what ``text`` says, decided at ``step``, where
    something else was ``rejected``."""

    value: str
    text: str
    step: int = 0
    rejected: str = ""

    def __str__(self) -> str:
        return self.text + (f"; rejected: {self.rejected}" if self.rejected else "")


def communicated(copy: Value) -> Value:
    """The operand of a comm node from which a result of it is made."""
    assert copy.node is not None
    operands = copy.node.operands
    return operands[copy.index if len(operands) > 1 else 0]


def dim_of(spec: Spec, axis: str) -> int | None:
    """The dim that an axis shards."""
    return next((dim for dim, sharding in enumerate(spec.dims) if axis in sharding.axes), None)


def _at(op: str, where: Where) -> str:
    """The op, and the module in which it is called."""
    return f"{op} @ {where.module}" if where.module else op


MOST_ENTRIES = 24
MOST_LINKS = 6
MOST_USERS = 3


@dataclass(frozen=True)
class Trail:
    """What an axis does to a value (its ``role``), and the chain of reasons; the last names the hint."""

    axis: str
    role: str
    because: tuple[Because, ...]

    def lines(self, brief: bool) -> list[str]:
        """The printed lines: the links back to the hint, a long middle left out; ``brief`` returns the last one
        alone."""
        links, count = list(self.because), len(self.because)
        if brief and links:
            away = f", {count - 1} links away" if count > 2 else ""
            return [f"{self.axis}: {self.role}, because of {links[-1].text}{away}{rejected(links, ' on the way')}"]
        lines = [str(link) for link in links]
        if count > MOST_LINKS:
            middle = links[2:-2]
            lines[2:-2] = [f"... {len(middle)} links: {' '.join(link.value for link in middle)}{rejected(middle)}"]
        return [f"{self.axis}: {self.role}", *(f"    {line}" for line in lines)]


def rejected(links: Iterable[Because], where: str = "") -> str:
    """What was rejected at some links, for a line."""
    found = dict.fromkeys(link.rejected for link in links if link.rejected)
    return "".join(f"; rejected{where}: {text}" for text in found)


@dataclass(frozen=True)
class Entry:
    """One input or op: its line in the graph, how it is computed, why, and the communication behind it."""

    title: str
    shardings: str = ""
    trails: tuple[Trail, ...] = ()
    communication: tuple[str, ...] = ()

    def text(self, brief: bool = False) -> str:
        """The printed text; ``brief``: one line for each axis."""
        lines = [self.shardings] if self.shardings else []
        for trail in self.trails:
            lines += trail.lines(brief)
        return "\n".join([self.title, *(f"  {line}" for line in (*lines, *self.communication))])


@dataclass(frozen=True)
class Explanation:
    """What :meth:`ParallelModule.explain` found; ``str`` is meant to be read. The trails of a module are brief."""

    name: str
    entries: tuple[Entry, ...]
    submodules: tuple[str, ...] = ()
    brief: bool = False

    def __str__(self) -> str:
        shown = [entry.text(self.brief) for entry in self.entries[:MOST_ENTRIES]]
        if len(self.entries) > MOST_ENTRIES:
            shown.append(f"... and {len(self.entries) - MOST_ENTRIES} more ops in {self.name}")
        if self.submodules:
            shown.append(f"modules inside: {', '.join(self.submodules)}")
        if self.brief:
            shown.append("ask for one value (such as %12) to see its full trail")
        return "\n\n".join(shown)


def explain(graph: Graph, rules: RuleBook, name: str) -> Explanation:
    """Explain a parameter, ``args.N``, a module's path, or a value (``%12``) of a planned graph.

    Raises:
        Error: nothing has this name; says what comes near.
    """
    return _Explainer(graph, rules).explain(name)


class _Explainer:
    def __init__(self, graph: Graph, rules: RuleBook) -> None:
        self.graph, self.rules, self.users = graph, rules, graph.users()
        self.reasons, self.printer = graph.reasons, Printer(graph)
        self.outputs: dict[Value, list[Output]] = {}
        for output in graph.outputs:
            self.outputs.setdefault(output.value, []).append(output)

    def explain(self, name: str) -> Explanation:
        inputs = {inp.name: inp for inp in self.graph.inputs}
        given = inputs.get(self.graph.aliases.get(name, name)) or inputs.get(name.removeprefix("%"))
        if given is not None:
            return Explanation(name, tuple(self._with_outputs(given)))
        values = {value.name: value for node in self.graph.nodes for value in node.outs}
        results = {output.name: output.value for output in self.graph.outputs if output.name not in inputs}
        value = values.get(name.removeprefix("%")) or results.get(name)
        if value is not None and value.node is not None:
            return Explanation(name, (self.op(value.node, value),))
        within = [node for node in self.graph.nodes if f"{node.where.module}.".startswith(f"{name}.")]
        stored = [g for n, g in inputs.items() if n.startswith(f"{name}.")]
        if within or stored:
            return self._module(name, within, stored)
        known = [*inputs, *results, *dict.fromkeys(node.where.module for node in self.graph.nodes if node.where.module)]
        raise Error(
            f"nothing is called {name!r}",
            where="explain",
            expected="a parameter, args.N, targets.N, a module's path, or a value such as %12",
            got=name,
            remedy=did_you_mean(name, known, "print(pm.planned) shows all names", count=3),
        )

    def _module(self, name: str, within: list[Node], stored: list[Input]) -> Explanation:
        """Entries of a module: in full if it has few ops; else its own ops, and the modules inside."""
        own, inside = within, []
        if len(within) + len(stored) > MOST_ENTRIES:
            own = [node for node in within if node.where.module == name]
            stored = [inp for inp in stored if "." not in inp.name[len(name) + 1 :]]
            paths = (node.where.module[len(name) + 1 :].partition(".")[0] for node in within)
            inside = [f"{name}.{child}" for child in dict.fromkeys(paths) if child]
        ordered = sorted(own, key=lambda node: node.phase is not Phase.FORWARD)
        entries = [*(self.input(inp) for inp in stored), *(self.op(node) for node in ordered)]
        return Explanation(name, tuple(entries), tuple(inside), brief=True)

    def _with_outputs(self, inp: Input) -> Iterator[Entry]:
        """A parameter and its gradient, a buffer and its new content."""
        yield self.input(inp)
        for output in self.graph.outputs:
            made = source_of(output.value)
            if output.name == inp.name and made.node is not None:
                entry = self.op(made.node, made)
                kind = "gradient" if output.kind is OutputKind.GRADIENT else "new content"
                yield Entry(f"its {kind}: {entry.title}", entry.shardings, entry.trails, entry.communication)

    # ---- one input, one op ----------------------------------------------------------------------------------

    def input(self, inp: Input) -> Entry:
        trails = self._trails(inp.value)
        shardings = "" if trails else "replicated on every rank"
        title = f"{inp.kind.value} {self.printer.use(inp.value)} : {self.printer.type(inp.value)}"
        return Entry(title, shardings, trails, tuple(self._after(inp.value)))

    def op(self, node: Node, value: Value | None = None) -> Entry:
        """The entry of a node; its trails are those of ``value`` (the first result, if not said)."""
        lines = [line for each in ([value] if value is not None else node.outs) for line in self._after(each)]
        if isinstance(node.op, OwnOp):
            lines.insert(0, f"{self._sends(node)}{f': {node.why}' if node.why else ''}")
        elif node.why:
            lines.insert(0, node.why)
        title = f"{node.phase.value} {self._line(node)}" + (f"  @ {node.where}" if str(node.where) else "")
        return Entry(title, self._shardings(node), self._trails(value or node.outs[0]), tuple(lines))

    def _line(self, node: Node) -> str:
        """The node's line in the graph's text, without strategy and source; a bucketed collective as one of a
        number."""
        if isinstance(node.op, OwnOp) and len(node.operands) > MOST_USERS:
            count, axes = len(node.operands), ", ".join(node.kwargs["axes"])
            return f"%{node.name} and {count - 1} more = {node.op}({count} values, axes=[{axes}])"
        return self.printer.node(node).partition("  shardings ")[0].partition("  @ ")[0].rstrip()

    def _shardings(self, node: Node) -> str:
        if node.strategy is None or isinstance(node.op, OwnOp):
            return ""
        entry = self.rules.entry(node.op)
        rule = f", of the rule {entry.text}" if entry is not None and "->" in entry.text else ""
        if entry is not None and entry.discovered and (made := entry.make(node)) is not None:
            rule = f", of the rule {rule_text(made)}, which was found by running the op"
        shardings = ", ".join(f"{factor} over {' and '.join(axes)}" for factor, axes in node.strategy.shardings)
        said = f"shards {shardings}{rule}" if shardings else "shards nothing: all ranks with the operands do the same"
        return said if node.pin is None else f"{said}; the hint {node.pin.by!r} says {factors_text(node.pin.shardings)}"

    def _trails(self, value: Value) -> tuple[Trail, ...]:
        """One trail for every axis that shards the value, or over which it is partial."""
        spec, node = value.spec, value.node
        if spec is None:
            return ()
        strategy = node.strategy if node is not None else None
        factors = {axis: factor for factor, axes in (strategy.shardings if strategy else ()) for axis in axes}
        found = []
        for axis in self.graph.mesh.sort([*spec.axes, *spec.partial_axes]):
            dim = dim_of(spec, axis)
            adds = f"for the op adds up over the factor {factors[axis]}" if axis in factors else "as its operands are"
            partial = f"the result is a partial {dict(spec.partial).get(axis)}, {adds}"
            role = f"shards dim {dim}" if dim is not None else partial
            found.append(Trail(axis, role, tuple(self.follow(value, axis, dim))))
        return tuple(found)

    # ---- communication --------------------------------------------------------------------------------------

    def _after(self, value: Value) -> Iterator[str]:
        """The communication that the value's users need, and those users."""
        for node in self.users.get(value, ()):
            if isinstance(node.op, OwnOp):
                for copy in node.outs:
                    if communicated(copy) is value:
                        yield f"then {self._sends(node)}: needed as {self.printer.type(copy)}{self._needed(copy)}"
                        yield from self._after(copy)

    def _needed(self, copy: Value) -> str:
        nodes = [f"%{user.name} {_at(op_name(user.op), user.where)}" for user in self.users.get(copy, ())]
        names = [*(f"{output.kind.value} {output.name}" for output in self.outputs.get(copy, ())), *nodes]
        more = f" and {len(names) - MOST_USERS} more" if len(names) > MOST_USERS else ""
        return f" by {', '.join(names[:MOST_USERS])}{more}" if names else ""

    def _sends(self, node: Node) -> str:
        if moves_pool(node):
            nbytes = sum(value.local_bytes(self.graph.mesh) for value in node.operands)
            return f"%{node.name} {op_name(node.op)} moves {size_text(nbytes)} per rank"
        one = traffic(node, self.graph.mesh)
        sent = f"sends {size_text(one.total)} per rank" if one.nbytes else "sends nothing"
        together = f" (with {len(node.outs) - 1} others)" if len(node.outs) > 1 else ""
        return f"%{node.name} {op_name(node.op)} over {', '.join(one.axes)} {sent}{together}"

    # ---- trails ---------------------------------------------------------------------------------------------

    def follow(self, value: Value, axis: str, dim: int | None) -> Iterator[Because]:
        """Why ``value`` is sharded over ``axis`` on ``dim`` (None: why it is a partial sum), as a chain of reasons."""
        before = NEVER
        seen: set[tuple[Value, int | None]] = set()
        while (value, dim) not in seen:
            seen.add((value, dim))
            name, node = self.name(value), value.node
            made = self._decision(value, axis, dim, before)
            carrier = self._carrier(made, axis) if made is not None and made.op else None
            if made is not None and carrier is not None:
                near, dim, before = carrier.value, carrier.dim, made.step
                text = f"{self._dim(near, dim)} is, through {_at(made.op, made.where)} (step {made.step}, {made.how})"
                yield Because(name, text, made.step, made.down(self.name))
            elif made is not None:
                yield Because(name, self._decided(value, axis, dim), made.step, made.down(self.name))
                return
            elif node is None or (found := self._operand(value, axis, dim)) is None:
                yield Because(name, self._made(node))
                return
            else:
                near, dim = found
                state = f"{'sharded' if dim is not None else 'partial'} over {axis}"
                goes = f"goes into {_at(op_name(node.op), node.where)}"
                yield Because(name, f"{self._dim(near, dim)} is {state}, and {goes}")
            value = near

    def _made(self, node: Node | None) -> str:
        """The reason of a placement that nobody decided on."""
        if node is None:  # a state
            return "the optimizer's step, which keeps it as its parameter is stored"
        return f"{node.op} makes it so: {node.why}" if isinstance(node.op, OwnOp) else "its op makes it so"

    def _decided(self, value: Value, axis: str, dim: int | None) -> str:
        """All original causes of an axis on a dim of a value: a hint, and ``zero``."""
        brought = (d for d in self.reasons.of(value) if d.dim == dim and axis in d.sharding.axes)
        made = (d for d in brought if not d.op or self._carrier(d, axis) is None)
        return ", and ".join(dict.fromkeys(f"{each.how} (step {each.step})" for each in made))

    def _decision(self, value: Value, axis: str, dim: int | None, before: int = NEVER) -> ShardingDecision | None:
        """The decision that brought an axis to a dim of a value."""
        made = self.reasons.of(value)
        return next((d for d in made if d.dim == dim and axis in d.sharding.axes and d.step < before), None)

    def _carrier(self, made: ShardingDecision, axis: str) -> Carrier | None:
        """The tensor and dim from which a decision took the axis; or another axis, where it had that before."""
        return next((each for each in made.carriers if each.axis == axis), next(iter(made.carriers), None))

    def _operand(self, value: Value, axis: str, dim: int | None) -> tuple[Value, int | None] | None:
        """The operand of the value's node that is sharded over the axis, or partial over it."""
        node = value.node
        if node is None:
            return None
        if isinstance(node.op, OwnOp):
            source = communicated(value)
            spec = source.spec
            if spec is None or axis not in (*spec.axes, *spec.partial_axes):
                return None
            return source, dim_of(spec, axis)
        shardings = {f for f, axes in (node.strategy.shardings if node.strategy is not None else ()) if axis in axes}
        found: list[tuple[Value, int | None]] = []
        entry = self.rules.entry(node.op)
        rule = entry.make(node) if entry is not None else None
        for operand, dims in zip(node.operands, rule.operands if rule is not None else (), strict=False):
            spec = operand.spec
            if spec is None:
                continue
            if axis in spec.partial_axes and dim is None and not shardings:
                return operand, None
            found += [(operand, d) for d, of in enumerate(dims) if axis in spec.dims[d].axes and shardings & set(of)]
        decided = [(v, d) for v, d in found if self._decision(source_of(v), axis, d) is not None]
        return next(iter([*decided, *found]), None)

    def name(self, value: Value) -> str:
        """The value's name in the graph's text."""
        return self.printer.use(value) if value in self.printer.tokens else "a value that was decomposed"

    def _dim(self, value: Value, dim: int | None) -> str:
        return self.name(value) + (f" dim {dim}" if dim is not None else "")
