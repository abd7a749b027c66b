"""A model run as it is, and the graph that was captured of it: loss, results, gradients and buffers by name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shardfx.ir.builder import Call
from shardfx.ir.capture.forms.parts_of_batch import BatchParts
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Value
from shardfx.ir.spec import as_it_lies

from .modes import Alike, AsAsked
from .whole_run import run_whole

Draws = Mapping[Value, Call]
"""Values that are made of random numbers which ranks agree on, and the call of torch's that each stands for."""
Made = dict[str, Tensor]
"""What a run makes, by what it is: ``loss``, ``result 0``, ``gradient fc.weight``, ``buffer norm.running_mean``."""


@dataclass(frozen=True)
class Named:
    """How a program of a model and its loss, and the graph of it, name what goes in and comes out: the first names of
    tied tensors, the inputs in order, what the gradient of the loss is, and by which state; and of which parts of the
    batch norms are."""

    aliases: Mapping[str, str]
    leaves: Sequence[str]
    seed: float
    seed_state: str
    parts: BatchParts


def eager_run(program: nn.Module, given: Sequence[Tensor], named: Named, trains: bool, mode: Alike | None) -> Made:
    """What a program makes, by torch's own autograd, which leaves its gradients with it. Its buffers are afterwards as
    they were, and so is what generators draw; what else its modules hold is not."""
    model: nn.Module = program.get_submodule("model")
    before = {name: each.detach().clone() for name, each in model.named_buffers(remove_duplicate=False)}
    known = before.keys() & named.aliases.keys()  # one that had no content is no input
    own = [as_it_lies(each).requires_grad_(each.requires_grad) for each in given]  # which may be written into
    parameters = dict(model.named_parameters(remove_duplicate=False))
    with _apart(), AsAsked(named.parts), mode or nullcontext():
        outs = program(*own)
        trained: dict[str, Tensor] = {
            named.aliases[name]: each for name, each in parameters.items() if each.requires_grad
        }
        trained |= {name: each for name, each in zip(named.leaves, own, strict=True) if each.requires_grad}
        for each in trained.values():
            each.grad = None
        if trains and outs[0].requires_grad and trained:
            outs[0].backward(torch.full_like(outs[0], named.seed))
    found = [(name, each.grad) for name, each in trained.items()]
    after = dict(model.named_buffers(remove_duplicate=False))
    results = outs[1:] if trains else outs
    made = {"loss": outs[0].detach()} if trains else {}
    written = {_memory(each) for each in after.values()}  # what lies there is about to be as it was
    own_memory = (each.detach().clone() if _memory(each) in written else each.detach() for each in results)
    made |= {f"result {number}": each for number, each in enumerate(own_memory)}
    made |= {f"gradient {name}": each for name, each in found if each is not None}
    made |= {f"buffer {named.aliases[name]}": each.detach().clone() for name, each in after.items() if name in known}
    with torch.no_grad():
        for name, was in before.items():
            if name in after and after[name].shape == was.shape:
                held = after[name].detach_() if after[name].requires_grad else after[name]  # the backward is done
                held.copy_(was)
    return made


def captured_run(
    graph: Graph,
    program: nn.Module,
    given: Sequence[Tensor],
    named: Named,
    drawn: Draws,
    mode: Alike | None,
) -> Made:
    """What the graph makes of the same."""
    model = program.get_submodule("model")
    stored = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    known = {named.aliases[name]: each.detach() for name, each in stored}
    known |= {name: each.detach() for name, each in zip(named.leaves, given, strict=True)}
    known |= {each.name: each.constant for each in graph.inputs if each.constant is not None}
    for each in graph.inputs:
        if each.kind is InputKind.SEED:
            known[each.name] = torch.zeros((), dtype=torch.int64)
        elif each.kind is InputKind.STATE and each.name == named.seed_state:
            known[each.name] = torch.tensor(named.seed, dtype=torch.float64)
    if mode is not None:
        known = {name: mode.taken(each) for name, each in known.items()}
    values = {output.value for output in graph.outputs}
    with _apart(), mode or nullcontext():
        env = run_whole(graph, known, only=values, instead=drawn)
    made = {said_of(output): env[output.value] for output in graph.outputs if output.kind in COMPARED}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    return {f"buffer {named.aliases[name]}": each for name, each in buffers.items()} | made


def _memory(tensor: Tensor) -> int | None:
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else None


COMPARED = (OutputKind.LOSS, OutputKind.RESULT, OutputKind.GRADIENT, OutputKind.BUFFER)


def said_of(output: Output) -> str:
    """What an output of a graph is, as runs name it."""
    if output.kind is OutputKind.LOSS:
        return "loss"
    return f"{output.kind.value} {output.name.removeprefix('results.')}"


@contextmanager
def _apart() -> Iterator[None]:
    """Within, the CPU's generator begins at the same place; behind it, it is as it was. (``torch.manual_seed`` would
    seed GPUs, too.)"""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield
