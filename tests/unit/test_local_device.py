"""Device placement: which device ranks run on, one that is not there, a process group that does not serve it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardfx as sx
from shardfx.runtime.distributed import groups
from shardfx.runtime.local_device import local_device

X = torch.zeros(4, 8)


NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")


@pytest.mark.parametrize(
    ("asked", "weights", "real", "found"),
    [
        (None, "cpu", False, "cpu"),
        (None, "meta", True, "cpu"),
        (None, "cuda:1", False, "cuda:1"),
        ("cuda", "meta", False, "cuda"),
        ("cuda:1", "meta", False, "cuda:1"),
        ("cuda", "cpu", True, "cuda:3"),
        (None, "cuda:0", True, "cuda:3"),
        ("cuda:2", "cpu", True, "cuda:2"),
        ("cpu", "cuda:0", True, "cpu"),
    ],
)
def test_device_follows_hint_then_weights_then_local_rank(
    asked: str | None, weights: str, real: bool, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert local_device(asked, torch.device(weights), real) == torch.device(found)


@NO_GPU
def test_device_without_a_gpu_is_an_error_before_planning() -> None:
    with pytest.raises((AssertionError, RuntimeError), match=r"Torch not compiled|Found no NVIDIA"):
        sx.parallelize(nn.Linear(8, 8), sx.Mesh(dp=2), sx.Hints((X,), device="cuda"), virtual=True)


@NO_GPU
@pytest.mark.long
def test_meta_model_is_planned_for_a_gpu_without_one() -> None:
    hints = sx.Hints((X,), device="cuda", machine="h100-dgx", specs={"args.0": "dp, -"})
    pm = sx.parallelize(nn.Linear(8, 8, device="meta"), sx.Mesh(dp=2), hints, virtual=True)
    assert pm.report().time.total == pytest.approx(pm.timeline().step) and pm.memory().peak
    with pytest.raises((AssertionError, RuntimeError), match=r"Torch not compiled|Found no NVIDIA"):
        pm.load_full_state_dict(nn.Linear(8, 8).state_dict())


# ---- process groups


@pytest.fixture
def one_on_gloo() -> Iterator[None]:
    """A job of one process on gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("one_on_gloo")
def test_gloo_is_refused_for_cuda_tensors() -> None:
    assert groups.backends() == {"cpu": "gloo", "cuda": "gloo"}
    groups.check_backend("cpu")
    with pytest.raises(sx.Error, match=r"cannot serve a plan on cuda(.|\n)*init_process_group\('nccl'\)"):
        groups.check_backend("cuda")


def test_shared_memory_is_used_where_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for backend, asks in (("cpu:shm", True), ("shm", True), ("gloo", False), ("cpu:gloo", False)):
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        try:
            groups.check_backend("cpu")
            assert groups.asks_for_shm() == asks
            with pytest.raises(sx.Error, match="cannot serve a plan on cuda"):
                groups.check_backend("cuda")
        finally:
            dist.destroy_process_group()
    joined: list[str] = []
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: joined.append(backend))
    monkeypatch.setattr(groups, "check_backend", lambda kind: None)
    for name, here in (("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, here)
        groups.initialise(torch.device("cpu"))
    assert joined == ["gloo", "shm", "gloo"]


def test_one_process_is_one_rank_or_all_virtual_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    assert groups.launched(1) and not groups.launched(2)
    monkeypatch.delenv("MASTER_PORT")
    assert not groups.launched(1)
    with pytest.raises(sx.Error, match="no rank of a job any more"):
        groups.the_cpu_group()


# ---- with a GPU


@pytest.mark.gpu
@pytest.mark.usefixtures("one_on_gloo")
def test_gloo_with_a_cuda_model_is_an_error_at_planning() -> None:
    with pytest.raises(sx.Error, match=r"cpu:gloo,cuda:nccl"):
        sx.parallelize(nn.Linear(8, 8, device="cuda"), sx.Mesh(dp=1), sx.Hints((X,)))
