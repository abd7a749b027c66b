"""Memory against time: ``recompute="auto"`` within a budget, compared with recomputing some of the layers, and with
torch's own partitioner (min-cut, with ``activation_memory_budget``). A GPT, or a chain of convolutions (VGG-16), on one
device, in float32.

    python -m benchmarks.recompute_table [--model vgg] [--layers 8] [--machine h100-dgx]

All programs have the same cost model: their calls are replayed on shapes, which gives the live bytes at the peak
(parameters, batch and gradients too) and the seconds of a step, here relative to the program of the same maker without
recompute (torch's is 0.7 % shorter than ours). In each row the budget is the peak of the other.
"""

from __future__ import annotations

import argparse
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch._functorch import config
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

import shardfx as sx
from shardfx.ir.cost.machine import Machine
from shardfx.ir.cost.replay import replay
from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.spec import Spec, TensorType
from shardfx.ir.text.printer import size_text

from .models import GPT, Size, next_token

BUDGETS = (0.9, 0.7, 0.5, 0.3, 0.1)
"""Of torch's partitioner: 1 saves what its min-cut saves, 0 recomputes all."""
MESH = sx.Mesh(dp=1)


class Point(NamedTuple):
    """Peak bytes of a program, and the seconds of a step."""

    peak: int
    seconds: float


@dataclass(frozen=True)
class Subject:
    """A model on the default device, and the modules that one would recompute by hand."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    by_hand: dict[str, sx.Recompute]


def gpt(layers: int) -> Subject:
    """A GPT of so many layers."""
    size = Size(dim=512, layers=layers, length=256, batch=8)

    def batch() -> tuple[Tensor, Tensor]:
        x, y = (torch.zeros(size.batch, size.length, dtype=torch.long) for _ in range(2))
        return x, y

    some = {f"{n} of {layers} layers": sx.Recompute("layers.*", count=n) for n in range(2, layers + 1, 2)}
    return Subject(lambda: GPT(size), batch, next_token, some)


def vgg() -> Subject:
    """VGG-16 without its large head: 13 convolutions, each a module, and what follows it another."""

    def model() -> nn.Module:
        widths, layers, before = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0), [], 3
        for width in widths:
            layers += [nn.Conv2d(before, width, 3, padding=1), nn.ReLU()] if width else [nn.MaxPool2d(2)]
            before = width or before
        head = [("pool", nn.AdaptiveAvgPool2d(1)), ("flat", nn.Flatten()), ("fc", nn.Linear(512, 100))]
        return nn.Sequential(OrderedDict[str, nn.Module]([("features", nn.Sequential(*layers)), *head]))

    def batch() -> tuple[Tensor, Tensor]:
        return torch.zeros(16, 3, 128, 128), torch.zeros(16, dtype=torch.long)

    some = {f"{n} modules together": sx.Recompute("features.*", segment=n) for n in (2, 4, 8)}
    return Subject(model, batch, F.cross_entropy, some)


class Loss(nn.Module):
    """The model and its loss."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model, self.loss = subject.model(), subject.loss

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor]:
        return (self.loss(self.model(x), y),)


def ours(subject: Subject, machine: Machine, **hints: Any) -> Point:
    """A plan on one device."""
    with torch.device("meta"):
        model, (x, y) = subject.model(), subject.batch()
    given = sx.Hints(args=(x,), loss=subject.loss, targets=(y,), machine=machine, **hints)
    memory = sx.parallelize(model, MESH, given).memory()
    return Point(memory.peak, memory.footprint.cost.seconds(machine, MESH))


def of_torch(subject: Subject, machine: Machine, budget: float) -> Point:
    """Forward and backward as torch's partitioner makes them, in sequence."""
    made: dict[str, fx.GraphModule] = {}

    def keep(name: str) -> Any:
        def compiler(module: fx.GraphModule, inputs: Sequence[Any]) -> Any:
            made[name] = module
            return make_boxed_func(module.forward)

        return compiler

    x, y = subject.batch()
    with config.patch(activation_memory_budget=budget, functionalize_rng_ops=False):
        step = aot_module_simplified(
            Loss(subject),
            (x, y),
            fw_compiler=keep("forward"),
            bw_compiler=keep("backward"),
            partition_fn=min_cut_rematerialization_partition,
        )
        step(x, y)[0].backward()
    return priced(joined(made["forward"], made["backward"]), machine)


def joined(forward: fx.GraphModule, backward: fx.GraphModule) -> RankProgram:
    """Both as one program: what the forward saves goes into the backward."""
    graph, env = fx.Graph(), dict[fx.Node, Any]()
    inputs, outputs = [], []

    def copied(module: fx.GraphModule) -> Sequence[Any]:
        for node in module.graph.nodes:
            if node.op == "output":
                return [env[each] if isinstance(each, fx.Node) else each for each in node.args[0]]
            if node not in env:
                env[node] = graph.node_copy(node, env.__getitem__)
        raise AssertionError("a graph without an output")

    def typed(node: fx.Node) -> Value:
        value = node.meta["val"]
        return Value(TensorType(tuple(value.shape), value.dtype), name=node.name, spec=Spec.replicated(value.dim()))

    given = [node for node in forward.graph.nodes if node.op == "placeholder"]
    for node in given:
        env[node] = graph.placeholder(node.name)
        inputs.append(Input(InputKind.ARGUMENT, node.name, typed(node)))
    loss, *saved = copied(forward)
    one = graph.call_function(torch.ops.aten.ones_like.default, (loss,))
    places = [node for node in backward.graph.nodes if node.op == "placeholder"]
    env.update(zip(places, [*saved, one], strict=True))
    grads = [each for each in copied(backward) if each is not None]
    outputs = [Output(OutputKind.LOSS, "loss", Value(TensorType((), torch.float32)))]
    outputs += [
        Output(OutputKind.GRADIENT, f"grad{i}", Value(TensorType((), torch.float32))) for i in range(len(grads))
    ]
    graph.output((loss, *grads))
    return RankProgram(0, MESH, graph, tuple(inputs), tuple(outputs))


def priced(program: RankProgram, machine: Machine) -> Point:
    """The peak, inputs included, and the time."""
    footprint = replay(program)
    given = sum(each.value.type.nbytes for each in program.inputs)
    return Point(given + footprint.peak.nbytes, footprint.cost.seconds(machine, MESH))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="gpt", choices=("gpt", "vgg"))
    parser.add_argument("--layers", type=int, default=8, help="of the GPT")
    parser.add_argument("--machine", default="h100-dgx")
    asked = parser.parse_args()
    subject, machine = gpt(asked.layers) if asked.model == "gpt" else vgg(), Machine.of(asked.machine)
    plain, whole = ours(subject, machine), of_torch(subject, machine, 1.0)
    others = {name: (ours(subject, machine, recompute=by_hand), plain) for name, by_hand in subject.by_hand.items()}
    others |= {f"torch, {budget}": (of_torch(subject, machine, budget), whole) for budget in BUDGETS}
    table = Table("", "peak", "more time", "auto: peak", "more time", box=box.SIMPLE_HEAD)
    table.add_row("all is kept", size_text(plain.peak), "", "", "")
    for name, (other, base) in others.items():
        try:
            auto = ours(subject, machine, recompute="auto", memory=other.peak)
            told = [size_text(auto.peak), f"{auto.seconds / plain.seconds - 1:.2%}"]
        except sx.Error as error:
            told = [f"refused: {error.expected}", ""]
        table.add_row(name, size_text(other.peak), f"{other.seconds / base.seconds - 1:.2%}", *told)
    Console(width=100).print(table)


if __name__ == "__main__":
    main()
