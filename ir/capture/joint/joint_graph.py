"""An exported program and its backward as one graph, where the program is functional.

    t = aten.linear(x, w, b)        ->   addmm(b, x, t(w)), and behind the forward, of the gradient g of what it gives:
                                         mm(g, w), mm(t(g), x), sum(g, 0)

AOTAutograd does it for any program: it runs it once to see what aliases what and is written into, and then makes it
functional, in several modes of Python code per call. Most programs are functional as they are, and for these one run
and one mode are enough. What is not known here is :class:`.call_writer.Beyond`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._functorch._aot_autograd.descriptors import (
    BufferAOTInput,
    GradAOTOutput,
    InputMutationAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    TangentAOTInput,
)
from torch.fx._lazy_graph_module import _make_graph_module

from shardfx.ir.capture.shells import Outcomes

from .call_writer import Beyond, CallWriter

NAMES_AND_LINES = ("nn_module_stack", "stack_trace")
"""What a node says of where it comes from."""


def joint_graph(
    exported: fx.GraphModule,
    tensors: Sequence[Tensor],
    table: Mapping[Any, Callable[..., Any]],
    outcomes: Outcomes | None = None,
) -> fx.GraphModule:
    """The graph of an exported program and of the gradients of its first result, where that has any.

    Its placeholders and its output say by AOTAutograd's descriptors what they are; ``table`` says which ops are taken
    apart, and ``outcomes`` what is known of calls already.

    Raises:
        Beyond: the program is not functional, or more than its tensors' forms must be known.
    """
    outcomes = outcomes or Outcomes((*exported.parameters(), *exported.buffers(), *tensors))
    writer = CallWriter(outcomes, table)
    run = _Run(writer, outcomes)
    given: dict[Any, Tensor] = {}
    for name, parameter in exported.named_parameters():
        given[ParamAOTInput(name)] = run.place(parameter, ParamAOTInput(name))
    for name, buffer in exported.named_buffers():
        given[BufferAOTInput(name)] = run.place(buffer, BufferAOTInput(name))
    inputs = [run.place(tensor, PlainAOTInput(number)) for number, tensor in enumerate(tensors)]
    given |= {PlainAOTInput(number): tensor for number, tensor in enumerate(inputs)}
    with ExitStack() as stack:
        stack.enter_context(_plain_autograd())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(writer)
        outs = pytree.tree_leaves(run.module(exported, inputs))
        written = run.written(given)
        trained = {desc: tensor for desc, tensor in given.items() if tensor.requires_grad}
        first = outs[0] if outs and isinstance(outs[0], Tensor) else None
        if any(isinstance(each, Tensor) and each.requires_grad for each in outs[1:]):
            raise Beyond("gradients of several results")
        gradients: Sequence[Tensor | None] = ()
        if trained and first is not None and first.requires_grad:
            tangent = run.tangent(first)
            gradients = run.backward(first, tangent, list(trained.values()))
    results = [*written.values(), *outs, *gradients]
    descs = [*map(InputMutationAOTOutput, written), *(PlainAOTOutput(number) for number in range(len(outs)))]
    node = writer.graph.output(tuple(writer.node_of(each) if isinstance(each, Tensor) else each for each in results))
    node.meta["desc"] = (*descs, *(GradAOTOutput(desc) for desc in list(trained)[: len(gradients)]))
    writer.graph.eliminate_dead_code()
    made: fx.GraphModule = _make_graph_module(writer.constants, writer.graph)
    return made


@contextmanager
def _plain_autograd() -> Iterator[None]:
    """Within, the backward runs in this thread, and hooks of a user's on saved tensors are not asked."""
    prior = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(prior)


