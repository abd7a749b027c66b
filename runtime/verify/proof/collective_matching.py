"""Ranks interpreted side by side, matched at their collectives and messages.

Not every rank need be interpreted: at a collective of a rank whose group has others, these *shadows* are taken to run
the same program at their own coordinates. What a shadow sends is then what the rank sends, with the facts behind it
being those of the shadow's coordinates. Who may be a shadow, and why, is said in
:mod:`shardfx.runtime.verify.families.many_ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import DOES_NOT_RUN, Error
from shardfx.ir.graph import Input, Output, op_name
from shardfx.ir.program.loops.schedule_actions import local_ends
from shardfx.runtime import rendezvous
from shardfx.runtime.rendezvous import Mailbox, Request, unfit
from shardfx.runtime.verify.data_movement import MESSAGES
from shardfx.runtime.verify.fault import Failed, Fault

from .calls import Known, Proof
from .elements import Elements
from .interpreter import Asked, HasGraph, Rank
from .numbering import Impossible, Wrong

c10d = torch.ops._c10d_functional


def interpret(
    proof: Proof, modules: Mapping[int, HasGraph], inputs: Sequence[Input], outputs: Sequence[Output]
) -> Fault | None:
    """The first fault of some ranks' programs, or None; other ranks in their groups are shadows of theirs.

    ``inputs`` and ``outputs`` are those of all programs, in order: each has what is of its rank's stages.
    """
    ends = {r: local_ends(proof.after, inputs, outputs, proof.after.mesh.coords(r)) for r in modules}
    ranks = {r: Rank(proof, r, modules[r], ins) for r, (ins, _) in ends.items()}
    try:
        LockStep(proof, ranks).run()
        for r, rank in ranks.items():
            rank.outputs(ends[r][1])
    except Failed as failed:
        return failed.fault
    return None


@dataclass
class LockStep:
    """Interprets ranks in lock-step: each up to its next collective, which runs once all of its group are there."""

    proof: Proof
    ranks: Mapping[int, Rank]
    model: Callable[[Rank, int], Rank | None] = lambda rank, member: rank
    """The rank whose program a shadow runs, by a rank and a member of one of its groups; None: that is not known."""
    waiting: dict[int, Asked] = field(default_factory=dict)
    mail: Mailbox[Known] = field(default_factory=Mailbox)

    def run(self) -> None:
        """Interpret the programs to their ends.

        Raises:
            Failed: a group does not come together, or its members ask for different things.
        """
        asks = {r: rank.run() for r, rank in self.ranks.items()}
        replies: dict[int, Any] = dict.fromkeys(self.ranks)
        while replies:
            for rank, reply in replies.items():
                try:
                    self.waiting[rank] = asks[rank].send(reply)
                except StopIteration:
                    self.waiting.pop(rank, None)
            replies = {}
            for rank in sorted(self.waiting):
                if rank not in replies:
                    replies |= self._replies(rank, _members(self.ranks[rank], self.waiting[rank][0]))
        if self.waiting:
            rank, (node, _, _) = min(self.waiting.items())
            what = f"deadlock: the group {node.args[-1]} does not come together here"
            raise Failed(self.ranks[rank].fault(what, node))
        if (left := self.mail.left()) is not None:
            rank = rendezvous.members(self.proof.after.mesh, left.group, next(iter(self.ranks)))[left.origin]
            raise Failed(Fault(f"nobody receives {left}", "", rank, certain=True))

    def _replies(self, rank: int, members: Sequence[int]) -> Mapping[int, Known]:
        """The results at the collective where a rank waits, by rank; empty where its members have not all arrived."""
        node = self.waiting[rank][0]
        if node.target in MESSAGES:
            got = self._message(rank, members)
            return {} if got is None else {rank: got}
        here = [m for m in members if m in self.ranks]
        if not all(m in self.waiting and self.waiting[m][0].args[-1] == node.args[-1] for m in here):
            return {}
        if not all(self._has_come(m, self.ranks[here[0]]) for m in members if m not in self.ranks):
            return {}
        return self._collective(members, here)

    def _message(self, rank: int, members: Sequence[int]) -> Known | None:
        """The result of a send or receive; None where no message has arrived yet."""
        node, sent, hints = self.waiting[rank]
        request = Request.of(node)
        assert request is not None
        message = request.of_rank(members.index(rank))
        if not all(type(each) is int and 0 <= each < len(members) for each in (message.origin, message.to)):
            raise self._impossible(f"a message to or from what is none of {len(members)} ranks", rank, node)
        if request.message == "sends":
            why = "" if sent is not None else "nothing is known of what is sent"
            self.mail.put(message, Known(codes=sent, hints=hints, why=why))
            return Known(why="a send gives nothing")
        try:
            got = self.mail.take(message)
        except Error as error:
            raise self._impossible(f"{error.got} comes, where {error.expected} is expected", rank, node) from error
        shape, dtype = node.args[:2]
        if got is None or got.codes is None:
            return got
        dtypes = self.proof.numbering.dtypes(got.codes, got.hints)
        if got.codes.shape != tuple(shape) or dtypes - {dtype}:  # type: ignore[arg-type]
            comes = f"{list(got.codes.shape)} of {', '.join(map(str, dtypes))} comes"
            raise self._impossible(f"{comes}, where {shape} of {dtype} is expected", rank, node)
        return got

    def _collective(self, members: Sequence[int], here: Sequence[int]) -> dict[int, Known]:
        """The result of a collective for each interpreted member."""
        first = self.waiting[here[0]][0]
        for member in here[1:]:
            node = self.waiting[member][0]
            if _asks(node) != _asks(first):
                mine, theirs = (f"{op_name(each.target)}{each.args[1:]}" for each in (node, first))
                raise Failed(self.ranks[member].fault(f"{mine}, where rank {here[0]} does {theirs}", node))
        axes = str(first.args[-1]).partition("/")[2].partition("@")[0].split(".")
        moved: dict[Any, Elements] = {}
        alike: dict[fx.Node, bool] = {}
        lead = self.ranks[here[0]]
        asked = [self.waiting[m] if m in self.ranks else self._shadow(m, lead, first, alike, moved) for m in members]
        args = [node.args[1:-1] for node, _, _ in asked]
        hints = list(dict.fromkeys(hint for _, _, left in asked for hint in left))
        if what := unfit(first.target._opname, args, len(members)):  # type: ignore[union-attr]
            raise self._impossible(what, here[0], first)
        known = [sent for _, sent, _ in asked if sent is not None]
        if len(known) < len(asked):
            return dict.fromkeys(here, Known(why="nothing is known of what is sent"))
        try:
            got = self.proof.numbering.collective(first.target, args, known, axes)
        except Impossible as error:
            raise self._impossible(str(error), here[0], first) from error
        except (Wrong, *DOES_NOT_RUN) as error:
            return {m: Known(why=str(error)) for m in here}
        reduced = first.target in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default)
        numbering = self.proof.numbering
        after = [numbering.without(hint, axes) for hint in hints] if reduced else hints
        after = list(dict.fromkeys([*numbering.inside(list(dict.fromkeys(got))), *after]))
        pairs = zip(members, got, strict=True)
        return {m: Known(codes=t, hints=after) for m, t in pairs if m in self.ranks}

    def _impossible(self, what: str, rank: int, node: fx.Node) -> Failed:
        return Failed(replace(self.ranks[rank].fault(what, node), certain=True))

    def _has_come(self, member: int, rank: Rank) -> bool:
        """Whether the program that a shadow runs has reached the collective at which a rank waits."""
        model = self.model(rank, member)
        mine = model is not None and self.ranks.get(model.rank) is model
        return not mine or model.result is not None or len(model.asked) >= len(rank.asked)  # type: ignore[union-attr]

    def _shadow(
        self, member: int, rank: Rank, node: fx.Node, alike: dict[fx.Node, bool], moved: dict[Any, Elements]
    ) -> Asked:
        """The operand of a shadow. ``alike`` and ``moved`` cache what was found for others."""
        pattern = self.model(rank, member)
        come = pattern is not None and len(rank.asked) <= len(pattern.asked)
        twin = pattern.asked[len(rank.asked) - 1] if pattern is not None and come else None
        if twin is not None and twin not in alike:
            alike[twin] = _asks(twin) == _asks(node)
        if pattern is None or twin is None or rank.changed or not alike[twin]:
            what = f"the group {node.args[-1]} has ranks to which the plan's own programs do not speak here"
            raise Failed(rank.fault(what, node))
        sent = pattern.as_at(twin.args[0], member, moved)  # type: ignore[arg-type]
        return twin, sent, pattern.items[twin.args[0]].hints  # type: ignore[index]


def _asks(node: fx.Node) -> tuple[Any, ...]:
    """The arguments on which all ranks of a group must agree: sizes that are exchanged are each rank's own."""
    if node.target is c10d.all_to_all_single.default:
        return (node.target,)
    return node.target, node.args[1:-1], str(node.args[-1]).partition("@")[0]


def _members(rank: Rank, node: fx.Node) -> Sequence[int]:
    try:
        return rendezvous.members(rank.proof.after.mesh, str(node.args[-1]), rank.rank)
    except Error as error:
        raise Failed(rank.fault(error.what, node)) from None
