"""The module tree of each phase, with equal blocks folded, and the data flow between the nodes that are drawn.

    layers.0            layers.0 … 79   x 80
      norm mm gelu        norm mm gelu
    layers.1            ->
      norm mm gelu
    ...

A pattern that alternates (dense, sparse, dense, sparse) is folded as well: ``layers.0, 1 … 78, 79   x 40``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile

from shardfx.ir.cost.traffic import TripCounts
from shardfx.ir.graph import Graph, Input, InputKind, Node, Phase, Value
from shardfx.ir.ops.alike import key_of
from shardfx.ir.ops.traits import base_name, is_own, is_view

LONGEST_PATTERN = 8
ENDS = (InputKind.ARGUMENT, InputKind.TARGET)
"""Inputs that count as the result of another block."""


@dataclass(eq=False)
class ModuleTree:
    """A module in one phase: its sub-modules and own nodes in order of appearance; ``count`` copies of it if folded."""

    path: str
    children: list[ModuleTree | Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """All nodes at any depth, in program order."""
    count: int = 1
    label: str = ""
    """Written for a folded module instead of its path: ``layers.0 … 79``."""
    members: tuple[str, ...] = ()
    """The paths of all that it stands for: its own, and those of its copies."""

    @staticmethod
    def of(nodes: Iterable[Node], home: Mapping[Node, str]) -> ModuleTree:
        """The tree of ``nodes`` by module path."""
        known = {"": ModuleTree("")}

        def find(path: str) -> ModuleTree:
            if path not in known:
                known[path] = ModuleTree(path, members=(path,))
                find(path.rpartition(".")[0]).children.append(known[path])
            return known[path]

        for node in nodes:
            path = home[node]
            find(path).children.append(node)
            known[""].nodes.append(node)
            while path:
                known[path].nodes.append(node)
                path = path.rpartition(".")[0]
        return known[""]

    @property
    def number(self) -> str:
        """The last name of its path: an index, if the module is an element of a list."""
        return self.path.rpartition(".")[2]

    def drawn(self) -> Iterator[Node]:
        """The nodes that are not in a copy of a folded block."""
        for child in self.children:
            yield from [child] if isinstance(child, Node) else child.drawn()


@dataclass(eq=False)
class FoldedGraph:
    """A graph with equal blocks folded, and the data flow between the nodes that are drawn."""

    graph: Graph
    home: dict[Node, str]
    """The path of the module that each node is drawn in."""
    loop_axes: Mapping[Node, tuple[str, ...]]
    """The loop axes over which a node is iterated."""
    roots: dict[Phase, ModuleTree] = field(default_factory=dict)
    first: dict[Node, Node] = field(default_factory=dict)
    """The corresponding node of the first block, for each node of a copy of a block."""
    folds: dict[Node, tuple[tuple[ModuleTree, int], ...]] = field(default_factory=dict)
    """The folded blocks around a node, outermost first, and which copy of each it is in."""
    operands: dict[Node, list[Value]] = field(default_factory=dict)
    """The operands of a drawn node, each value once. An operand of one of its copies counts as well."""
    users: dict[Value, list[Node]] = field(default_factory=dict)
    leaving: set[Value] = field(default_factory=set)
    """Values that one copy of a block passes to the next."""
    copies: Counter[Node] = field(default_factory=Counter)
    """The number of nodes of the graph that a drawn node stands for."""
    chained: set[ModuleTree] = field(default_factory=set)
    """Folded blocks whose result feeds their next copy."""

    @cached_property
    def inputs(self) -> dict[Value, Input]:
        """The graph's inputs by their values."""
        return {inp.value: inp for inp in self.graph.inputs}

    def shown(self, node: Node) -> Node:
        """The node that is drawn for ``node``."""
        while node in self.first:
            node = self.first[node]
        return node

    def shown_value(self, value: Value) -> Value:
        """The value that is drawn for ``value``: one of the first copy of its block."""
        if value.node is None or value.node not in self.first:
            return value
        return self.shown(value.node).results[value.index] or value

    def blocks(self, node: Node) -> list[ModuleTree]:
        """The folded blocks around a node, outermost first."""
        return [module for module, _ in self.folds.get(node, ())]

    def copy_numbers(self, node: Node) -> dict[ModuleTree, int]:
        """For every folded block around ``node``, at any depth, the number of the copy that it is in."""
        numbers: dict[ModuleTree, int] = {}
        while True:
            for block, number in self.folds.get(node, ()):
                numbers.setdefault(block, number)
            if node not in self.first:
                return numbers
            node = self.first[node]

    def between_copies(self, source: Node, target: Node) -> bool:
        """Whether an edge leads from one copy of a block to another, so that it is not drawn."""
        if source not in self.folds or target not in self.folds:
            return False
        there = self.copy_numbers(target)
        return any(there.get(block, number) != number for block, number in self.copy_numbers(source).items())


