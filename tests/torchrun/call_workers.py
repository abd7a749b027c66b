"""Ranks that make the same call, or do not (see :mod:`.workers`)."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from tests.reference import rel_err

from .workers import WORKERS, worker

__all__ = ["WORKERS"]

BATCH = {"args.0": "dp, -", "targets.0": "dp, -"}


def planned(virtual: bool | None = None, **mesh: int) -> tuple[nn.Module, sx.ParallelModule, Tensor, Tensor]:
    """A model, its plan on two ranks, and the captured batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.0), nn.Linear(8, 4)).double()
    x, y = torch.randn(8, 6).double(), torch.randn(8, 4).double()
    specs = BATCH if "dp" in mesh else {"0.weight": "tp, -"}
    pm = sx.parallelize(
        model, sx.Mesh(**mesh), sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=specs), virtual=virtual
    )
    return deepcopy(model), pm, x, y


def forms(pm: sx.ParallelModule, x: Tensor, y: Tensor) -> None:
    """See the call signatures that ranks will see."""
    pm(x[:5], y[:5])
    pm.eval()
    with torch.no_grad():
        pm(x[:5])
    pm.train()


def prepare() -> None:
    """Make the plans that the ranks inherit."""
    for mesh in ({"dp": 2}, {"tp": 2}):
        _, pm, x, y = planned(True, **mesh)
        forms(pm, x, y)


def error(call: Callable[[], object]) -> str:
    """What a call raises."""
    try:
        call()
    except sx.Error as error:
        return str(error)
    raise AssertionError("no error")


@worker
def other_forms_are_right_on_all_ranks() -> None:
    """The last, smaller batch of an epoch, and evaluation, as one device computes them; also after a mistake."""
    for mesh in ({"dp": 2}, {"tp": 2}):
        model, pm, x, y = planned(**mesh)
        for rows in (8, 5, 8, 5):
            model.zero_grad(), pm.zero_grad()
            loss, expected = pm(x[:rows], y[:rows]), F.mse_loss(model(x[:rows]), y[:rows])
            loss.backward(), expected.backward()
            assert rel_err(loss, expected) < 1e-12
            grads = pm.full_grads()
            assert all(rel_err(grads[name], p.grad) < 1e-12 for name, p in model.named_parameters())
        pm.eval(), model.eval()
        with torch.no_grad():
            assert rel_err(pm(x[:5]), model(x[:5])) < 1e-12


@worker
def ranks_that_differ_are_told_both_sides() -> None:
    """Each mistake is an error on all ranks, soon, and they go on."""
    rank = dist.get_rank()
    model, pm, x, y = planned(dp=2)

    def evaluate() -> object:
        with torch.no_grad():
            return pm(x, y)

    started = time.monotonic()
    text = error(evaluate if rank == 0 else lambda: pm(x, y))
    assert "the ranks do not make the same call" in text, text
    assert re.search(r"rank 0: runs: the loss alone; .*\n +rank 1: runs: a training step; ", text), text
    rows = 8 if rank == 0 else 5
    text = error(lambda: pm(x[:rows], y[:rows]))
    assert "rank 0: args.0: (8, 6) float64; targets.0: (8, 4) float64" in text, text
    assert "rank 1: args.0: (5, 6) float64; targets.0: (5, 4) float64" in text, text
    text = error(pm.full_state_dict if rank == 0 else lambda: pm(x, y))
    assert "rank 0: runs: full_state_dict()" in text and "rank 1: runs: a training step" in text, text
    pm.train(rank == 0)
    text = error(lambda: pm(x, y))
    assert "training mode of the model: yes" in text and "training mode of the model: no" in text, text
    pm.train()
    text = error(lambda: pm(x, y) if rank == 0 else pm(x, y, 3))
    theirs = "the inputs are not those that the model was captured with"
    assert theirs in text and (rank == 1 or text.startswith("a call failed on another rank")), text
    part = slice(4 * rank, 4 * rank + 4)
    text = error(lambda: pm(x, y) if rank == 0 else pm(x[part], y[part]))
    assert "rank 0: inputs: the global batch" in text and "rank 1: inputs: this rank's own part" in text, text
    assert time.monotonic() - started < 5
    for _ in range(2):
        assert rel_err(pm(x[part], y[part]), F.mse_loss(model(x), y)) < 1e-12


@worker
def own_batches_in_the_shape_of_the_whole_are_noticed() -> None:
    """As DDP has them, at the first step."""
    rank = dist.get_rank()
    for mesh in ({"dp": 2}, {"tp": 2}):
        model, pm, x, y = planned(**mesh)
        text = error(partial(pm, x + rank, y))
        assert "ranks pass different batches as the same one" in text and "pm(...), 'args.0'" in text, text
        assert re.search(r"rank 0: content: (\w{8})\n +rank 1: content: (?!\1)\w{8}\n", text), text
        assert f"its own part of it, {(4, 6) if 'dp' in mesh else (8, 6)}" in text, text
        assert rel_err(pm(x, y), F.mse_loss(model(x), y)) < 1e-12


