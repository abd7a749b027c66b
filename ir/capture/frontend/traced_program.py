"""A traced call (:mod:`.dynamo`) as a program of tensors, which is exported as the model and its loss would be."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.traceback import preserve_node_meta

from shardfx.ir.errors import Error

from ..data_dependent import DataGuards, stored
from ..model_and_loss import ModelAndLoss
from ..source_locations import LOSS, source_of
from .dynamo import DynamoTrace


class TracedProgram(ModelAndLoss):
    """The graph of a traced call on the weights of a model; ``names`` are those of its tensors, ``program`` the
    arguments of :class:`.ModelAndLoss`."""

    def __init__(self, trace: DynamoTrace, names: Sequence[str], *program: Any) -> None:
        super().__init__(*program)
        self._trace, self._names, self._program = (trace,), list(names), program

    @property
    def eager(self) -> ModelAndLoss:
        """The program that calls the model's own code."""
        return ModelAndLoss(*self._program)

    def _run(self, tensors: tuple[Tensor, ...], decisions: DataGuards) -> tuple[Tensor, ...]:
        (trace,) = self._trace
        known = stored(self.model) | dict(zip(self._names, tensors, strict=True))
        with preserve_node_meta():
            outputs = _NodeRunner(trace.graph, decisions).run(*(known[name] for name in trace.inputs))
        self.results.tree, self.results.leaves = trace.tree, trace.leaves
        for name, number in trace.buffers.items():
            known[name].copy_(outputs[number].detach())
        outs = [outputs[number] for number in trace.results]
        if self.loss is not None and not trace.has_loss:
            targets = [each for name, each in zip(self._names, tensors, strict=True) if name.startswith("targets.")]
            outs = [self.loss(outs, *targets), *outs]
        trains = self.loss is not None
        return (*outs[:trains], *(each.detach() for each in outs[trains:]))


_OPERATORS = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"
OUT_OF_PLACE = {getattr(operator, f"i{name}"): getattr(operator, name) for name in _OPERATORS}
"""The operators of numbers in place of those that change tensors."""


class _NodeRunner(fx.Interpreter):
    """Interpreter of a graph of torch functions, with the source locations of its nodes."""

    def __init__(self, graph: fx.GraphModule, decisions: DataGuards) -> None:
        super().__init__(graph)
        self._decisions = decisions

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        self._decisions.at = source_of(n)
        self._decisions.of_loss = any(path.split(".")[0] == LOSS for path, _ in n.meta["nn_module_stack"].values())
        if n.meta["number"] and n.target in OUT_OF_PLACE:  # which is a tensor here
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            return OUT_OF_PLACE[n.target](*args, **kwargs)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, or the graph within a checkpoint.

        Raises:
            Error: another higher-order op.
        """
        if target is torch.ops.higher_order.tag_activation_checkpoint:
            return _NodeRunner(args[0], self._decisions).run(*args[1:])
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise Error(
                f"{target} in the graph of Dynamo cannot be captured",
                where=str(self._decisions.at),
                expected="functions of tensors, and torch.utils.checkpoint",
                remedy="capture(...) without python=, by torch.export",
            )
        return super().call_function(target, args, kwargs)
