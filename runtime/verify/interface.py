"""The interface of a plan: inputs, constants and outputs, in order, are those of the captured graph."""

from __future__ import annotations

from itertools import zip_longest

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.graph import Graph, Input, Output, OutputKind

from .fault import Fault, first_output


def interface_fault(before: Graph, after: Graph) -> Fault | None:
    """The first input of the planned graph that differs from the captured one's, or the first output.

    How outputs are computed is not checked here (:mod:`.proof.terms`).
    """
    known = {inp.name: inp for inp in before.inputs}
    for inp in after.inputs:
        what = _other_input(known.get(inp.name), inp)
        if what:
            return Fault(what, first_output(after, [inp.value]), None, inp.value.name, inp.name, certain=True)
    return _other_outputs(before, after)


def _other_input(captured: Input | None, inp: Input) -> str:
    name = f"{inp.kind.value} {inp.name}"
    if captured is None:
        return f"the planned graph has an input that the captured one lacks: {name}"
    if inp.kind is not captured.kind:
        return f"{inp.name} is a {inp.kind.value} of the planned graph, and a {captured.kind.value} of the captured"
    if inp.value.type != captured.value.type:
        return f"{name} is {inp.value.type} in the planned graph, and {captured.value.type} in the captured one"
    mine, planned = captured.constant, inp.constant
    if mine is None or mine is planned:  # a graph that was read from text has no contents
        return ""
    if planned is None:
        return f"{name} has no content in the planned graph"
    if without_content(mine) or without_content(planned):
        return ""
    same = mine.shape == planned.shape and mine.dtype == planned.dtype and torch.equal(_bits(mine), _bits(planned))
    return "" if same else f"{name} has another content in the planned graph"


def without_content(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no data, as on ``meta``."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor: NaN is NaN, and -0.0 is not 0.0."""
    return tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8)


def _other_outputs(before: Graph, after: Graph) -> Fault | None:
    planned = [o for o in after.outputs if o.kind is not OutputKind.OVERFLOW]
    wanted, there = ([(o.kind, o.name) for o in outputs] for outputs in (before.outputs, planned))
    lost = next((key for key in wanted if key not in there), None)
    if lost is not None:
        return Fault("the planned graph lacks an output", f"{lost[0].value} {lost[1]}", certain=True)
    guards = {output.name: output.guard for output in before.outputs}
    for output, key in zip_longest(planned, wanted):
        if (output.kind, output.name) not in wanted:
            return _other("the planned graph has an output that the captured one lacks", output)
        if key is None:
            return _other("the planned graph returns this twice", output)
        if (output.kind, output.name) != key:
            return _other(f"the planned graph returns this in the place of {key[0].value} {key[1]}", output)
        if guards[output.name] != output.guard:
            return _other("the planned graph expects something else of this guard than the captured one", output)
    return None


def _other(what: str, output: Output) -> Fault:
    value = output.value
    return Fault(what, f"{output.kind.value} {output.name}", None, value.name, str(value.where), certain=True)
