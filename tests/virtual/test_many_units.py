"""Several units of a rank: of several stages, backward in two parts, iterations within; and with all that plans may
have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Node, Phase
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_nest import PlannedLoop, nodes_of
from shardfx.module.programs import TRAIN
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan
from tests.reference import rel_err, single_device
from tests.unit_orders import ONE_AHEAD, UnitOf, in_order, put
from tests.virtual.test_chunks import Language, next_tokens
from tests.zoo import make


def stages(steps: Sequence[Node | PlannedLoop]) -> Callable[[Node], str]:
    """Of mlp3: fc1 as stage 0, what comes behind it as stage 2."""
    nodes = nodes_of(steps)
    second = [at for at, node in enumerate(nodes) if node.where.module == "fc2"]
    ahead, back = nodes[: second[0]], nodes[second[-1] + 1 :]
    first = {id(node) for node in (*ahead, *back)}
    return lambda node: f"{'F' if node.phase is Phase.FORWARD else 'B'}{0 if id(node) in first else 2}"


def weights_apart(steps: Sequence[Node | PlannedLoop]) -> Callable[[Node], str]:
    """The backward in two parts: what no other backward waits for is W0."""
    nodes, later = nodes_of(steps), set[int]()
    users: dict[int, list[Node]] = {}
    for node in nodes:
        for value in node.operands:
            if value.node is not None:
                users.setdefault(id(value.node), []).append(node)
    for node in reversed(nodes):
        ends = node.op is comm.all_reduce and "mb" in node.kwargs["axes"]
        if node.phase is Phase.BACKWARD and (ends or all(id(user) in later for user in users[id(node)])):
            later.add(id(node))
    return lambda node: "F0" if node.phase is Phase.FORWARD else "W0" if id(node) in later else "I0"


STAGES = "F0.0 F2.0 F0.1 B2.0 B0.0 F2.1 F0.2 F2.2 B2.1 B2.2 B0.1 F0.3 B0.2 F2.3 B2.3 B0.3"
WEIGHTS = "F0.0 F0.1 I0.0 F0.2 I0.1 W0.1 W0.0 F0.3 I0.2 I0.3 W0.2 W0.3"
MANY: dict[str, tuple[UnitOf, str]] = {"stages": (stages, STAGES), "weights": (weights_apart, WEIGHTS)}


@pytest.mark.long
@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "hints", [{}, {"zero": 2, "zero_min_numel": 0}, {"reduce": "each"}], ids=["plain", "zero2", "each"]
)
@pytest.mark.parametrize("how", MANY)
def test_ranks_with_many_units(how: str, hints: dict[str, Any]) -> None:
    unit_of, order = MANY[how]
    case = make("mlp3")
    pm = plan(case, sx.Mesh(dp=2), grad_accumulation=4, **hints)
    put(pm, order, unit_of)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    reference = single_device(make("mlp3"), 1)
    grads = pm.full_grads()
    assert rel_err(loss, reference.losses[0]) < 1e-9
    assert max(rel_err(grads[name], each) for name, each in reference.grads.items()) < 1e-9
    assert pm.verify()
    assert pm.verify(modules={rank: pm.rank_module(rank) for rank in range(2)})
    held = held_in_a_step(pm, make("mlp3"))
    for rank in range(pm.mesh.size):
        check_footprint(pm._programs.running(rank, TRAIN), held[rank])


UNEVEN = "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 F0.4 B0.2 B0.3 B0.4"
HOW: dict[str, tuple[str, sx.Mesh, str, dict[str, Any]]] = {
    "5 iterations of 8 rows": ("mlp3", sx.Mesh(one=1), UNEVEN, {"grad_accumulation": 5}),
    "recompute": ("gpt_fused", sx.Mesh(dp=2), ONE_AHEAD, {"grad_accumulation": 4, "recompute": "layers.*"}),
    "offloaded": ("gpt_fused", sx.Mesh(dp=2), ONE_AHEAD, {"grad_accumulation": 4, "offload": ("activations",)}),
    "tp2": ("gpt_fused", sx.Mesh(tp=2), ONE_AHEAD, {"grad_accumulation": 4}),
}


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("how", HOW)
def test_units_of_any_plan(how: str) -> None:
    name, mesh, order, hints = HOW[how]
    case = make(name)
    pm = plan(case, mesh, **hints)
    put(pm, order)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    reference = single_device(make(name), 1)
    grads = pm.full_grads()
    assert rel_err(loss, reference.losses[0]) < 1e-9
    assert max(rel_err(grads[name], each) for name, each in reference.grads.items()) < 1e-9
    assert pm.verify()
    held = held_in_a_step(pm, make(name))
    for rank in range(pm.mesh.size):
        check_footprint(pm._programs.running(rank, TRAIN), held[rank])


def from_the_chunks_on(steps: Sequence[Node | PlannedLoop]) -> Callable[[Node], str]:
    """The backward begins where logits are made a chunk at a time."""
    begin = next(at for at, step in enumerate(steps) if isinstance(step, PlannedLoop))
    back = {id(node) for node in nodes_of(steps[begin:])}
    return lambda node: "B0" if id(node) in back else "F0"


@pytest.mark.slow
def test_iterations_lie_within_a_unit() -> None:
    torch.manual_seed(0)
    model: nn.Module = Language().double()
    x, y = torch.randint(300, (6, 15)), torch.randint(300, (6, 15))
    y[0, :11] = -100
    specs = {"args.0": "mb dp, -", "inner": "mb dp, -, -", "head": "mb dp, chunk, -"}
    hints = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs=specs)
    mesh = sx.Mesh(dp=2, mb=sx.Loop(3), chunk=sx.Loop(5))
    pm = sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)
    put(pm, "F0.0 F0.1 B0.0 F0.2 B0.1 B0.2", from_the_chunks_on)
    loss = next_tokens(model(x), y)
    loss.backward()
    made = pm(x, y)
    made.backward()
    grads = pm.full_grads()
    assert abs(made.item() - loss.item()) < 1e-12
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (grads[name] - parameter.grad).abs().max() < 1e-12
    assert pm.verify(modules={rank: pm.rank_module(rank) for rank in range(2)})


def test_a_watch_sees_units() -> None:
    case = make("mlp3")
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    with pm.debug_nan():
        loss: Tensor = pm(*case.args, *case.targets)
    assert loss.isfinite()
