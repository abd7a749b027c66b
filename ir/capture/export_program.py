"""Export of one program, with its backward written beside it, as a graph.

Ops with a kernel and a gradient of their own are traced as these, as eager torch runs them, and not by the Python form
that torch has for its compilers (that of ``multilabel_margin_loss`` counts padding as targets, and that of ``lstm``
forgets dropout between layers, in 2.13). So ``F.interpolate`` is one op, and no lookups and products.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import _C
from torch._decomp import decomposition_table

from shardfx.ir.builder import Call
from shardfx.ir.graph import Graph, Value
from shardfx.ir.mesh import Mesh

from .abstract_tensors import OutcomeCache
from .canonical.batch_norms import BatchParts
from .canonical.decompositions import decompositions
from .canonical.export_rewrites import rewrite_exported
from .convert import ProgramNames, convert
from .data_dependent import with_real_tensors
from .eager_comparison import Draws
from .frontend.autograd_in_forward import OwnGradients, transforms_refused
from .frontend.capture_errors import reject_unknown_shapes
from .frontend.model_preparation import without_overlap
from .frontend.routed_experts import experts_routed
from .joint_graph import joint_graph
from .model_and_loss import ModelAndLoss


def write_graph(
    program: ModelAndLoss,
    tensors: tuple[torch.Tensor, ...],
    *,
    mesh: Mesh,
    names: ProgramNames,
    batch_parts: BatchParts,
    outcomes: OutcomeCache | None = None,
) -> tuple[Graph, Draws]:
    """The graph, and which of its values are drawn."""
    own = OwnGradients()
    with own.noting():
        exported = exported_of(program, tensors)
    reject_unknown_shapes(exported, program.guard)
    names = replace(names, guards=program.results.guards)
    rewrite_exported(exported, batch_parts)
    own.restore(exported)
    drawn: dict[Value, Call] = {}
    with ExitStack() as stack, own_kernels():
        return convert(_joint(exported, tensors, outcomes, stack), mesh, names, drawn), drawn


def exported_of(program: ModelAndLoss, tensors: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    """The program as torch exports it."""
    known = len(program.assigned.names)
    inputs = tuple(map(without_overlap, tensors)) if program.guard else tensors
    with with_real_tensors() if program.guard else nullcontext(), transforms_refused(), experts_routed(program.model):
        program.exported = True
        try:
            made: torch.fx.GraphModule = torch.export.export(program, inputs, strict=False).module(check_guards=False)
        finally:
            program.exported = False
    return made if len(program.assigned.names) == known else exported_of(program, tensors)


def _joint(
    exported: torch.fx.GraphModule, tensors: tuple[torch.Tensor, ...], outcomes: OutcomeCache | None, stack: ExitStack
) -> torch.fx.GraphModule:
    """The forward and the backward of an exported program, functional."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # which imports all of torch._dynamo

    table = decompositions()
    try:
        return joint_graph(exported, tensors, table, outcomes)
    except Exception:  # AOTAutograd takes more, or raises the error that a user should see
        made = aot_export_joint_with_descriptors(
            stack, exported, tensors, decompositions=table, _record_nn_module_stack=True
        )
    joint: torch.fx.GraphModule = made.graph_module
    return joint


OF_PYTHON = AUTOGRAD, COMPOSED = _C.DispatchKey.Autograd, _C.DispatchKey.CompositeImplicitAutograd
BY_KERNEL = """upsample_nearest1d upsample_nearest2d upsample_nearest3d
_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d
_upsample_bilinear2d_aa _upsample_bicubic2d_aa lstm gru rnn_tanh rnn_relu""".split()
"""Ops that are traced by their kernels though these are composite, too, or have composite forms in Python."""


@contextmanager
def own_kernels() -> Iterator[None]:
    """Within, torch's Python dispatcher calls kernels where ops have their own kernel and gradient."""
    forms = [
        (op, op.py_kernels.pop(key), key) for op in _with_other_forms() for key in OF_PYTHON if key in op.py_kernels
    ]
    for op, *_ in forms:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, form, key in forms:
            op.py_kernels[key] = form
            op._dispatch_cache.clear()


@cache
def _with_other_forms() -> tuple[Any, ...]:
    packets = [getattr(torch.ops.aten, name) for name in BY_KERNEL]
    composed = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    return *composed, *(op for op in decomposition_table if isinstance(op, torch._ops.OpOverload) and _is_one(op))


def _is_one(op: torch._ops.OpOverload) -> bool:
    of_python = AUTOGRAD in op.py_kernels and COMPOSED not in op.py_kernels
    of_its_own = all(
        _C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key) for key in ("AutogradCPU", "CPU")
    )
    return of_python and of_its_own and not op._can_decompose()
