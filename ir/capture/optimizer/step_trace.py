"""Trace of an optimizer's step on one parameter: of its gradient, scheduled options (the rate) and states.

The optimizer's own code runs, on fake tensors, in the path that it takes under ``torch.compile``: numbers that it keeps
in tensors stay tensors. A number that it reads out (``.item()``) is traced too, as far as nothing is decided by it. A
step that asks for no shape and is elementwise is traced once for all shapes, others for each shape.
"""

from __future__ import annotations

import builtins
import operator
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.utils._pytree as pytree
from torch import Tensor, is_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from shardfx.ir.capture.canonical.decompositions import decompositions
from shardfx.ir.errors import Error

from .optimizer_groups import RATE, WHERE, OptimizerGroup, replace_numbers
from .sparse_rows import sparse_gradient

PLAIN = {"foreach": False, "fused": False, "differentiable": False}
"""Options of how a step is computed, not of what."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
States = dict[str, Any]


RELATIONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Comparison(NamedTuple):
    """A comparison that a step makes with a scheduled number (``weight_decay != 0``), and its result."""

    name: str
    relation: str
    other: float
    answer: bool

    def holds(self, value: float) -> bool:
        """Whether the result is the same for another value."""
        return bool(getattr(operator, self.relation)(value, self.other)) is self.answer

    def __str__(self) -> str:
        return f"{self.name} {RELATIONS[self.relation]} {self.other:g} is {self.answer}"


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step. The module takes parameter, gradient, the group's numbers ``inputs`` and the states of ``names``,
    and gives the new parameter and states."""

    module: torch.fx.GraphModule
    names: tuple[str, ...]
    kept: Mapping[str, torch.dtype | type]
    """What the optimizer itself keeps as each state: a dtype, or the type of a Python number."""
    dtypes: Mapping[str, torch.dtype]
    shapes: Mapping[str, tuple[int, ...]]
    shape: tuple[int, ...]
    """The parameter's shape."""
    inputs: tuple[str, ...]
    decided: frozenset[Comparison] = frozenset()
    """The comparisons that the step made with scheduled numbers, as they were when it was traced."""

    @property
    def places(self) -> list[torch.fx.Node]:
        """The placeholders."""
        return [node for node in self.module.graph.nodes if node.op == "placeholder"]

    @property
    def results(self) -> Sequence[torch.fx.Node]:
        """The nodes of the new parameter and states."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        results: Sequence[torch.fx.Node] = output.args[0]
        return results

    @property
    def is_pointwise(self) -> bool:
        """Whether the step is elementwise: of the parameter, its gradient, states of its shape, and 0-d tensors."""
        nodes = [n for n in self.module.graph.nodes if n.op not in ("placeholder", "output") and not says_nothing(n)]
        values = [value for node in nodes for value in pytree.tree_leaves(node.meta.get("val"))]
        shapes = [*self.shapes.values(), *(tuple(v.shape) for v in values if isinstance(v, Tensor))]
        return set(shapes) <= {(), self.shape} and all(map(_is_pointwise, nodes))

    def at(self, shape: Sequence[int]) -> TracedStep:
        """The elementwise step for a parameter of another shape."""
        if tuple(shape) == self.shape:
            return self

        def moved(sized: Any) -> Any:
            if isinstance(sized, Tensor) and tuple(sized.shape) == self.shape:
                return torch.empty(tuple(shape), dtype=sized.dtype, device="meta")
            return sized

        graph = torch.fx.Graph()
        graph.output(graph.graph_copy(self.module.graph, {}))
        graph.set_codegen(self.module.graph._codegen)  # by which it takes a list of states
        for node in graph.nodes:
            node.meta["val"] = pytree.tree_map(moved, node.meta.get("val"))
        module = torch.fx.GraphModule(self.module, graph)
        shapes = {name: tuple(shape) if sized else () for name, sized in self.shapes.items()}
        return replace(self, module=module, shapes=shapes, shape=tuple(shape))


def says_nothing(node: torch.fx.Node) -> bool:
    """Whether a node is a profiler annotation."""
    return "profiler" in str(node.target)


def _is_pointwise(node: torch.fx.Node) -> bool:
    op = node.target
    if node.op != "call_function":
        return False  # a constant tensor
    return isinstance(op, torch._ops.OpOverload) and (torch.Tag.pointwise in op.tags or op in OF_ONE_NUMBER)


aten = torch.ops.aten
OF_ONE_NUMBER = frozenset(
    {
        aten._to_copy.default,
        aten.clone.default,
        aten.copy.default,
        aten.copy_.default,
        aten.detach.default,
        aten.full_like.default,
        aten.lift_fresh_copy.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.zeros_like.default,
    }
)
"""Elementwise ops and fills, though torch does not tag them so."""


@contextmanager
def as_compiled() -> Iterator[None]:
    """Optimizers keep their numbers in tensors where ``torch.compile`` is at work. A number that is read out of a
    tensor is a tensor still, of Python's precision, and so is the least or largest of two."""
    low, high = _either(builtins.min, torch.minimum), _either(builtins.max, torch.maximum)
    compiling = mock.patch.object(torch.compiler, "_is_compiling_flag", True)
    with compiling, mock.patch.multiple(builtins, min=low, max=high), mock.patch.object(Tensor, "item", _number):
        yield


