"""Process groups by the names that programs use.

A program calls ``all_reduce(x, 'sum', 'dp2.tp2/tp@0')``: :meth:`Mesh.group_name` made that name, and here it gets its
process group. Every rank makes every group, in the same order, its own and the others', as ``new_group`` demands.
Groups remain registered with torch until ``destroy_process_group``, so a second plan on the same mesh reuses them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _resolve_process_group, _unregister_process_group
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops.table import OwnOp

from . import shm

Axes = tuple[str, ...]
JOB = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched(ranks: int) -> bool:
    """Whether this process belongs to a job, one that is initialised, or was started by ``torchrun``.

    A job of one process is one rank of a mesh of one; of a larger mesh (``ranks``) it has all, as virtual ones.
    """
    if dist.is_initialized():
        return True
    size, rank = os.environ.get("WORLD_SIZE"), os.environ.get("RANK")
    alone = size == "1" and (ranks > 1 or any(name not in os.environ for name in JOB))
    return rank is not None and size is not None and not alone


def is_dry_run() -> bool:
    """Whether this process runs one rank alone, on torch's ``fake`` process group, without its peers' data."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def by_stream(device: torch.device) -> bool:
    """Whether communication is asynchronous on streams of the process groups, so that only a stream waits for it."""
    return device.type != "cpu" or is_dry_run()


def backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """The backends of a process group (by default of all ranks), by the type of device that each serves."""
    return dict(pair.split(":") for pair in dist.get_backend_config(group).split(","))


def check_size(mesh: Mesh) -> None:
    """Check that the processes of this job are the ranks of ``mesh``.

    Raises:
        Error: the job has another number of processes than the mesh has ranks.
    """
    world = dist.get_world_size()
    if world != mesh.size:
        raise Error(
            "the mesh has another number of ranks than this job has processes",
            where=f"rank {dist.get_rank()}; parallelize(...)",
            expected=f"a mesh of {world} ranks",
            got=f"{mesh}, {mesh.size} ranks",
            remedy=f"start {mesh.size} processes, or parallelize(..., virtual=True) for ranks within each process",
        )
    if is_dry_run():
        say = "a dry run: rank %d alone, so losses, gradients and full state dicts are no numbers"
        logging.getLogger("shardfx").warning(say, dist.get_rank())