def fold(graph: Graph) -> FoldedGraph:
    """Fold the equal blocks of every phase, and collect the data flow."""
    made = FoldedGraph(graph, homes(graph), TripCounts.of(graph).axes)
    for phase in Phase:
        if nodes := [node for node in graph.nodes if node.phase is phase]:
            made.roots[phase] = ModuleTree.of(nodes, made.home)
            _fold_lists(made, made.roots[phase])
    seen: set[tuple[Value, Node]] = set()
    for node in graph.nodes:
        target = made.shown(node)
        made.copies[target] += 1
        into = made.operands.setdefault(target, [])
        for value in node.operands:
            if value.node is None and target is not node and made.inputs[value].kind not in ENDS:
                continue  # a copy has its own parameters
            source = made.shown_value(value)
            if value.node is not None and value.node.phase is node.phase and made.between_copies(value.node, node):
                made.leaving.add(source)
                made.chained.update(set(made.blocks(value.node)) & set(made.blocks(node)))
            elif (source, target) not in seen:
                seen.add((source, target))
                into.append(source)
                made.users.setdefault(source, []).append(target)
    return made


def _fold_lists(graph: FoldedGraph, module: ModuleTree) -> None:
    """Fold repeated patterns among the numbered children of every module, from the top down."""
    run = [child for child in module.children if isinstance(child, ModuleTree) and child.number.isdigit()]
    if len(run) > 1:
        first, numbered = module.children.index(run[0]), set(run)
        others = [child for child in module.children[first:] if child not in numbered]
        module.children[first:] = [*_folded_run(graph, run), *others]
    for child in module.children:
        if isinstance(child, ModuleTree):
            _fold_lists(graph, child)


def _folded_run(graph: FoldedGraph, run: list[ModuleTree]) -> Iterator[ModuleTree]:
    """Numbered siblings, with each repeated pattern replaced by one module."""
    numbers: dict[Hashable, int] = {}
    signs = [numbers.setdefault(_signature(graph, module), len(numbers)) for module in run]
    at = 0
    while at < len(run):
        period, count = _pattern(signs, at)
        copies = [run[at + k * period : at + (k + 1) * period] for k in range(count)]
        yield from [_folded_block(graph, copies)] if count > 1 else copies[0]
        at += period * count