class _Run:
    """One run of an exported program, node by node; its nodes say where what they call comes from."""

    def __init__(self, writer: CallWriter, outcomes: Outcomes) -> None:
        self.writer, self.outcomes = writer, outcomes
        self._shells: dict[int, Tensor] = {}
        """Of parameters and buffers."""
        self._given: dict[Any, Tensor] = {}
        """What the program is given, by what it is."""
        self._begins: list[int] = []
        """The numbers of autograd's nodes with which calls began, and what is noted of these."""
        self._notes: list[dict[str, Any]] = []
        self._last: fx.Node | None = None

    def place(self, tensor: Tensor, desc: object) -> Tensor:
        """A placeholder for a tensor; gives what stands for it."""
        shell = self._shells[id(tensor)] = self.outcomes.shell(tensor)
        self._placeholder(shell, desc)
        self._given[desc] = tensor
        return shell

    def written(self, given: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """The buffers that the program writes into, each with what it then holds.

        Raises:
            Beyond: one of them lies where something else lies that the program is given.
        """
        found = {desc: each for desc, each in given.items() if self.writer.node_of(each).op != "placeholder"}
        memories = Counter(tensor.untyped_storage()._cdata for tensor in self._given.values())
        if any(memories[self._given[desc].untyped_storage()._cdata] > 1 for desc in found):
            raise Beyond("a buffer that is written into lies where another tensor lies")
        return found

    def _placeholder(self, shell: Tensor, desc: object) -> None:
        graph = self.writer.graph
        with nullcontext() if self._last is None else graph.inserting_after(self._last):
            node = self._last = graph.placeholder(f"given_{len(graph.nodes)}")
        node.meta["desc"] = desc
        self.writer.stand_for(shell, node, writable=isinstance(desc, BufferAOTInput))

    def module(self, module: fx.GraphModule, given: Sequence[Any], noting: bool = True) -> Any:
        """What a graph module gives for arguments; those within it are noted as what calls them."""
        env: dict[fx.Node, Any] = {}
        arguments = iter(given)
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = next(arguments)
            elif node.op == "get_attr":
                env[node] = self._attribute(module, node.target)
            elif node.op == "call_function":
                if noting:
                    self._note(node)
                args, kwargs = (fx.map_arg(each, env.__getitem__) for each in (node.args, node.kwargs))
                env[node] = self._call(node.target, args, kwargs)
            elif node.op == "output":
                return fx.map_arg(node.args[0], env.__getitem__)
            else:
                raise Beyond(f"{node.op} {node.target}")
        raise Beyond("a module without a result")

    def _attribute(self, module: fx.GraphModule, path: str) -> Any:
        found: Any = module
        for name in path.split("."):
            found = getattr(found, name)
        return self._shells.get(id(found), found)

    def _call(self, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, within, *rest = args
            with torch.set_grad_enabled(enabled):
                return self.module(within, rest, noting=False)
        if target is torch.ops.higher_order.wrap_with_autocast:
            kind, dtype, enabled, cached, within, *rest = args
            with torch.autocast(kind, dtype, enabled, cached):
                return self.module(within, rest, noting=False)
        if isinstance(target, torch._ops.HigherOrderOperator):
            raise Beyond(str(target))
        return target(*args, **kwargs)

    def _note(self, node: fx.Node) -> None:
        note = {name: node.meta[name] for name in NAMES_AND_LINES if name in node.meta}
        self._begins.append(torch.autograd._get_sequence_nr())
        self._notes.append(note)
        self.writer.meta = note

    # ---- the backward -----------------------------------------------------------------------------------------

    def tangent(self, of: Tensor) -> Tensor:
        """A placeholder for the gradient of a result."""
        shell = self.outcomes.shell(of).requires_grad_(False)
        self._placeholder(shell, TangentAOTInput(PlainAOTOutput(0)))
        return shell

    def backward(self, of: Tensor, tangent: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of tensors; what autograd calls is noted as what it is the gradient of.

        Autograd's steps hold what they note by, which holds them: nobody would ever free that, and the weights in it.
        """
        note: dict[str, Any] = {"partitioner_tag": "is_backward"}
        self.writer.meta = note
        hooks = []
        for step in _steps(of.grad_fn):
            number = bisect_right(self._begins, step._sequence_nr()) - 1
            of_step = self._notes[number] if number >= 0 else {}
            line = {**note, "stack_trace": of_step.get("stack_trace", "")}
            begun = {**line, "fwd_nn_module_stack": of_step.get("nn_module_stack")}
            hooks += [step.register_prehook(self._noting(begun)), step.register_hook(self._noting(line))]
        try:
            return torch.autograd.grad([of], inputs, [tangent], allow_unused=True)
        finally:
            for hook in hooks:
                hook.remove()

    def _noting(self, note: dict[str, Any]) -> Callable[..., None]:
        def noted(*_: object) -> None:
            self.writer.meta = note

        return noted


def _steps(last: Any) -> Iterator[Any]:
    """The steps of a backward, each once."""
    seen = {last}
    left = [last]
    while left:
        step = left.pop()
        yield step
        for before, _ in step.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)