def initialise(device: torch.device) -> None:
    """Join the job that ``torchrun`` started, unless that is done already, and set ``device`` as the current device.

    Raises:
        Error: the process group does not serve the device.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        alone = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
        backend = "nccl" if device.type == "cuda" else shm.NAME if alone else "gloo"
        dist.init_process_group(backend, timeout=timedelta(minutes=10))
    check_backend(device.type)


def asks_for_shm() -> bool:
    """Whether groups of programs on one machine use shared memory, as the group of all ranks does."""
    return set(backends().values()) == {shm.NAME}


def check_backend(kind: str) -> None:
    """Check that the process group of all ranks serves the type of device. Gloo takes CUDA tensors and crashes on some
    collectives of them; of torch's groups with "shm" it is the only backend.

    Raises:
        Error: it does not.
    """
    backend = backends().get(kind, "")
    mixed = shm.NAME in backends().values() and len(backends()) > 1
    if backend and not mixed and (backend != "gloo" or kind == "cpu"):
        return
    own = "gloo" if kind == "cpu" else "nccl"
    raise Error(
        f"the process group cannot serve a plan on {kind}",
        where="parallelize(...)",
        expected=f"the {own} backend for {kind} tensors",
        got=f"torch.distributed.init_process_group({dist.get_backend_config()!r})",
        remedy=f"torch.distributed.init_process_group({own!r}), or {'cpu:gloo,cuda:nccl'!r}; or Hints(device=...)",
    )


def axes_of(graph: Graph) -> list[Axes]:
    """The distinct sets of rank axes over which a graph communicates, in an order that is the same on all ranks."""
    over = {tuple(n.kwargs["axes"]) for n in graph.nodes if isinstance(n.op, OwnOp) and n.kwargs.get("axes")}
    return sorted(axes for axes in over if not any(graph.mesh[axis].loop for axis in axes))


def make_groups(mesh: Mesh, axes: Iterable[Sequence[str]], suffix: str = "") -> None:
    """Make the groups of ``mesh`` over each of these sets of axes, unless they are there. All ranks call it alike.

    Each set has groups of its own: on NCCL, collectives of one group follow one another on its stream, and those of
    several go on side by side. ``suffix`` names further groups of the same ranks.
    """
    for each in axes:
        names = {mesh.group_name(rank, each) + suffix: mesh.group(rank, each) for rank in range(mesh.size)}
        mine = mesh.group_name(dist.get_rank(), each) + suffix
        if find_group(mine) is not None:
            continue
        backend = shm.NAME if asks_for_shm() else None
        for name, ranks in names.items():
            ordered = list(ranks) == sorted(ranks)  # torch sorts them unless told otherwise
            made: dist.ProcessGroup = dist.new_group(list(ranks), _timeout(), backend, sort_ranks=ordered)
            if dist.get_rank() in ranks:
                _register(name, made)


def share_memory() -> list[bool]:
    """For each group of programs that was made, whether it uses shared memory: the same on all ranks."""
    groups = [group for name, group in _made.items() if name != CPU_GROUP and group.size() > 1]
    return [isinstance(group, shm.ShmGroup) for group in groups]


_made: dict[str, dist.ProcessGroup] = {}
CPU_GROUP = "shardfx/cpu"
"""The group of all ranks on the CPU, for metadata that no device has to wait for."""


def _register(name: str, made: dist.ProcessGroup) -> None:
    """Register a group under a name that programs use."""
    _register_process_group(name, made)  # type: ignore[arg-type]
    _made[name] = made


def make_cpu_group() -> None:
    """Make the group of all ranks on gloo, unless it is there. All ranks call it alike."""
    if find_group(CPU_GROUP) is None:
        backend = shm.NAME if asks_for_shm() else "gloo"
        _register(CPU_GROUP, dist.new_group(backend=backend, timeout=_timeout()))


def the_cpu_group() -> dist.ProcessGroup:
    """The CPU group of all ranks.

    Raises:
        Error: a rank failed, and this one left its groups; or the job is over.
    """
    made = find_group(CPU_GROUP) if dist.is_initialized() else None
    if made is None:
        raise Error(
            "this process is no rank of a job any more",
            where="a call that all ranks make together",
            expected="the process group that the model was parallelized in",
            got="one that was destroyed, or that this rank left when a call ended all ranks",
            remedy="start the job again from its last checkpoint; torch.distributed.destroy_process_group() comes "
            "after the last call of all ranks",
        )
    return made


def leave_groups() -> None:
    """Abort all groups that were made here: ranks that wait in one are ended at once, before any time-out."""
    for name, made in list(_made.items()):
        del _made[name]
        if find_group(name) is made:
            _unregister_process_group(name)  # type: ignore[arg-type]
        with suppress(RuntimeError, ValueError, AssertionError):  # the job is over, and the group with it
            dist.destroy_process_group(made)


def device_mesh(mesh: Mesh, device_type: str, axes: Sequence[str]) -> DeviceMesh:
    """The torch ``DeviceMesh`` of a mesh, or this rank's submesh along some axes: one for all plans of a job, as it
    makes process groups of its own."""
    key = mesh, device_type, dist.group.WORLD
    made = _device_meshes[key] = _device_meshes.get(key) or mesh.to_device_mesh(device_type)
    return made if len(axes) == len(mesh.space) else made[tuple(axes)]


_device_meshes: dict[Any, DeviceMesh] = {}


def find_group(name: str) -> dist.ProcessGroup | None:
    """The process group of that name on this rank; None if it was not made."""
    try:
        return _resolve_process_group(name)  # type: ignore[arg-type]
    except (RuntimeError, ValueError):
        return None


def _timeout() -> timedelta:
    """The time-out of the job's own group; other groups have 30 minutes unless one is passed."""
    world: Any = dist.group.WORLD
    options = getattr(world._get_backend(world._device_types[0]), "options", None)
    return getattr(options, "_timeout", default_pg_timeout)