def _number(tensor: Tensor) -> Tensor:
    """``Tensor.item`` of a trace: a 0-d tensor."""
    return tensor.reshape(()).to(torch.float64 if tensor.is_floating_point() else tensor.dtype)


def _either(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """``min`` or ``max``; of two operands of which one is a 0-d tensor, as an op."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and any(isinstance(a, Tensor) and a.dim() == 0 for a in args):
            return traced(*(a if isinstance(a, Tensor) else torch.full((), a, dtype=torch.float64) for a in args))
        return plain(*args, **kwargs)

    return chosen


class StepProbe(TorchFunctionMode):
    """Records the line of ``file`` of each call, and comparisons with scheduled numbers. In-place methods that are
    composite (``square_``), which torch cannot functionalise, become a copy, and so do :data:`WITH_NUMBERS`."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.asked = False
        """Whether a number was asked of a tensor that has dims: its shape, or a part of that."""
        self.numbers: dict[str, tuple[Tensor, float]] = {}
        """Scheduled numbers by name: the tensor that stands for each, and its value."""
        self.decided: set[Comparison] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        relation = getattr(func, "__name__", "").strip("_")
        if relation in RELATIONS and len(args) == 2 and isinstance(args[1], (int, float)):
            for name, (number, value) in self.numbers.items():
                if number is args[0]:
                    answer = bool(getattr(operator, relation)(value, args[1]))
                    self.decided.add(Comparison(name, relation, float(args[1]), answer))
                    return answer
        if fx_traceback.has_preserved_node_meta():
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename != self.file and frame.f_back is not None:
                frame = frame.f_back
            fx_traceback.set_stack_trace([str(frame.f_lineno)])
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        in_place = name.endswith("_") and not name.endswith("__") and hasattr(Tensor, name[:-1])
        plain = name[:-1] if in_place else name
        option, compute = WITH_NUMBERS.get(plain, ("", None))
        if compute is not None and isinstance(kwargs.get(option), Tensor):
            made = compute(*args, kwargs[option])
            return args[0].copy_(made) if in_place else made
        op = getattr(getattr(torch.ops.aten, name, None), "default", None) if in_place else None
        if op is not None and op.has_kernel_for_dispatch_key(COMPOSITE):
            return args[0].copy_(getattr(args[0], plain)(*args[1:], **kwargs))
        found = func(*args, **kwargs)
        if isinstance(found, (int, float, tuple, list)) and not isinstance(found, bool):
            self.asked |= any(isinstance(arg, Tensor) and arg.dim() > 0 for arg in args)
        return found


HALVES = (torch.bfloat16, torch.float16)


def _as_kernel(compute: Callable[..., Tensor], rounded: bool = False) -> Callable[..., Tensor]:
    """A function of tensors and a number in a tensor, in the dtype in which a kernel computes, and rounded once;
    ``rounded``: the kernel rounds the number to its result's dtype, too."""

    def computed(*args: Tensor) -> Tensor:
        *operands, number = args
        sized = [each for each in operands if each.dim()] or operands
        gives = reduce(torch.promote_types, (each.dtype for each in sized))
        wide = torch.float32 if gives in HALVES else gives
        number = number.to(gives) if rounded and gives in HALVES else number
        return compute(*(each.to(wide) for each in operands), number).to(gives)

    return computed


WITH_NUMBERS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "add": ("alpha", _as_kernel(lambda x, y, alpha: x + y * alpha, rounded=True)),
    "sub": ("alpha", _as_kernel(lambda x, y, alpha: x - y * alpha, rounded=True)),
    "addcmul": ("value", _as_kernel(lambda x, a, b, value: torch.addcmul(x, a * value, b))),
    "addcdiv": ("value", _as_kernel(lambda x, a, b, value: torch.addcdiv(x, a * value, b))),
}
"""The functions that take a number, its name, and what they compute where it is in a tensor, which torch reads out."""


class StepTraces:
    """The traced steps of a plan: by group, options, dtype, and whether it is the first step."""

    def __init__(self) -> None:
        self._known: dict[Any, TracedStep] = {}

    def step(
        self,
        group: OptimizerGroup,
        shape: Sequence[int],
        dtype: torch.dtype,
        before: States,
        options: Mapping[str, Any],
        first: bool = False,
    ) -> TracedStep:
        """The step of a parameter of this shape that has the states which a first step leaves.

        Args:
            before: the states that are there before the first step; tensors alone do not tell parameters apart.
            first: the step of a parameter that has none yet.
        """
        of_tensors = all(isinstance(value, Tensor) for value in before.values())
        key = (id(group), *sorted(options), dtype, first) if len(shape) and of_tensors else None
        if key not in self._known:
            run = _LoneRun(group, tuple(shape), dtype, options)
            traced = run.trace(before, first)
            if key is None or run.probe.asked or not traced.is_pointwise:
                return traced
            self._known[key] = traced
        return self._known[key].at(shape)


