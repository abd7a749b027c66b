"""Which values of a program share memory, who owns it, and when it is used last.

The facts of a call stand in one place: those of our own in their rows (:mod:`shardfx.ir.ops.local_ops`), those of
torch's ops in their schemas.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import cache

import torch
from torch import fx

from shardfx.ir.ops.local_ops import row_of

aten = torch.ops.aten


def destination(node: fx.Node) -> fx.Node | None:
    """The operand whose memory a call writes its result into, if it does."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row.destination(node) if row is not None else None


def shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the result of a call may be in."""
    target = node.target
    if node.op != "call_function":
        return []
    row = row_of(target)
    if row is not None:
        if row.into is not None:
            into = row.destination(node)
            return [] if into is None else [into]
        if row.name == "getitem":
            (source,) = node.all_input_nodes
            return [source] if shared_inputs(source) else []
        if row.name == "memory.join":
            return list(node.all_input_nodes)
        return list(node.all_input_nodes) if row.shares else []
    if isinstance(target, torch._ops.OpOverload) and not _may_share(target):
        return []
    return list(node.all_input_nodes)


UNSAFE = {aten._unsafe_view.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default}
"""Ops whose results share memory, though their schemas do not say so."""


@cache
def _may_share(op: torch._ops.OpOverload) -> bool:
    """Whether the result of one of torch's ops may be in an operand's memory."""
    return op in UNSAFE or any(result.alias_info is not None for result in op._schema.returns)


class Sharing:
    """The memory of a program's values: those that may share it have one *root*."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._owned: dict[fx.Node, bool] = {}
        self._uses: dict[fx.Node, list[fx.Node]] = {}
        self._place: dict[fx.Node, int] = {}
        self._waited: dict[fx.Node, int] = {}
        """Of collectives: the place of the wait for them."""
        members: dict[fx.Node, list[fx.Node]] = {}
        taken: dict[tuple[fx.Node, object], fx.Node] = {}
        for place, node in enumerate(nodes):
            self._place[node] = place
            row = row_of(node.target) if node.op == "call_function" else None
            if row is not None and row.name == "c10d.wait_tensor":
                self._waited |= dict.fromkeys(node.all_input_nodes, place)
            shared = shared_inputs(node)
            if node.target is operator.getitem and not shared:  # the same result of a call, taken twice
                first = taken.setdefault((node.all_input_nodes[0], node.args[1]), node)
                shared = [first] if first is not node else []
            root = node
            if shared:
                root, *others = roots = list(dict.fromkeys(self._root[used] for used in shared))
                for other in others:
                    for known in members.pop(other):
                        self._root[known] = root
                        members[root].append(known)
                    self._uses.setdefault(root, []).extend(self._uses.pop(other, ()))
                self._owned[root] = all(self._owned[r] for r in roots)
            else:
                self._owned[node] = node.op == "call_function"
            self._root[node] = root
            members.setdefault(root, []).append(node)
            for used in node.all_input_nodes:
                self._uses.setdefault(self._root[used], []).append(node)

    def root(self, value: fx.Node) -> fx.Node:
        """One node for all values that may share this one's memory."""
        return self._root[value]

    def owned(self, value: fx.Node) -> bool:
        """Whether the memory was made by this program, and is not an input's."""
        return self._owned[self._root[value]]

    def last_use(self, value: fx.Node, call: fx.Node) -> bool:
        """Whether nothing uses this memory later than ``call`` does."""
        at = self._place[call]
        return all(self._place[use] <= at for use in self._uses.get(self._root[value], ()))

    def sender(self, value: fx.Node, call: fx.Node) -> fx.Node | None:
        """A collective that was started before ``call`` and is not waited for by then, if one sends this memory."""
        at = self._place[call]
        for use in self._uses.get(self._root[value], ()):
            row = row_of(use.target) if self._place[use] < at else None
            if row is not None and row.group is not None and self._waited.get(use, at) >= at:
                return use
        return None


class GivenAway:
    """The memory of a program's results so far: each must be its receiver's own."""

    def __init__(self, share: Sharing) -> None:
        self._share = share
        self._taken: dict[fx.Node, set[object]] = {}

    def take(self, result: fx.Node) -> bool:
        """Whether a result has memory of its own, that no input and no earlier result has; it is taken from now on."""
        root, part = self._share.root(result), _part(result)
        taken = self._taken.setdefault(root, set())
        free = self._share.owned(result) and not (root in taken or part in taken or (part is None and taken))
        taken.add(root if part is None else part)
        return free


def _part(result: fx.Node) -> object:
    """Which part of a buffer a result is; parts of one buffer do not overlap. None: all of its memory."""
    if result.target is operator.getitem and isinstance(source := result.args[0], fx.Node):
        row = row_of(source.target)
        if row is not None and row.name in ("pack.unflatten", "memory.spread"):
            return source, result.args[1]
    return None
