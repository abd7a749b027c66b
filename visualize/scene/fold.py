"""Equal blocks are found and drawn once.

The nodes of one lane (forward, say) form a tree by their module paths. Siblings with numeric names whose content
is the same - ops, types, placements, communication, and who feeds whom - are one :class:`Module` with a count:

    layers                      layers.0 … 79   x 80
      0  attn mlp                 attn mlp
      1  attn mlp         ->
      ...

A pattern that alternates (dense, sparse, dense, sparse) is folded as well: ``layers.0, 1 … 78, 79   x 40``.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field

from shardfx.ir.graph import Graph, Input, InputKind, Node, Phase, Value
from shardfx.ir.ops.alike import key_of

LONGEST_PATTERN = 8
ENDS = (InputKind.ARGUMENT, InputKind.TARGET)
"""Inputs that are as good as the result of another block."""


@dataclass(eq=False)
class Module:
    """A module of one lane: its sub-modules and own nodes in order of appearance; ``count`` copies of it if folded."""

    path: str
    children: list[Module | Node] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    """All nodes at any depth, in program order."""
    count: int = 1
    label: str = ""
    """What to write for a folded module instead of its path, such as ``layers.0 … 79``."""
    members: tuple[str, ...] = ()
    """The paths of all that it stands for: its own, and those of its copies."""

    @property
    def numeric(self) -> bool:
        """Whether it is an element of a list of modules: ``layers.3``."""
        return self.path.rpartition(".")[2].isdigit()


@dataclass(eq=False)
class Folded:
    """One lane, folded: the tree to draw, and for a node of a copy the node that is drawn in its stead."""

    phase: Phase
    root: Module
    home: dict[Node, Node] = field(default_factory=dict)
    turns: dict[Node, tuple[tuple[Module, int], ...]] = field(default_factory=dict)
    """In which folds a node stands, outermost first, and in which of their copies."""

    def drawn(self, node: Node) -> Node:
        """The node that is drawn for ``node``."""
        while node in self.home:
            node = self.home[node]
        return node

    def trail(self, node: Node) -> dict[Module, int]:
        """For every fold around ``node`` the number of the copy that it stands in."""
        trail: dict[Module, int] = {}
        while True:
            for fold, turn in self.turns.get(node, ()):
                trail.setdefault(fold, turn)
            if node not in self.home:
                return trail
            node = self.home[node]

    def carried(self, source: Node, target: Node) -> bool:
        """Whether an edge leads from one copy of a block to another: it is not drawn."""
        if source not in self.turns or target not in self.turns:
            return False
        here, there = self.trail(source), self.trail(target)
        return any(there.get(fold, turn) != turn for fold, turn in here.items())


def fold(graph: Graph, phase: Phase, home: Mapping[Node, str]) -> Folded:
    """The module tree of one lane, with equal blocks folded. ``home`` says in which module a node is drawn."""
    nodes = [node for node in graph.nodes if node.phase is phase]
    folded = Folded(phase, module_tree(nodes, home))
    inputs = {given.value: given for given in graph.inputs}
    folder = _Folder(folded, inputs, home)
    folder.children(folded.root)
    return folded


def module_tree(nodes: Iterable[Node], home: Mapping[Node, str]) -> Module:
    """The nodes as a tree by module path."""
    root = Module("")
    known = {"": root}

    def find(path: str) -> Module:
        if path not in known:
            parent = find(path.rpartition(".")[0])
            known[path] = Module(path, members=(path,))
            parent.children.append(known[path])
        return known[path]

    for node in nodes:
        path = home[node]
        find(path).children.append(node)
        while True:
            known[path].nodes.append(node)
            if not path:
                break
            path = path.rpartition(".")[0]
    return root


@dataclass(eq=False)
class _Folder:
    """Folds a tree in place, from the top down."""

    folded: Folded
    inputs: Mapping[Value, Input]
    home: Mapping[Node, str]

    def children(self, module: Module) -> None:
        run = [child for child in module.children if isinstance(child, Module) and child.numeric]
        if len(run) > 1:
            first = module.children.index(run[0])
            numbered = set(run)
            before, after = module.children[:first], [c for c in module.children[first:] if c not in numbered]
            module.children = [*before, *self.run(run), *after]
        for child in module.children:
            if isinstance(child, Module):
                self.children(child)

    def run(self, run: list[Module]) -> list[Module]:
        """The numeric siblings of ``run``, with repeated patterns made into one module each."""
        numbers: dict[Hashable, int] = {}
        signs = [numbers.setdefault(signature(module, self.inputs, self.home), len(numbers)) for module in run]
        result: list[Module] = []
        at = 0
        while at < len(run):
            period, count = _pattern(signs, at)
            block = run[at : at + period]
            if count > 1:
                copies = [run[at + k * period : at + (k + 1) * period] for k in range(count)]
                result.append(_folded_module(self.folded, copies))
            else:
                result.extend(block)
            at += period * count
        return result


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


def _folded_module(folded: Folded, copies: list[list[Module]]) -> Module:
    first, last = copies[0], copies[-1]
    numbers = [", ".join(m.path.rpartition(".")[2] for m in block) for block in (first, last)]
    parent = first[0].path.rpartition(".")[0]
    label = f"{parent}.{numbers[0]} … {numbers[1]}" if parent else f"{numbers[0]} … {numbers[1]}"
    nodes = [node for module in first for node in module.nodes]
    if len(first) == 1:
        made = first[0]
        made.count, made.label = len(copies), label
    else:
        made = Module(parent, list(first), nodes, len(copies), label)
    made.members = tuple(module.path for block in copies for module in block)
    for turn, block in enumerate(copies):
        others = [node for module in block for node in module.nodes]
        for node, other in zip(nodes, others, strict=True):
            folded.turns[other] = (*folded.turns.get(other, ()), (made, turn))
            if turn:
                folded.home[other] = node
    return made


def signature(module: Module, inputs: Mapping[Value, Input], home: Mapping[Node, str]) -> Hashable:
    """What two equal blocks share: everything but names, numbers and source lines."""
    inside: dict[Value, tuple[int, int]] = {}
    outside: dict[Value, int] = {}
    prefix = len(module.path)

    def seen(value: Value) -> Hashable:
        """A value by its place in the block, or as what comes in from outside; with type and placement."""
        place: Hashable = inside.get(value)
        if place is None:
            given = inputs.get(value)
            kind = given.kind if given is not None and given.kind not in ENDS else None
            place = outside.setdefault(value, len(outside)), kind
        return place, value.type, value.spec

    items: list[Hashable] = []
    for i, node in enumerate(module.nodes):
        for j, result in enumerate(node.results):
            if result is not None:
                inside[result] = (i, j)
        items.append((home[node][prefix:], node.at, key_of(node, seen)))
    return tuple(items)
