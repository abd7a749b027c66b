"""Joint graph: an exported program and its backward as one graph of functional ops, where the program is functional.

    t = aten.linear(x, w, b)        ->   addmm(b, x, t(w)), and behind the forward, of the gradient g of what it gives:
                                         mm(g, w), mm(t(g), x), sum(g, 0)

AOTAutograd does it for any program: it runs it once to see what aliases what and is written into, and then makes it
functional, in several modes of Python code per call. Most programs are functional as they are; for these one run and
one dispatch mode are enough, and what a call gives is asked once for each signature (:mod:`.abstract_tensors`). What is
not known here raises :class:`NotFunctional`.
"""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
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
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx._lazy_graph_module import _make_graph_module
from torch.utils._python_dispatch import TorchDispatchMode, autograd_would_have_decomposed
from torch.utils._pytree import tree_leaves

from shardfx.ir.ops.traits import OF_MEMORY

from .abstract_tensors import OutcomeCache, TensorSignature

NAMES_AND_LINES = ("nn_module_stack", "stack_trace")
"""The source location in a node's meta."""


def joint_graph(
    exported: fx.GraphModule,
    tensors: Sequence[Tensor],
    table: Mapping[Any, Callable[..., Any]],
    outcomes: OutcomeCache | None = None,
) -> fx.GraphModule:
    """The graph of an exported program and of the gradients of its first result, where that has any.

    Its placeholders and its output say by AOTAutograd's descriptors what they are; ``table`` says which ops are taken
    decomposed, and ``outcomes`` what is known of calls already.

    Raises:
        NotFunctional: it is not, or more than the signatures of its tensors must be known.
    """
    outcomes = outcomes or OutcomeCache((*exported.parameters(), *exported.buffers(), *tensors))
    writer = CallWriter(outcomes, table)
    run = _ProgramRun(writer, outcomes)
    values: dict[Any, Tensor] = {}
    for name, parameter in exported.named_parameters():
        values[ParamAOTInput(name)] = run.place(parameter, ParamAOTInput(name))
    for name, buffer in exported.named_buffers():
        values[BufferAOTInput(name)] = run.place(buffer, BufferAOTInput(name))
    inputs = [run.place(tensor, PlainAOTInput(number)) for number, tensor in enumerate(tensors)]
    values |= {PlainAOTInput(number): tensor for number, tensor in enumerate(inputs)}
    with ExitStack() as stack:
        stack.enter_context(_plain_autograd())
        stack.enter_context(enable_python_dispatcher())
        stack.enter_context(writer)
        outs = pytree.tree_leaves(_Nodes(exported, run).run(*inputs, enable_io_processing=False))
        written = run.written(values)
        trained = {desc: tensor for desc, tensor in values.items() if tensor.requires_grad}
        first = outs[0] if outs and isinstance(outs[0], Tensor) else None
        if any(isinstance(each, Tensor) and each.requires_grad for each in outs[1:]):
            raise NotFunctional("gradients of several results")
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
    """Within, the backward runs in this thread, without the user's hooks on saved tensors."""
    prior = torch._C._autograd._saved_tensors_hooks_set_tracing(True)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        torch._C._autograd._saved_tensors_hooks_set_tracing(prior)


