"""Whole steps on real ranks, with the optimizer in the program (see :mod:`.workers`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardfx as sx
from tests.plans import MESHES
from tests.reference import check_step
from tests.stepped import KINDS, alone, apart, batches, small_plan
from tests.virtual.test_expert_parallel import layer, routed, squares
from tests.virtual.test_tables import OPTIMIZERS, mean, shop, visits

from .program_workers import WORKERS
from .workers import worker

__all__ = ["WORKERS"]
adagrad = OPTIMIZERS["Adagrad"]


@worker
def steps_like_one_device(mesh: str, zero: str, *kinds: str) -> None:
    """Losses, and the parameters behind five steps, with clipped gradients."""
    for kind in kinds:
        losses, params, _ = alone(KINDS[kind], 5, 0.1)
        pm = small_plan(KINDS[kind], MESHES[mesh], zero=int(zero), clip_grad_norm=0.1)
        assert apart(pm, losses, params) < 1e-9, kind
        assert pm.verify(), (kind, pm.verify().why)


@worker
def experts_get_more_room() -> None:
    """Calls and whole steps that find too little room on some rank, and run again on all."""
    pm, alone = layer(1.0, virtual=None)
    stepped, trained = layer(1.0, virtual=None, optimizer=torch.optim.AdamW)
    optimizer = torch.optim.AdamW(trained.parameters())
    for seed in range(4):
        pm.zero_grad()
        alone.zero_grad()
        check_step(pm, alone, squares, routed(seed), bound=1e-12, proven=not seed)
        optimizer.zero_grad()
        loss = squares(trained(*routed(seed)))
        loss.backward()
        optimizer.step()
        assert float(stepped.step(*routed(seed))) == pytest.approx(float(loss), abs=1e-12)
    params, state = dict(trained.named_parameters()), stepped.full_state_dict()
    assert all(torch.allclose(state[name], value, atol=1e-12) for name, value in params.items())
    assert any("twice the mean" in each for each in stepped.report().warnings)


@worker
def ids_go_to_the_ranks_of_their_rows() -> None:
    """Steps of sparse tables, one of which runs again on all ranks; and an id beyond the table, an error on all."""
    pm, alone = shop(sx.Mesh(dp=2), "dp", "dp", virtual=None, optimizer=adagrad)
    optimizer = adagrad(alone.parameters())
    for seed in range(3):
        given = visits(seed)
        given[1].remainder_(400 if seed == 2 else 800)
        optimizer.zero_grad()
        loss = mean(alone(*given))
        loss.backward()
        optimizer.step()
        assert float(pm.step(*given)) == pytest.approx(float(loss), abs=1e-12)
    state = pm.full_state_dict()
    assert all(torch.allclose(state[name], value, atol=1e-12) for name, value in alone.state_dict().items())
    assert any("room for" in each for each in pm.report().warnings)
    given[1][-1, 0] = 800
    with pytest.raises(sx.Error, match="out of range"):
        pm.step(*given)


@worker
def states_are_saved_and_loaded(folder: str) -> None:
    """By torch.distributed.checkpoint in shards; whole, onto another plan; and training goes on as if nothing was."""
    losses, params, _ = alone(KINDS["AdamW"], 4)
    first, same, other = (small_plan(KINDS["AdamW"], MESHES["dp2"], zero=zero) for zero in (3, 3, 1))
    for x, y in batches(2):
        first.step(x, y)
    dcp.save({"optimizer": first.optimizer.state_dict()["state"]}, checkpoint_id=folder)
    same.step(*batches(1)[0])
    held = same.optimizer.state_dict()
    dcp.load({"optimizer": held["state"]}, checkpoint_id=folder)
    other.optimizer.load_full_state_dict(first.optimizer.full_state_dict())
    for pm in (same, other):
        pm.load_full_state_dict(first.full_state_dict())
        for (x, y), loss in list(zip(batches(4), losses, strict=True))[2:]:
            assert float(pm.step(x, y)) == pytest.approx(loss, abs=1e-12)
        assert all(torch.allclose(pm.full_state_dict()[name], value, atol=1e-12) for name, value in params.items())