def _pattern(signs: list[int], at: int) -> tuple[int, int]:
    """The period and count of the repetition at ``at`` that covers most; (1, 1) where nothing repeats."""
    best = (1, 1)
    for period in range(1, min(LONGEST_PATTERN, (len(signs) - at) // 2) + 1):
        count = 1
        while signs[at : at + period] == signs[at + count * period : at + (count + 1) * period]:
            count += 1
        enough = 2 if period == 1 else 3
        if count >= enough and period * count > best[0] * best[1]:
            best = (period, count)
    return best


def _folded_block(graph: FoldedGraph, copies: list[list[ModuleTree]]) -> ModuleTree:
    first, last = copies[0], copies[-1]
    parent = first[0].path.rpartition(".")[0]
    label = " … ".join(", ".join(module.number for module in block) for block in (first, last))
    made = first[0]
    if len(first) > 1:
        made = ModuleTree(parent, list(first), [node for module in first for node in module.nodes])
    made.count, made.label = len(copies), f"{parent}.{label}" if parent else label
    made.members = tuple(module.path for block in copies for module in block)
    for number, block in enumerate(copies):
        for node, other in zip(made.nodes, [n for module in block for n in module.nodes], strict=True):
            graph.folds[other] = (*graph.folds.get(other, ()), (made, number))
            if number:
                graph.first[other] = node
    return made


def _signature(graph: FoldedGraph, module: ModuleTree) -> Hashable:
    """The common key of equal blocks: everything but names, numbers and source lines."""
    inside: dict[Value, tuple[int, int]] = {}
    outside: dict[Value, int] = {}

    def seen(value: Value) -> Hashable:
        """A value by its place in the block, or as an input of the block; with type and placement."""
        place: Hashable = inside.get(value)
        if place is None:
            inp = graph.inputs.get(value)
            kind = inp.kind if inp is not None and inp.kind not in ENDS else None
            place = outside.setdefault(value, len(outside)), kind
        return place, value.type, value.spec

    items: list[Hashable] = []
    for i, node in enumerate(module.nodes):
        inside.update({result: (i, j) for j, result in enumerate(node.results) if result is not None})
        items.append((graph.home[node][len(module.path) :], node.at, key_of(node, seen)))
    return tuple(items)


def view_hosts(graph: FoldedGraph) -> dict[Node, Node]:
    """For every view that can be drawn as part of another op, that op: its one user, or else its operand's."""
    found: dict[Node, Node] = {}

    def may_host(node: Node, host: Node) -> bool:
        return not is_own(host) and not is_view(host) and graph.blocks(node) == graph.blocks(host)

    nodes = list(graph.operands)
    for node in reversed(nodes):
        if is_view(node) and graph.leaving.isdisjoint(node.outs):
            users = {user for value in node.outs for user in graph.users.get(value, ()) if user.phase is node.phase}
            into = {found.get(user, user) for user in users}
            if len(into) == 1 and may_host(node, *into):
                found[node] = into.pop()
    for node in nodes:
        source = graph.operands[node][0].node if is_view(node) and node not in found and graph.operands[node] else None
        if source is not None and source.phase is node.phase and may_host(node, host := found.get(source, source)):
            found[node] = host
    return found


def homes(graph: Graph) -> dict[Node, str]:
    """The path of the module that each node is drawn in: its own or, where none is known, that of its neighbours.

    Backward adds up the gradients of a value that is used more than once, and no module is known of such a sum; drawn
    outside, it would split its block. The same goes for what a pass inserts behind it.
    """
    found: dict[Node, str] = {}
    order = {node: i for i, node in enumerate(graph.nodes)}
    users = graph.users()

    def following(node: Node, depth: int = 3) -> list[str]:
        """The modules that use a node, seen through further sums."""
        paths = []
        for user in (user for value in node.outs for user in users[value] if user.phase is node.phase):
            if not _lacks_module(user):
                paths.append(user.where.module)
            elif depth:
                others = [found[v.node] for v in user.operands if v.node in found and v.node is not node]
                paths += others or following(user, depth - 1)
        return paths

    for node in graph.nodes:
        found[node] = node.where.module
        if _lacks_module(node):
            behind = [path for path in following(node) if path]
            sources = sorted({value.node for value in node.operands if value.node is not None}, key=order.__getitem__)
            if not sources:
                found[node] = _common(behind)
                continue
            around = _common(found[source] for source in sources)
            nearest = _common([found[sources[-1]], behind[0]]) if behind else ""
            found[node] = max(around, nearest, key=_depth)
        elif is_view(node):
            found[node] = _shared_home(node, found, [user.where.module for v in node.outs for user in users[v]])
    _adopt(graph, found, order)
    return found


def _lacks_module(node: Node) -> bool:
    """Whether a node has no module though it belongs to one."""
    is_sum = node.phase is Phase.BACKWARD and base_name(node) == "add" and len(node.operands) == 2
    return not node.where.module and (is_sum or is_own(node))


def _shared_home(node: Node, found: dict[Node, str], users: list[str]) -> str:
    """The module for a view that one block makes of an outer value, and all the other blocks use too."""
    own = found[node]
    shared = _common([own, *users])
    sources = [found.get(value.node, "") if value.node is not None else "" for value in node.operands]
    outer = all(_depth(_common([source, own])) <= _depth(shared) for source in sources)
    return shared if _depth(shared) < _depth(own) and outer else own


def _depth(path: str) -> int:
    return path.count(".") + bool(path)


def _common(paths: Iterable[str]) -> str:
    """The innermost module around some."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    return ".".join(each[0] for each in takewhile(lambda each: len(set(each)) == 1, names))


def _adopt(graph: Graph, home: dict[Node, str], order: Mapping[Node, int]) -> None:
    """Change ``home`` so that ops which follow every block of a list alike are drawn in that block.

        for block in self.blocks:
            x = x + block(x)          # the sum is an op of the model, not of the block

    Were the sums drawn outside, no block could be folded.
    """
    block_of: dict[Node, str] = {}
    after: dict[tuple[str, str], dict[str, list[Node]]] = {}
    for node in graph.nodes:
        sources = [v.node for v in node.operands if v.node is not None and v.node.phase is node.phase]
        if not sources:
            continue
        last = max(sources, key=order.__getitem__)
        block = block_of.get(last) or _first_block(home[last], home[node])
        if block and not (home[node] + ".").startswith(block + "."):
            parent = block.rpartition(".")[0]
            if parent == home[node] or _is_inside(parent, home[node]):
                block_of[node] = block
                after.setdefault((parent, node.phase), {}).setdefault(block, []).append(node)
    for blocks in after.values():
        ordered = list(blocks.values())
        if len(ordered) < 2:
            continue
        steps = zip(*(ordered[:-1] if len(ordered) > 2 else ordered), strict=False)
        alike = [len({(node.op, *(value.type for value in node.outs)) for node in nodes}) == 1 for nodes in steps]
        shared = [*alike, False].index(False)
        for block, nodes in blocks.items():
            home.update(dict.fromkeys(nodes[:shared], block))


def _is_inside(path: str, around: str) -> bool:
    return not around or path.startswith(around + ".")


def _first_block(path: str, around: str) -> str:
    """The outermost numbered module around ``path`` that is inside ``around``, such as ``blocks.3``."""
    parts = path.split(".") if _is_inside(path, around) else []
    numbered = (i for i in range(max(_depth(around), 1), len(parts)) if parts[i].isdigit())
    return ".".join(parts[: next(numbered, -1) + 1])