PREPARED = (
    "other_forms_are_right_on_all_ranks",
    "ranks_that_differ_are_told_both_sides",
    "own_batches_in_the_shape_of_the_whole_are_noticed",
)


@worker
def shards_are_this_ranks() -> None:
    """Rank 0's file of shards is not loaded by all, unless all hold the same."""
    for mesh, refused in (({"dp": 2}, False), ({"tp": 2}, True)):
        model, pm, *_ = planned(**mesh)
        state = io.BytesIO()
        torch.save(pm.state_dict(), state)
        sent = [state.getvalue()]
        dist.broadcast_object_list(sent, 0)
        loaded = torch.load(io.BytesIO(sent[0]), weights_only=False)
        if refused and dist.get_rank() == 1:
            said = error(lambda pm=pm, loaded=loaded: pm.load_state_dict(loaded))
            assert "the shard of another rank" in said
            said = error(lambda pm=pm, loaded=loaded: pm.load_state_dict({**pm.state_dict(), **loaded}))
            assert "the shard of another rank" in said
        else:
            pm.load_state_dict(loaded)
            pm.load_state_dict({**pm.state_dict(), **loaded})
        pm.load_state_dict(torch.load(state.seek(0) or state, weights_only=False))
        assert rel_err(pm.full_state_dict()["0.weight"], model[0].weight) == 0


@worker
def optimizers_and_results_go_on() -> None:
    """An optimizer of before, and a loss outside, on real ranks as on one device."""
    for mesh in ({"dp": 2}, {"tp": 2}):
        model, _, x, y = planned(True, **mesh)
        alone = deepcopy(model)
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, alone)]
        for each, optimizer in zip((model, alone), optimizers, strict=True):
            F.mse_loss(each(x), y).backward()
            optimizer.step()
        specs = BATCH if "dp" in mesh else {"0.weight": "tp, -"}
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=specs)
        pm = sx.parallelize(model, sx.Mesh(**mesh), hints, optimizer=optimizers[0])
        for _ in range(2):
            for each, optimizer in zip((pm, alone), optimizers, strict=True):
                optimizer.zero_grad()
                F.mse_loss(each(x).sin(), y).backward()
                optimizer.step()
        state = pm.full_state_dict()
        assert all(rel_err(state[name], tensor) < 1e-12 for name, tensor in alone.state_dict().items())
        wrapped = partial(nn.parallel.DistributedDataParallel, pm)
        assert "put into a DistributedDataParallel" in error(wrapped)
        if "dp" in mesh:
            rank = dist.get_rank()
            out = pm(x[rank * 4 : rank * 4 + 4])
            assert "this rank's part" in error(out.sum().backward)
        assert "the model that it was made of was not" in error(model.state_dict)


@worker
def inputs_are_compared_at_every_call() -> None:
    """Where that is asked for; otherwise on calls 1, 2, 4, 8, ..."""
    torch.manual_seed(0)
    x, y = torch.randn(800, 6).double(), torch.randn(800, 4).double()
    other = x.clone()
    other[1] += dist.get_rank()
    for always in (True, False):
        model = nn.Sequential(nn.Linear(6, 4)).double()
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs={"0.weight": "tp, -"}, check_inputs=always)
        pm = sx.parallelize(model, sx.Mesh(tp=2), hints)
        pm(x, y), pm(x, y)
        if always:
            assert "ranks pass different batches" in error(lambda pm=pm: pm(other, y))
        else:
            pm(other, y)
        assert "ranks pass different batches" in error(lambda pm=pm: pm(other, y))


@worker
def inputs_of_the_first_rank_are_taken() -> None:
    """Of what each rank draws for itself: where no axis shards it, and where one of two does."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    x, y, noise = torch.randn(8, 6).double(), torch.randn(8, 4).double(), torch.randn(size, 8, 6).double()
    own = [(x + n).chunk(size)[i] for i, n in enumerate(noise)]
    for mesh, mine, taken in (
        (sx.Mesh(tp=size), x + noise[rank], x + noise[0]),
        (sx.Mesh(dp=size), x + noise[rank], x + noise[0]),  # the whole batch, on each rank
        (sx.Mesh(dp=size), own[rank], torch.cat(own)),  # parts are not the same, and stay
    ):
        model = nn.Sequential(nn.Linear(6, 4)).double()
        sharding = {"args.0": "dp, -"} if mesh.axes[0].name == "dp" else {"0.weight": "tp, -"}
        hints = sx.Hints((x,), loss=F.mse_loss, targets=(y,), specs=sharding, check_inputs="broadcast")
        pm, targets = sx.parallelize(model, mesh, hints), y if len(mine) == 8 else y.chunk(size)[rank]
        before, leaf = mine.clone(), mine.clone().requires_grad_()
        for _ in range(3):
            assert rel_err(pm(mine, targets), F.mse_loss(model(taken), y)) < 1e-12
        assert torch.equal(mine, before)
        if len(mine) == 8:
            assert rel_err(pm(mine), model(taken)) < 1e-12
            pm(leaf, y).backward()
            assert leaf.grad is not None and leaf.grad.shape == leaf.shape