@dataclass
class _LoneRun:
    """Runs of a step on one parameter as if it were the only one of its group, without content."""

    group: OptimizerGroup
    shape: tuple[int, ...]
    dtype: torch.dtype
    options: Mapping[str, Any]

    def __post_init__(self) -> None:
        self.probe = StepProbe(self.group.where.file)

    def trace(self, start: States, first: bool) -> TracedStep:
        """Trace a step on a parameter that has the states which a step leaves that begins with ``start``; ``first``:
        that has none yet, which gives them."""
        with self._fake() as (p, grad, numbers):
            faked = {n: torch.empty(v.shape, dtype=v.dtype) if is_tensor(v) else v for n, v in start.items()}
            states = self._step(p, grad, numbers, faked)
        _check_states(self.group, states)
        open_ = {n: v for n, v in states.items() if isinstance(v, (Tensor, int, float)) and type(v) is not bool}
        fixed = {name: value for name, value in states.items() if name not in open_}
        shapes = {name: tuple(value.shape) if is_tensor(value) else () for name, value in open_.items()}
        dtypes = {name: _stored_as(value) for name, value in open_.items()}

        def step(p: Tensor, grad: Tensor, numbers: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
            before = {} if first else {**fixed, **dict(zip(open_, tensors, strict=True))}
            left = self._step(p, grad, numbers, before)
            return [p, *(_tensor(left[name], dtype) for name, dtype in dtypes.items())]

        with self._fake() as (p, grad, rates), fx_traceback.preserve_node_meta():
            stored = [torch.empty(shapes[name], dtype=dtype) for name, dtype in dtypes.items()]
            made = make_fx(torch.func.functionalize(step), decompositions(), tracing_mode="fake")
            module = made(p, grad, rates, stored)
        inputs, decided = tuple(self.group.numbers), frozenset(self.probe.decided)
        kept = {name: value.dtype if is_tensor(value) else type(value) for name, value in open_.items()}
        return TracedStep(module, tuple(open_), kept, dtypes, shapes, self.shape, inputs, decided)

    @contextmanager
    def _fake(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor]]]:
        """Within, tensors are fake; gives a parameter, its gradient, and the numbers of the group."""
        with FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True), as_compiled():
            p, grad = (torch.empty(self.shape, dtype=self.dtype) for _ in range(2))
            yield p, grad, [torch.empty((), dtype=torch.float64) for _ in self.group.numbers]

    def _step(self, p: Tensor, grad: Tensor, numbers: Sequence[Tensor], states: States) -> States:
        """Step the parameter in place; gives its states."""
        lone, planned = object.__new__(type(self.group.optimizer)), self.group.numbers
        named = dict(zip(planned, numbers, strict=True))
        options = self.group.options
        how = {name: value for name, value in {**PLAIN, **self.options}.items() if name in options}
        mine = {**options, **how, "params": [p]}
        mine.update(replace_numbers(options, named))
        self.probe.numbers = {name: (named[name], planned[name]) for name in named if name != RATE}
        lone.__dict__.update(self.group.optimizer.__dict__)
        lone.param_groups, lone.state = [mine], defaultdict(dict, {p: dict(states)} if states else {})
        p.grad = grad
        with self.probe, sparse_gradient(p, self.options):
            lone.step()
        return dict(lone.state[p])


def _stored_as(value: Any) -> torch.dtype:
    """The dtype in which a program stores a state: numbers as exactly as Python does."""
    is_number = not is_tensor(value) or (value.dim() == 0 and value.dtype is torch.float32)
    return torch.float64 if is_number else value.dtype  # halves are states of a parameter without dims


def _tensor(value: Any, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if is_tensor(value) else torch.full((), value, dtype=dtype)


def _check_states(group: OptimizerGroup, states: States) -> None:
    """Check that states are tensors or numbers, not nests of them.

    Raises:
        Error: a state is a list, or the like, of such.
    """
    for key, value in states.items():
        leaves = [] if isinstance(value, (Tensor, int, float)) else pytree.tree_leaves(value)
        if any(isinstance(leaf, (Tensor, int, float)) and not isinstance(leaf, bool) for leaf in leaves):
            raise Error(
                f"a state of {group.kind} is several things in one",
                where=f"{WHERE}  {group.where}",
                expected="tensors and numbers in self.state[p], each by a name of its own",
                got=f"{key!r}, a {type(value).__name__} of {len(leaves)}",
                remedy=f"self.state[p]['{key}_0'], ...; or leave optimizer= out of the hints, and step it outside, of "
                "pm.parameters()",
            )
