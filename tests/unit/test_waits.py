"""Where a rank's program waits."""

from __future__ import annotations

import pytest
import torch

import shardfx as sx
from tests.plans import plan
from tests.zoo import make

aten, c10d = torch.ops.aten, torch.ops._c10d_functional


@pytest.mark.long
def test_a_loss_is_waited_for_at_the_end() -> None:
    """How many targets count is needed in the backward, and waited for there; the loss is needed by nobody."""
    pm = plan(make("gpt_fused"), sx.Mesh(dp=2))
    nodes = list(pm.rank_program(0).graph.nodes)
    loss = nodes[-1].args[0][0]  # type: ignore[index,union-attr]
    summed, counted = loss.all_input_nodes  # type: ignore[union-attr]
    products = [nodes.index(node) for node in nodes if node.target in (aten.mm.default, aten.mm.out)]
    first_gradient = nodes.index(next(node for node in nodes if "backward" in str(node.target)))
    assert summed.target is counted.target is c10d.wait_tensor.default
    assert nodes.index(counted) < first_gradient < products[-1] < nodes.index(summed) < nodes.index(loss)
    assert pm.verify()
