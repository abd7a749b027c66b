"""One program, exported, with its backward written beside it, as a graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from shardfx.ir.builder import Call
from shardfx.ir.graph import Graph, Value, Where
from shardfx.ir.mesh import Mesh

from .compared.both_runs import Draws
from .convert import Names, convert
from .decisions import with_numbers
from .decomposed import decompositions
from .forms.factored import lay_row_by_row
from .forms.parts_of_batch import BatchParts, normalise_by_parts
from .forms.wide_statistics import take_wide_statistics
from .intake.explained import reject_unknown_shapes
from .intake.given import each_in_its_place
from .intake.own_gradients import OwnGradients
from .intake.surroundings import Surroundings
from .intake.transforms import transforms_refused
from .joint.chosen_gradients import write_all_choices
from .joint.joint_graph import joint_graph
from .joint.own_kernels import own_kernels
from .kept_whole import keep_whole
from .model_and_loss import ModelAndLoss
from .named.left_as_found import Found, left_as_found
from .shells import Outcomes


def write_graph(
    program: ModelAndLoss,
    tensors: tuple[torch.Tensor, ...],
    *,
    mesh: Mesh,
    names: Names,
    batch_parts: BatchParts,
    outcomes: Outcomes | None = None,
    as_torch: Collection[Any] = (),
) -> tuple[Graph, Draws]:
    """The graph, and which of its values are drawn; ``as_torch`` are ops that torch's own kernels take apart."""
    own = OwnGradients()
    with own.noting():
        exported = exported_of(program, tensors)
    reject_unknown_shapes(exported, program.guard)
    names = replace(names, guards=program.results.guards)
    keep_whole(exported, as_torch)
    write_all_choices(exported)
    if batch_parts.count > 1:
        normalise_by_parts(exported, batch_parts)
    take_wide_statistics(exported)
    lay_row_by_row(exported)
    own.restore(exported)
    drawn: dict[Value, Call] = {}
    with ExitStack() as stack, own_kernels():
        return convert(_joint(exported, tensors, outcomes, stack), mesh, names, drawn), drawn


def exported_of(program: ModelAndLoss, tensors: tuple[torch.Tensor, ...]) -> torch.fx.GraphModule:
    """What torch exports of a program, which leaves nothing in what the model's code keeps."""
    around, known = Surroundings(program.model, program.loss), len(program.assigned.names)
    given = tuple(map(each_in_its_place, tensors)) if program.guard else tensors
    with with_numbers() if program.guard else nullcontext(), left_as_found(around), transforms_refused():
        program.exported, program.found = True, partial(Found, around)  # torch itself puts some of it back
        try:
            made: torch.fx.GraphModule = torch.export.export(program, given, strict=False).module(check_guards=False)
        finally:
            program.exported, program.found = False, None
    return made if len(program.assigned.names) == known else exported_of(program, tensors)


def names_of_one(given: Sequence[torch.Tensor]) -> Names:
    """The names of a program of some tensors and a loss."""
    return Names(tuple(f"args.{number}" for number in range(len(given))), {}, Where("loss"))


def _joint(
    exported: torch.fx.GraphModule, tensors: tuple[torch.Tensor, ...], outcomes: Outcomes | None, stack: ExitStack
) -> torch.fx.GraphModule:
    """The forward and the backward of an exported program, functional."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors  # which imports all of torch._dynamo

    table = decompositions()
    try:
        return joint_graph(exported, tensors, table, outcomes)
    except Exception:  # AOTAutograd writes more, or says what stands in the way of that
        made = aot_export_joint_with_descriptors(
            stack, exported, tensors, decompositions=table, _record_nn_module_stack=True
        )
    joint: torch.fx.GraphModule = made.graph_module
    return joint
