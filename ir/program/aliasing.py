"""Alias analysis of a program: which values share memory, who owns it, and when it is used last.

The facts of a call stand in one place: those of our own in their rows (:mod:`shardfx.ir.ops.local_ops`), those of
torch's ops in their schemas.
"""

from __future__ import annotations

import operator
from collections.abc import Container, Iterable, Mapping

import torch
from torch import fx

from shardfx.ir.graph import InputKind
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.table import LocalOp

from .loops.loop_regions import is_induction_variable
from .rank_program import RankProgram

aten = torch.ops.aten


def destination(node: fx.Node) -> fx.Node | None:
    """The operand into whose memory a call writes its result (its ``out``), if any."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.destination(node) if row is not None else None


def aliased_inputs(node: fx.Node, row: LocalOp | None) -> list[fx.Node]:
    """The operands that the result of a call may alias; ``row`` is the call's."""
    target = node.target
    if node.op != "call_function":
        return []
    if row is not None:
        if row.into is not None:
            into = row.destination(node)
            return [] if into is None else [into]
        if row.name == "getitem":
            (source,) = node.all_input_nodes
            return [source] if aliased_inputs(source, row_of(source.target)) else []
        return [used for used in node.all_input_nodes if not is_induction_variable(used)] if row.shares else []
    if isinstance(target, torch._ops.OpOverload):
        known = ALIASING_OPS.get(target._op)
        if known is None:
            aliases = any(result.alias_info is not None for result in target._schema.returns)
            known = ALIASING_OPS[target._op] = aliases or target in UNSAFE
        return [used for used in node.all_input_nodes if not is_induction_variable(used)] if known else []
    return [used for used in node.all_input_nodes if not is_induction_variable(used)]


def view_source(node: fx.Node, row: LocalOp | None) -> fx.Node | None:
    """The value of which a call's result is a mere view, wherever that lies; ``row`` is the call's."""
    shared = aliased_inputs(node, row) if row is None and node.target not in ELSEWHERE else []
    return shared[0] if len(shared) == 1 else None


ELSEWHERE = {aten.as_strided.default}
"""Views that may reach beyond what they are views of."""
UNSAFE = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
"""Ops whose results share memory, though their schemas do not say so."""
ALIASING_OPS: dict[object, bool] = {}
"""Whether results of torch's ops share memory, of those that were asked for (by what hashes without calling Python)."""


