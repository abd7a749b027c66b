"""Messages from stage to stage: where they are code, each rank receives what another one sends it, on all ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx

from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.time import handover
from shardfx.runtime.verify.movers import MESSAGES

from .family import Family, varies
from .varying import leaves


def all_meet(made: Sequence[Family], axis: str, mesh: Mesh) -> bool:
    """Whether of all messages of an op, along ``axis``, each one that is sent is received, and no number but those of
    groups and turns hangs on the rank."""
    sent, received = Counter[Any](), Counter[Any]()
    for family in made:
        together = family.together
        coords = mesh.coords(together.rank())
        line = mesh.rank({**coords, axis: 0})
        for node in family.program.graph.nodes:
            if node.target not in MESSAGES:
                if any(map(varies, leaves(node))):
                    return False
                continue
            *before, other, tag, turn, group = node.args
            if any(map(varies, _flat((*before, other, tag)))) or group != mesh.group_name(together.rank(), [axis]):
                return False
            sends = node.target is handover.send
            ends = [coords[axis], other] if sends else [other, coords[axis]]
            columns = [together.on_each(each) or [each] * len(family.ranks) for each in (line, turn, *ends)]
            (sent if sends else received).update((tag, *each) for each in zip(*columns, strict=True))
    return sent == received


def _flat(args: Iterable[Any]) -> Iterator[Any]:
    for arg in args:
        if isinstance(arg, (list, tuple)):
            yield from _flat(arg)
        elif not isinstance(arg, fx.Node):
            yield arg
