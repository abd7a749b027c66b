"""A step waits for no device: from the fifth step on the host reads no more than its own random generator."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import shardfx as sx
from tests.on_gpu import without_synchronisation
from tests.plans import plan
from tests.zoo import make

READS = ("item", "tolist", "numpy", "__int__", "__float__", "__bool__", "__index__")
WARM, STEPS, MOST = 4, 3, 2
MODELS = ("dropout_mlp", "hf_gpt2_dropout", "moe_mixtral")
PROGRAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bfloat16": {"clip_grad_norm": 1.0, "mixed_precision": torch.bfloat16},
    "scaled": {
        "clip_grad_norm": 1.0,
        "mixed_precision": sx.MixedPrecision(torch.float16, output_dtype=torch.float32, loss_scale=sx.LossScale()),
    },
}


def planned(name: str, device: str = "cpu", **hints: Any) -> sx.ParallelModule:
    return plan(make(name), sx.Mesh(dp=2, tp=2), device=device, **hints)


def batch_of(name: str, device: str = "cpu") -> list[Tensor]:
    case = make(name)
    return [each.to(device) for each in (*case.args, *case.kwargs.values(), *case.targets)]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


@contextmanager
def reads(patch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where the host reads a tensor, within."""
    found: list[str] = []

    def noted(name: str) -> Callable[..., Any]:
        plain = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            found.append("".join(traceback.format_stack(limit=4)[:-1]))
            return plain(tensor, *args, **kwargs)

        return read

    with patch.context() as patched:
        for name in READS:
            patched.setattr(Tensor, name, noted(name))
        yield found


def steps(pm: sx.ParallelModule, batch: list[Tensor]) -> Iterator[Callable[[], Any]]:
    """One step after the other, each with a rate of its own."""
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(pm.optimizer, 100)
    for _ in range(WARM + STEPS):
        yield lambda: pm.step(*batch)
        schedule.step()


def check_reads(found: list[str], count: int) -> None:
    assert len(found) <= MOST * count, "\n".join(dict.fromkeys(found))


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_host_reads_of_a_step_with_its_update(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pm = planned(name, optimizer=adamw, **PROGRAMS["scaled"])
    found: list[str] = []
    for number, step in enumerate(steps(pm, batch_of(name))):
        with reads(monkeypatch) as read:
            step()
        found += read if number >= WARM else []
    check_reads(found, STEPS)
    for rank in range(4):
        code = pm.rank_module(rank).code
        assert ".item(" not in code and ".tolist(" not in code


@pytest.mark.long
def test_host_reads_of_a_call_and_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the optimizer reads is its own."""
    name = "hf_gpt2_dropout"
    pm = planned(name)
    optimizer, found = adamw(pm.parameters()), []
    for number in range(WARM + STEPS):
        with reads(monkeypatch) as read:
            loss = pm(*batch_of(name))
            loss.backward()
            pm.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        found += read if number >= WARM else []
    check_reads(found, STEPS)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "program", "device"),
    [(MODELS[0], "plain", "cuda"), (MODELS[1], "scaled", "cpu"), (MODELS[2], "bfloat16", "cpu")],
)
def test_a_step_on_a_gpu_does_not_synchronise(name: str, program: str, device: str) -> None:
    """Also of a batch on the CPU."""
    pm, batch = planned(name, "cuda", optimizer=adamw, **PROGRAMS[program]), batch_of(name, device)
    for number, step in enumerate(steps(pm, batch)):
        with without_synchronisation() if number >= WARM else nullcontext():
            loss = step()
    assert loss.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "compiled"), [("moe_mixtral", False), ("dropout_mlp", True)])
def test_a_call_on_a_gpu_does_not_synchronise(name: str, compiled: bool) -> None:
    pm, batch = planned(name, "cuda", mixed_precision=torch.bfloat16), batch_of(name, "cuda")
    if compiled:
        pm.compile()
    for number in range(WARM + STEPS):
        with without_synchronisation() if number >= WARM else nullcontext():
            loss = pm(*batch)
            loss.backward()
            pm.clip_grad_norm_(1.0)
        pm.zero_grad()
    assert loss.isfinite()


@pytest.mark.gpu
@pytest.mark.parametrize("pinned", [False, True])
def test_a_batch_may_be_written_over_as_soon_as_a_call_returns(pinned: bool) -> None:
    """Also while the GPU has yet to begin with it."""
    pm, (ones, _) = planned("dropout_mlp", "cuda").eval(), batch_of("dropout_mlp", "cuda")
    x = torch.ones(ones.shape, dtype=ones.dtype, pin_memory=pinned)
    with torch.no_grad():
        wanted = pm(ones.fill_(1))
        torch.cuda._sleep(10**8)
        found = pm(x)
        x.zero_()
        torch.testing.assert_close(found, wanted)
