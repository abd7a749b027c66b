"""What one rank's program really holds while it runs: storages of real tensors, looked at behind every call.

The rank runs alone, as virtual ranks run it (a coroutine that yields at its collectives); what its group would give it
has the right shape, and no content that matters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.ir.graph import InputKind
from shardfx.ir.program.lower import generate
from shardfx.module.parallel_module import TRAIN
from shardfx.runtime.virtual.coroutine import Request, as_generator

c10d = torch.ops._c10d_functional


def live_bytes(pm: sx.ParallelModule, rank: int = 0) -> dict[str, int]:
    """Of a training step of one rank: the bytes that its program holds behind each call, by the call's name.

    Inputs are not counted. A storage counts once, however many of the program's variables are views of it.
    """
    program = generate(pm.after, rank, pm._compiled.context.rules, TRAIN)
    inputs = list(_inputs(pm, rank, program.inputs))
    theirs = {tensor.untyped_storage()._cdata for tensor in inputs}
    found: dict[str, int] = {}

    def watch(node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        variables = sys._getframe(1).f_locals.values()
        storages = [t.untyped_storage() for t in tree_leaves(list(variables)) if isinstance(t, Tensor)]
        found[node.name] = sum({s._cdata: s.nbytes() for s in storages if s._cdata not in theirs}.values())

    with torch.no_grad():
        running = as_generator(program.module, watch)(*inputs)
        request, given = next(running)
        try:
            while True:
                request, given = running.send(_answer(pm.mesh, request, given))
        except StopIteration:
            return found


def _inputs(pm: sx.ParallelModule, rank: int, inputs: Sequence[Any]) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(0)
    for each in inputs:
        assert each.value.spec is not None
        shape = each.value.spec.local_shape(each.value.shape, pm.mesh, pm.mesh.coords(rank))
        dtype = each.value.type.dtype
        if each.kind is InputKind.CONSTANT and each.constant.shape == shape:
            yield each.constant
        elif dtype.is_floating_point:
            yield torch.rand(shape, dtype=dtype, generator=generator)
        else:
            yield torch.zeros(shape, dtype=dtype)


def _answer(mesh: sx.Mesh, request: Request, given: Tensor) -> Tensor:
    n = mesh.extent(mesh.group_axes(request.group))
    if request.op is c10d.all_reduce.default:
        return given.clone()
    if request.op is c10d.all_gather_into_tensor.default:
        return torch.cat([given if given.dim() else given.reshape(1)] * n)
    if request.op is c10d.reduce_scatter_tensor.default:
        return given.chunk(n)[0].clone()
    return given.new_zeros((sum(request.args[0]), *given.shape[1:]))
