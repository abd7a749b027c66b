"""What one rank's program really holds while it runs: storages of real tensors, looked at behind every call.

The rank runs alone, as virtual ranks run it (a coroutine that yields at its collectives); what its group would give it
has the right shape, and no content that matters.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.ir.graph import InputKind
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.rendezvous import Request
from shardfx.runtime.virtual.coroutine import as_coroutine


def live_bytes(program: RankProgram) -> dict[str, int]:
    """The bytes that a rank's program holds behind each call, by the call's name.

    Inputs are not counted. A storage counts once, however many of the program's variables are views of it.
    """
    inputs = list(_inputs(program))
    theirs = {tensor.untyped_storage()._cdata for tensor in inputs}
    found: dict[str, int] = {}

    def watch(node: fx.Node, result: Any, operands: tuple[Any, ...]) -> None:
        variables = sys._getframe(1).f_locals.values()
        storages = [t.untyped_storage() for t in tree_leaves(list(variables)) if isinstance(t, Tensor)]
        found[node.name] = sum({s._cdata: s.nbytes() for s in storages if s._cdata not in theirs}.values())

    with torch.no_grad():
        running = as_coroutine(program, watch)(*inputs)
        request, given, into = next(running)
        try:
            while True:
                answer = _answer(program.mesh, request, given)
                request, given, into = running.send(answer if into is None else into.copy_(answer.view(into.shape)))
        except StopIteration:
            return found


def _inputs(program: RankProgram) -> Iterator[Tensor]:
    generator, coords = torch.Generator().manual_seed(0), program.mesh.coords(program.rank)
    for each in program.inputs:
        assert each.value.spec is not None
        shape, dtype = each.value.spec.local_shape(each.value.shape, program.mesh, coords), each.value.type.dtype
        if each.kind is InputKind.CONSTANT and each.constant is not None and each.constant.shape == shape:
            yield each.constant
        elif dtype.is_floating_point:
            yield torch.rand(shape, dtype=dtype, generator=generator)
        else:
            yield torch.zeros(shape, dtype=dtype)


def _answer(mesh: sx.Mesh, request: Request, given: Tensor) -> Tensor:
    n = mesh.extent(mesh.group_axes(request.group))
    if request.op == "all_reduce":
        return given.clone()
    if request.op == "all_gather_into_tensor":
        return torch.cat([given if given.dim() else given.reshape(1)] * n)
    if request.op == "reduce_scatter_tensor":
        return given.chunk(n)[0].clone()
    return given.new_zeros((sum(request.args[0]), *given.shape[1:]))
