"""What a rank sends for a node."""

from __future__ import annotations

import pytest

from shardfx.ir.cost.traffic import traffic
from shardfx.ir.graph import InputKind
from shardfx.ir.mesh import Loop, Mesh
from shardfx.ir.ops.comm import all_gather, all_reduce, all_to_all, reduce_scatter, shard
from shardfx.ir.ops.table import OwnOp
from tests.unit.sketch import Sketch


@pytest.mark.parametrize(
    ("op", "source", "target", "kwargs", "sent"),
    [
        (all_reduce, "- + tp", "-", {}, 2 * 3 / 4 * 64 * 4),
        (all_gather, "tp", "-", {"dim": 0}, 3 / 4 * 64 * 4),
        (reduce_scatter, "- + tp", "tp", {"dim": 0}, 3 / 4 * 64 * 4),
        (all_gather, "tp mb", "mb", {"dim": 0}, 3 / 4 * 64 / 8 * 4),
        (shard, "-", "tp", {"dim": 0}, 0),
    ],
)
def test_bytes_that_a_rank_sends(op: OwnOp, source: str, target: str, kwargs: dict[str, int], sent: float) -> None:
    s = Sketch()
    s.mesh = s.graph.mesh = Mesh(dp=2, tp=4, mb=Loop(8))
    value = s.input(InputKind.ARGUMENT, "args.0", (64,), source)
    result = s.comm(op, value, "tp", target, "", **kwargs)
    assert result.node is not None
    found = traffic(result.node, s.mesh)
    assert found.nbytes == sent
    assert found.iterations == (8 if "mb" in source else 1)


def test_an_all_to_all_sends_what_it_does_not_keep() -> None:
    s = Sketch()
    value = s.input(InputKind.ARGUMENT, "args.0", (64, 32), "tp, -")
    result = s.comm(all_to_all, value, "tp", "-, tp", "", dim=0, to=1)
    assert result.node is not None
    assert traffic(result.node, s.mesh).nbytes == 3 / 4 * 64 * 32 / 4 * 4
