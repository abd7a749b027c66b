"""Ranks interpreted side by side, which come together at their collectives.

Not every rank need be interpreted: at a collective of a rank whose group has others, these *shadows* are taken to run
the same program at their own coordinates. What a shadow sends is then what the rank sends, with the facts behind it
being those of the shadow's coordinates. Who may be a shadow, and why, is said in
:mod:`shardfx.runtime.verify.families.many_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import op_name
from shardfx.runtime.rendezvous import Groups, Mailbox, Request, unfit
from shardfx.runtime.verify.data_movement import MESSAGES
from shardfx.runtime.verify.fault import Failed, Fault

from .elements import Elements
from .interpreter import Asked, Rank
from .known import Known, Proof
from .numbering import Impossible, Wrong

c10d = torch.ops._c10d_functional


def itself(rank: Rank, member: int) -> Rank:
    """A shadow does what the rank does in whose group it is."""
    return rank


@dataclass
class LockStep:
    """All interpreted ranks up to their next collective; it is done where a group has come together; and so on."""

    proof: Proof
    ranks: Mapping[int, Rank]
    model: Callable[[Rank, int], Rank | None] = itself
    """Of a rank and a shadow in one of its groups: whose program the shadow runs; None: that is not known."""

    def run(self) -> None:
        """Interpret the programs to their ends.

        Raises:
            Failed: a group does not come together, or its members ask for different things.
        """
        groups = Groups(self.proof.after.mesh)
        asks = {r: rank.run() for r, rank in self.ranks.items()}
        waiting: dict[int, Asked] = {}
        mail: Mailbox[Known] = Mailbox()

        def advance(rank: int, reply: Known | None) -> None:
            try:
                waiting[rank] = asks[rank].send(reply)  # type: ignore[arg-type]
            except StopIteration:
                waiting.pop(rank, None)

        for rank in self.ranks:
            advance(rank, None)
        while waiting:
            progressed = False
            for rank in sorted(waiting):
                if rank not in waiting:
                    continue
                node = waiting[rank][0]
                members = _members(groups, self.ranks[rank], node)
                if node.target in MESSAGES:
                    passed = self._message(rank, members, waiting[rank], mail)
                    if passed is not None:
                        del waiting[rank]
                        advance(rank, passed)
                        progressed = True
                    continue
                here = [m for m in members if m in self.ranks]
                if not all(m in waiting and waiting[m][0].args[-1] == node.args[-1] for m in here):
                    continue
                if not all(self._has_come(m, self.ranks[here[0]]) for m in members if m not in self.ranks):
                    continue
                for member, reply in self._collective(members, here, waiting).items():
                    del waiting[member]
                    advance(member, reply)
                progressed = True
            if not progressed:
                rank, (node, _, _) = min(waiting.items())
                what = f"deadlock: the group {node.args[-1]} does not come together here"
                raise Failed(self.ranks[rank].fault(what, node))
        if (left := mail.left()) is not None:
            rank = groups.members(left.group, next(iter(self.ranks)))[left.origin]
            raise Failed(Fault(f"nobody receives {left}", "", rank, certain=True))

    def _message(self, rank: int, members: Sequence[int], asked: Asked, mail: Mailbox[Known]) -> Known | None:
        """What a rank gets that sends, or receives; None where nothing has come yet."""
        node, sent, hints = asked
        request = Request.of(node)
        assert request is not None
        message = request.of_rank(members.index(rank))
        if not all(type(each) is int and 0 <= each < len(members) for each in (message.origin, message.to)):
            raise self._impossible(f"a message to or from what is none of {len(members)} ranks", rank, node)
        if request.message == "sends":
            why = "" if sent is not None else "nothing is known of what is sent"
            mail.put(message, Known(codes=sent, hints=hints, why=why))
            return Known(why="a send gives nothing")
        try:
            if not mail.has(message):
                return None
        except Error as error:
            raise self._impossible(f"{error.got} comes, where {error.expected} is expected", rank, node) from error
        got, (shape, dtype) = mail.take(message), node.args[:2]
        if got.codes is None:
            return got
        dtypes = self.proof.numbering.dtypes(got.codes, got.hints)
        if got.codes.shape != tuple(shape) or dtypes - {dtype}:  # type: ignore[arg-type]
            what = (
                f"{list(got.codes.shape)} of {', '.join(map(str, dtypes))} comes, where {shape} of {dtype} is expected"
            )
            raise self._impossible(what, rank, node)
        return got

    def _collective(
        self, members: Sequence[int], here: Sequence[int], waiting: Mapping[int, Asked]
    ) -> dict[int, Known]:
        """What each interpreted member gets."""
        first = waiting[here[0]][0]
        for member in here[1:]:
            node = waiting[member][0]
            if _asks(node) != _asks(first):
                what = (
                    f"{op_name(node.target)}{node.args[1:]}, where rank {here[0]} does "
                    f"{op_name(first.target)}{first.args[1:]}"
                )
                raise Failed(self.ranks[member].fault(what, node))
        axes = str(first.args[-1]).partition("/")[2].partition("@")[0].split(".")
        tensors, hints, args = [], [], []
        moved: dict[Any, Elements] = {}
        for member in members:
            if member in self.ranks:
                node, sent, left = waiting[member]
            else:
                node, sent, left = self._shadow(member, self.ranks[here[0]], first, moved)
            tensors.append(sent)
            args.append(node.args[1:-1])
            hints += [h for h in left if h not in hints]
        if what := unfit(first.target._opname, args, len(members)):  # type: ignore[union-attr]
            raise self._impossible(what, here[0], first)
        if any(t is None for t in tensors):
            return dict.fromkeys(here, Known(why="nothing is known of what is sent"))
        known = [t for t in tensors if t is not None]
        try:
            got = self.proof.numbering.collective(first.target, args, known, axes)
        except Impossible as error:
            raise self._impossible(str(error), here[0], first) from error
        except (Wrong, *DOES_NOT_RUN) as error:
            return {m: Known(why=str(error)) for m in here}
        reduced = first.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
        after = [self.proof.numbering.without(hint, axes) for hint in hints] if reduced else hints
        after = list(dict.fromkeys([*self.proof.numbering.inside(list(dict.fromkeys(got))), *after]))
        pairs = zip(members, got, strict=True)
        why = self.proof.numbering.why
        return {m: Known(codes=t, hints=after, why=why(t)) for m, t in pairs if m in self.ranks}

    def _impossible(self, what: str, rank: int, node: fx.Node) -> Failed:
        return Failed(replace(self.ranks[rank].fault(what, node), certain=True))

    def _has_come(self, member: int, rank: Rank) -> bool:
        """Whether the program that a shadow runs has come to the collective at which a rank waits."""
        model = self.model(rank, member)
        mine = model is not None and self.ranks.get(model.rank) is model
        return not mine or model.result is not None or len(model.asked) >= len(rank.asked)  # type: ignore[union-attr]

    def _shadow(self, member: int, rank: Rank, node: fx.Node, moved: dict[Any, Elements]) -> Asked:
        """What a rank that is not interpreted sends."""
        pattern = self.model(rank, member)
        come = pattern is not None and len(rank.asked) <= len(pattern.asked)
        twin = pattern.asked[len(rank.asked) - 1] if pattern is not None and come else None
        if pattern is None or twin is None or rank.changed or _asks(twin) != _asks(node):
            what = f"the group {node.args[-1]} has ranks to which the plan's own programs do not speak here"
            raise Failed(rank.fault(what, node))
        sent = pattern.as_at(twin.args[0], member, moved)  # type: ignore[arg-type]
        return twin, sent, pattern.items[twin.args[0]].hints  # type: ignore[index]


def _asks(node: fx.Node) -> tuple[Any, ...]:
    """What all ranks of a group must ask for alike: sizes that are exchanged are each rank's own."""
    if node.target is c10d.all_to_all_single.default:
        return (node.target,)
    return node.target, node.args[1:-1], str(node.args[-1]).partition("@")[0]


def _members(groups: Groups, rank: Rank, node: fx.Node) -> Sequence[int]:
    try:
        return groups.members(str(node.args[-1]), rank.rank)
    except Error as error:
        raise Failed(rank.fault(error.what, node)) from None