class Aliasing:
    """The memory of a program's values: those that may share it have one *root*."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._owned: dict[fx.Node, bool] = {}
        self._uses: dict[fx.Node, list[fx.Node]] = {}
        self._place: dict[fx.Node, int] = {}
        self._rows: dict[fx.Node, LocalOp | None] = {}
        self._waited: dict[fx.Node, int] = {}
        """Of collectives: the place of the wait for them."""
        self._adjoins: dict[fx.Node, list[fx.Node]] = {}
        """By root: the calls that may see it as one with other memory."""
        members: dict[fx.Node, list[fx.Node]] = {}
        taken: dict[tuple[fx.Node, object], fx.Node] = {}
        adjoined: dict[fx.Node, list[fx.Node]] = {}
        root_of, owned, uses = self._root, self._owned, self._uses
        for place, node in enumerate(nodes):
            self._place[node] = place
            row = self._rows[node] = row_of(node.target) if node.op == "call_function" else None
            inputs = node.all_input_nodes
            if row is not None and row.waits:
                self._waited |= dict.fromkeys(inputs, place)
            shared = aliased_inputs(node, row)
            if node.target is operator.getitem and not shared:  # the same result of a call, taken twice
                first = taken.setdefault((inputs[0], node.args[1]), node)
                shared = [first] if first is not node else []
            if row is not None and row.adjoins and len({root_of[used] for used in shared}) > 1:
                for used in shared:
                    adjoined.setdefault(used, []).append(node)
                owned[node] = False
                root_of[node] = node
                members[node] = [node]
            elif shared:
                roots = dict.fromkeys([root_of[used] for used in shared])
                root, *others = roots
                owned[root] = all(owned[r] for r in roots)
                for other in others:
                    for known in members.pop(other):
                        root_of[known] = root
                        members[root].append(known)
                    uses.setdefault(root, []).extend(uses.pop(other, ()))
                root_of[node] = root
                members[root].append(node)
            else:
                owned[node] = node.op == "call_function"
                root_of[node] = node
                members[node] = [node]
            for used in inputs:
                uses.setdefault(root_of[used], []).append(node)
        for used, calls in adjoined.items():
            self._adjoins.setdefault(root_of[used], []).extend(calls)
        for root, calls in reversed(self._adjoins.items()):  # what reads memories as one reads each of them
            for call in calls:
                uses.setdefault(root, []).extend(uses.get(root_of[call], ()))

    def row(self, node: fx.Node) -> LocalOp | None:
        """The row of a call that is no op of torch."""
        return self._rows[node]

    def root(self, value: fx.Node) -> fx.Node:
        """The representative of all values that may share this one's memory."""
        return self._root[value]

    def owned(self, value: fx.Node) -> bool:
        """Whether the program allocated the memory; it is no input's."""
        return self._owned[self._root[value]]

    def last_use(self, value: fx.Node, call: fx.Node) -> bool:
        """Whether ``call`` is the last use of the memory."""
        at = self._place[call]
        return all(self._place[use] <= at for use in self._uses.get(self._root[value], ()))

    def uses(self, root: fx.Node) -> list[fx.Node]:
        """The calls that use the memory of a root."""
        return self._uses.get(root, [])

    def until(self, value: fx.Node) -> int:
        """The position of the last call that uses this memory, or waits for one that was started on it."""
        end = len(self._place) - 1
        found = [self._place[value]]
        for use in (use for root in self.seen_in(value) for use in self.uses(root)):
            row, at = self._rows[use], self._place[use]
            if row is not None and row.message == "sends":
                return end
            found.append(max(at, self._waited.get(use, end)) if row is not None and row.starts else at)
        return max(found)

    def seen_in(self, value: fx.Node) -> list[fx.Node]:
        """The roots of all values that may alias this memory, or this memory and what lies beside it."""
        found, todo = dict[fx.Node, None](), [self._root[value]]
        while todo:
            root = todo.pop()
            if root not in found:
                found[root] = None
                todo += [self._root[call] for call in self._adjoins.get(root, ())]
        return [*found]

    def meet(self, a: fx.Node, b: fx.Node) -> bool:
        """Whether two values may alias, or one lies in a buffer of which the other's memory is a part."""
        mine, theirs = {*self.seen_in(a)}, {*self.seen_in(b)}
        return self._root[a] in theirs or self._root[b] in mine

    def sender(self, value: fx.Node, call: fx.Node) -> fx.Node | None:
        """A collective, copy or message of this memory that is in flight at ``call``; a message may be until the
        program's end."""
        at = self._place[call]
        for use in self._uses.get(self._root[value], ()):
            row = self._rows[use] if self._place[use] < at else None
            if row is None:
                continue
            if row.message == "sends" or (row.starts and self._waited.get(use, at) >= at):
                return use
        return None


STEPPED = (InputKind.PARAMETER, InputKind.STATE)
"""The inputs that an optimizer's step gives anew."""
WRITTEN = (*STEPPED, InputKind.BUFFER)
"""The inputs that a program may give anew."""


def renewed(program: RankProgram, kinds: Container[InputKind] = WRITTEN) -> dict[fx.Node, fx.Node]:
    """The inputs of some kinds that a program updates, each with its new content: they may be overwritten."""
    places = (node for node in program.graph.nodes if node.op == "placeholder")
    inputs = {inp.name: node for node, inp in zip(places, program.inputs, strict=False) if inp.kind in kinds}
    returned = program.result().args[0]
    results = returned if isinstance(returned, (list, tuple)) else [returned]
    return {
        inputs[output.name]: result
        for output, result in zip(program.outputs, results, strict=False)
        if output.kind.is_kept and output.name in inputs and isinstance(result, fx.Node)
    }


class ResultOwnership:
    """The memory of a program's results so far: each must be its receiver's own; ``renewed`` inputs are updated in
    place."""

    def __init__(self, share: Aliasing, renewed: Mapping[fx.Node, fx.Node] | None = None) -> None:
        self._share = share
        self._renewed = renewed or {}
        self._taken: dict[fx.Node, set[object]] = {}

    def take(self, result: fx.Node) -> bool:
        """Claim the memory of a result; whether it aliases no input and no earlier result."""
        root, part = self._share.root(result), _part(result)
        if self._renewed.get(root) is result and root not in self._taken:
            self._taken[root] = {root}
            return True
        taken = self._taken.setdefault(root, set())
        free = self._share.owned(result) and not (root in taken or part in taken or (part is None and taken))
        taken.add(root if part is None else part)
        return free


def _part(result: fx.Node) -> object:
    """The part of a buffer that a result views; parts of one buffer do not overlap. None: all of it."""
    while (seen := view_source(result, row_of(result.target) if result.op == "call_function" else None)) is not None:
        result = seen
    if result.target is operator.getitem and isinstance(source := result.args[0], fx.Node):
        row = row_of(source.target)
        if row is not None and row.name in ("pack.unflatten", "memory.spread"):
            return source, result.args[1]
    return None
