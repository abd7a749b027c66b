"""Programs of a rank that tests write themselves, as calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Input, InputKind, Output, OutputKind, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.spec import Spec, TensorType

Call = Callable[..., fx.Node]
"""``call(op, *args, **kwargs)`` is the next call of the program."""
Write = Callable[..., Sequence[fx.Node]]
GROUP = "dp2/dp@0"
"""That of both ranks."""


def written(
    write: Write,
    *names: str,
    shape: tuple[int, ...] = (2, 2),
    dtype: torch.dtype = torch.float32,
    gives: OutputKind = OutputKind.GRADIENT,
) -> RankProgram:
    """The program whose results ``write(call, *inputs)`` gives; inputs, ``a`` and ``b`` unless they are named, and
    results are of one type. Where new parameters are given, the inputs are parameters."""
    graph = fx.Graph()
    names = names or ("a", "b")

    def call(op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return graph.call_function(op, args, kwargs)

    results = tuple(write(call, *map(graph.placeholder, names)))
    graph.output(results)

    def value(name: str) -> Value:
        return Value(TensorType(shape, dtype), name=name, spec=Spec.replicated(len(shape)))

    kind = InputKind.PARAMETER if gives is OutputKind.PARAMETER else InputKind.ARGUMENT
    inputs = tuple(Input(kind, name, value(name)) for name in names)
    titles = names if gives is OutputKind.PARAMETER else map(str, range(len(results)))
    outputs = tuple(Output(gives, title, value(title)) for title, _ in zip(titles, results, strict=False))
    return RankProgram(0, Mesh(dp=2), graph, inputs, outputs)