class _ProgramRun:
    """One run of an exported program, and of its backward, which passes on the source locations of its nodes."""

    def __init__(self, writer: CallWriter, outcomes: OutcomeCache) -> None:
        self.writer, self.outcomes = writer, outcomes
        self.abstract: dict[int, Tensor] = {}
        """The abstract tensors of parameters and buffers."""
        self._given: dict[Any, Tensor] = {}
        """The inputs of the program, by descriptor."""
        self._begins: list[int] = []
        """The sequence numbers of autograd at which calls began, and their source locations."""
        self._notes: list[dict[str, Any]] = []
        self._last: fx.Node | None = None

    def place(self, tensor: Tensor, desc: object) -> Tensor:
        """Add a placeholder for a tensor; returns the abstract tensor."""
        abstract = self.abstract[id(tensor)] = self.outcomes.abstract(tensor)
        self._placeholder(abstract, desc)
        self._given[desc] = tensor
        return abstract

    def written(self, values: Mapping[Any, Tensor]) -> dict[Any, Tensor]:
        """The buffers that the program writes into, each with its new content.

        Raises:
            NotFunctional: one of them shares memory with another input.
        """
        found = {desc: each for desc, each in values.items() if self.writer.node_of(each).op != "placeholder"}
        memories = Counter(tensor.untyped_storage()._cdata for tensor in self._given.values())
        if any(memories[self._given[desc].untyped_storage()._cdata] > 1 for desc in found):
            raise NotFunctional("a buffer that is written into lies where another tensor lies")
        return found

    def _placeholder(self, abstract: Tensor, desc: object) -> None:
        graph = self.writer.graph
        with nullcontext() if self._last is None else graph.inserting_after(self._last):
            node = self._last = graph.placeholder(f"given_{len(graph.nodes)}")
        node.meta["desc"] = desc
        self.writer.stand_for(abstract, node, writable=isinstance(desc, BufferAOTInput))

    def note(self, node: fx.Node) -> None:
        """A node of the program is run."""
        note = {name: node.meta[name] for name in NAMES_AND_LINES if name in node.meta}
        self._begins.append(torch.autograd._get_sequence_nr())
        self._notes.append(note)
        self.writer.meta = note

    # ---- the backward -----------------------------------------------------------------------------------------

    def tangent(self, of: Tensor) -> Tensor:
        """A placeholder for the gradient of a result."""
        abstract = self.outcomes.abstract(of).requires_grad_(False)
        self._placeholder(abstract, TangentAOTInput(PlainAOTOutput(0)))
        return abstract

    def backward(self, of: Tensor, tangent: Tensor, inputs: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """The gradients of tensors; what autograd calls has the source location of its forward.

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


class _Nodes(fx.Interpreter):
    """Interpreter of an exported program; inner modules have the source location of their call (``noting``: not)."""

    def __init__(self, module: fx.GraphModule, run: _ProgramRun, noting: bool = True) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._run, self._noting, self.extra_traceback = run, noting, False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node."""
        if self._noting and n.op == "call_function":
            self._run.note(n)
        return super().run_node(n)

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The abstract tensor of a parameter or buffer, or a constant."""
        found = super().get_attr(target, args, kwargs)
        return self._run.abstract.get(id(found), found)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call an op, or the graph within a switch of gradients or of autocast."""
        if not isinstance(target, torch._ops.HigherOrderOperator):
            return target(*args, **kwargs)
        if target is torch.ops.higher_order.wrap_with_set_grad_enabled:
            enabled, within, *rest = args
            mode: AbstractContextManager[Any] = torch.set_grad_enabled(enabled)
        elif target is torch.ops.higher_order.wrap_with_autocast:
            kind, dtype, enabled, cached, within, *rest = args
            mode = torch.autocast(kind, dtype, enabled, cached)
        else:
            raise NotFunctional(str(target))
        with mode:
            return _Nodes(within, self._run, noting=False).run(*rest, enable_io_processing=False)


def _steps(last: Any) -> Iterator[Any]:
    """The autograd nodes of a backward, each once."""
    seen = {last}
    left = [last]
    while left:
        step = left.pop()
        yield step
        for before, _ in step.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                left.append(before)


aten = torch.ops.aten


class NotFunctional(Exception):
    """A program that is not functional, or needs more than signatures: AOTAutograd may take it."""


NOT_HERE = {
    *OF_MEMORY,
    aten.cudnn_batch_norm,
    aten.miopen_batch_norm,
    aten._efficientzerotensor,
}
"""Ops that see how tensors lie in memory, of which abstract tensors have no more than strides; those of libraries that
write into running statistics though their schemas do not say so; and zeros that are known to be, of which a product
with infinity is."""
LIFTS = {aten.lift_fresh.default, aten.lift_fresh_copy.default}
"""The ops of ``torch.tensor([1.0, 2.0])`` in the code."""
TAGS = {torch.Tag.data_dependent_output, torch.Tag.inplace_view}
"""Ops that ask for content, or change the metadata of tensors."""


class CallWriter(TorchDispatchMode):
    """Writes every op that is called to ``graph``; ``meta`` is the source location of the next nodes.

    ``constants`` are the tensors that the code makes of numbers, by name.
    """

    def __init__(self, outcomes: OutcomeCache, table: Mapping[Any, Callable[..., Any]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.graph = fx.Graph()
        self.meta: dict[str, Any] = {}
        self.constants: dict[str, Tensor] = {}
        self._outcomes, self._table = outcomes, table
        self._nodes: dict[int, fx.Node] = {}
        self._abstract: dict[int, Tensor] = {}
        """The abstract tensors of constants."""
        self._alive: list[Tensor] = []
        self._writable: set[int] = set()
        self._viewed: set[int] = set()
        """The tensors that may alias another one."""
        self._written: dict[Any, bool] = {}
        """Whether each op is emitted unchanged."""

    def stand_for(self, tensor: Tensor, node: fx.Node, *, writable: bool = False) -> None:
        """Let a tensor stand for the result of a node; inputs may be ``writable``."""
        node.meta["val"] = tensor
        self._nodes[id(tensor)] = node
        self._alive.append(tensor)
        if writable:
            self._writable.add(id(tensor))

    def node_of(self, tensor: Tensor) -> fx.Node:
        """The node that gives a tensor."""
        if id(tensor) not in self._nodes:
            raise NotFunctional("a tensor that nothing gives")
        return self._nodes[id(tensor)]

    def _lift(self, tensor: Tensor) -> None:
        """Make a tensor of the code a constant."""
        if isinstance(tensor, FakeTensor) or tensor.requires_grad or id(tensor) in self._abstract:
            return
        name = f"_tensor_constant{len(self.constants)}"
        self.constants[name] = tensor
        abstract = self._abstract[id(tensor)] = self._outcomes.abstract(tensor)
        self.stand_for(abstract, self._noted(self.graph.get_attr(name)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_written(func, args, kwargs):
            with self:
                made = self._table.get(func, func.decompose)(*args, **kwargs)
            if made is not NotImplemented:
                return made
        if func in LIFTS:
            func = aten.lift_fresh_copy.default
            self._lift(args[0])
        changed = self._changed(func, args, kwargs)
        if changed:
            func = self._functional(func, changed)
        (args, kwargs), (of_args, of_kwargs) = self._given((args, kwargs))
        out = self._outcomes.of(func, args, kwargs)
        node = self._noted(self.graph.call_function(func, of_args, of_kwargs))
        if changed and isinstance(out, Tensor):
            self._change(changed[0], out, node)
            return changed[0]
        if func._schema._is_view_op():
            self._viewed.update(id(each) for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor))
        if isinstance(out, Tensor):
            self._result(out, node)
        elif isinstance(out, (list, tuple)):
            node.meta["val"] = out
            behind = len(out) - len(changed)
            for number, each in enumerate(out):
                if isinstance(each, Tensor):
                    item = self._noted(self.graph.call_function(operator.getitem, (node, number)))
                    if number < behind:
                        self._result(each, item)
                    else:
                        self._change(changed[number - behind], each, item)
            return out[:behind]
        elif out is not None:
            raise NotFunctional(f"{func} gives a {type(out).__name__}")
        return out

    def _is_written(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether an op is written as it is, and not decomposed: by the table, or as autograd would have."""
        leaves = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)][:1]
        found = self._written.get((func, len(leaves)))
        if found is None:
            if func.overloadpacket in NOT_HERE or not TAGS.isdisjoint(func.tags):
                raise NotFunctional(str(func))
            if not func._schema.returns and func is not aten._assert_tensor_metadata.default:
                raise NotFunctional(f"{func}, which is called for its effect")
            apart = func in self._table or autograd_would_have_decomposed(func, leaves)
            found = self._written[func, len(leaves)] = not apart
        return found

    def _changed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors into which a call writes."""
        if not func._schema.is_mutable:
            return []
        found = []
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            operand = args[number] if number < len(args) else kwargs.get(argument.name)
            if not isinstance(operand, Tensor):
                raise NotFunctional(f"{func} writes into a {type(operand).__name__}")
            node = self._nodes.get(id(operand))
            made_here = node is not None and node.op == "call_function"
            if id(operand) in self._viewed or not (made_here or id(operand) in self._writable):
                raise NotFunctional(f"{func}: what it writes into is seen elsewhere")
            found.append(operand)
        return found

    def _functional(self, func: Any, changed: Sequence[Tensor]) -> Any:
        """The functional variant of an op: it returns what the other writes, as its result or behind its results."""
        in_place = len(changed) == 1 and func._opname.endswith("_")
        name = func._opname[:-1] if in_place else f"{func._opname}_functional"
        functional = getattr(getattr(aten, name, None), func._overloadname, None)
        if functional is None or func.namespace != "aten" or functional._schema.is_mutable:
            raise NotFunctional(f"{func}: no op of the same name gives what it writes")
        more = len(functional._schema.returns) - len(func._schema.returns)
        if more != (0 if in_place else len(changed)):
            raise NotFunctional(f"{func}: {functional} gives something else")
        return functional

    def _change(self, changed: Tensor, made: Tensor, node: fx.Node) -> None:
        """Let a tensor stand for what was written into it."""
        if TensorSignature.of(made) != TensorSignature.of(changed):
            raise NotFunctional(f"{node.target} in place, with another signature")
        self.stand_for(changed, node)

    def _given(self, arg: Any) -> tuple[Any, Any]:
        """Arguments with abstract tensors in place of constants, and with nodes in place of tensors."""
        if isinstance(arg, Tensor):
            abstract = self._abstract.get(id(arg), arg)
            return abstract, self.node_of(abstract)
        if isinstance(arg, (list, tuple)):
            both = [self._given(each) for each in arg]
            kind = list if isinstance(arg, list) else tuple
            return kind([abstract for abstract, _ in both]), kind([node for _, node in both])
        if isinstance(arg, dict):
            found = {name: self._given(each) for name, each in arg.items()}
            return {n: each[0] for n, each in found.items()}, {n: each[1] for n, each in found.items()}
        return arg, arg

    def _result(self, tensor: Tensor, node: fx.Node) -> None:
        if tensor.is_complex():
            raise NotFunctional("complex numbers, which may be conjugated where they lie")
        if not all(type(size) is int for size in tensor.shape):
            raise NotFunctional("a shape that the data decide")
        self.stand_for(tensor, node)

    def _noted(self, node: fx.Node) -> fx.Node:
        node.meta.update(self.meta)
        return node
