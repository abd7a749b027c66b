"""What a plan must keep of the captured program as it is: what goes in, constants, and what comes out, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardfx.ir.graph import Graph, Input, Output

from .fault import Fault


def other_claim(before: Graph, after: Graph) -> Fault | None:
    """The first input that the captured program does not have so, or the first output that it gives otherwise.

    What outputs are made of is not looked at here (:mod:`.proof.same_function`).
    """
    known = {given.name: given for given in before.inputs}
    for given in after.inputs:
        what = _other_input(known.get(given.name), given)
        if what:
            return Fault(what, _needs(after, given), None, given.value.name, given.name, certain=True)
    return _other_outputs(before, after)


def _other_input(captured: Input | None, given: Input) -> str:
    name = f"{given.kind.value} {given.name}"
    if captured is None:
        return f"the planned graph has an input that the captured one lacks: {name}"
    if given.kind is not captured.kind:
        return f"{given.name} is a {given.kind.value} of the planned graph, and a {captured.kind.value} of the captured"
    if given.value.type != captured.value.type:
        return f"{name} is {given.value.type} in the planned graph, and {captured.value.type} in the captured one"
    return _other_content(captured.constant, given.constant, name)


def _other_content(captured: torch.Tensor | None, held: torch.Tensor | None, name: str) -> str:
    if captured is None or captured is held:  # a graph that was read from text has no contents
        return ""
    if held is None:
        return f"{name} has no content in the planned graph"
    if without_content(captured) or without_content(held):
        return ""
    if captured.shape != held.shape or captured.dtype != held.dtype:
        return f"{name} has another content in the planned graph: {tuple(held.shape)} of {held.dtype}"
    apart = torch.nonzero(_bits(captured).ne(_bits(held)).any(1))
    if not len(apart):
        return ""
    at = int(apart[0])
    mine, theirs = captured.reshape(-1)[at].item(), held.reshape(-1)[at].item()
    return f"{name} has another content in the planned graph: element {at} is {theirs}, and {mine} in the captured one"


def without_content(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a shape alone."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of each element: NaN is NaN, and -0.0 is not 0.0."""
    flat = tensor.detach().cpu().reshape(-1).contiguous()
    return flat.view(torch.uint8).reshape(flat.numel(), flat.element_size())


def _other_outputs(before: Graph, after: Graph) -> Fault | None:
    wanted, there = ([(o.kind, o.name) for o in graph.outputs] for graph in (before, after))
    for kind, name in wanted:
        if (kind, name) not in there:
            return Fault("the planned graph lacks an output", f"{kind.value} {name}", certain=True)
    for output in after.outputs:
        if (output.kind, output.name) not in wanted:
            return _other("the planned graph has an output that the captured one lacks", output)
    for output, key in zip(after.outputs, wanted, strict=False):
        if (output.kind, output.name) != key:
            return _other(f"the planned graph returns this in the place of {key[0].value} {key[1]}", output)
    guards = {output.name: output.guard for output in before.outputs if output.guard is not None}
    for output in after.outputs:
        if guards.get(output.name) != output.guard:
            return _other("the planned graph expects something else of this guard than the captured one", output)
    if len(there) > len(wanted):
        return _other("the planned graph returns this twice", after.outputs[len(wanted)])
    return None


def _other(what: str, output: Output) -> Fault:
    value = output.value
    return Fault(what, f"{output.kind.value} {output.name}", None, value.name, str(value.where), certain=True)


def _needs(graph: Graph, given: Input) -> str:
    """The first output that an input leads to."""
    made: set[Any] = {given.value}
    for node in graph.nodes:
        if made & set(node.operands):
            made.update(node.outs)
    return next((f"{o.kind.value} {o.name}" for o in graph.outputs if o.value in made), "")
