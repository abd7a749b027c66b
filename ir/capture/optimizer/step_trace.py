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
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import traceback as fx_traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from shardfx.ir.capture.canonical.decompositions import decompositions
from shardfx.ir.errors import Error

from .optimizer_groups import RATE, WHERE, OptimizerGroup, replace_numbers

PLAIN = {"foreach": False, "fused": False, "differentiable": False}
"""Options of how a step is computed, not of what."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
States = dict[str, Any]


class Comparison(NamedTuple):
    """A comparison that a step makes with a scheduled number (``weight_decay != 0``), and its result."""

    name: str
    relation: str
    other: float
    answer: bool

    def holds(self, value: float) -> bool:
        """Whether the result is the same for another value."""
        return bool(getattr(operator, self.relation)(value, self.other)) is self.answer


@dataclass(frozen=True, eq=False)
class TracedStep:
    """A traced step. The module takes parameter, gradient, the group's numbers ``inputs`` and the states of ``names``,
    and gives the new parameter and states. ``numbers`` are those states that the optimizer keeps as Python numbers."""

    module: torch.fx.GraphModule
    names: tuple[str, ...]
    numbers: Mapping[str, type]
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
        return output.args[0]  # type: ignore[return-value]

    @property
    def is_pointwise(self) -> bool:
        """Whether the step is elementwise: of the parameter, its gradient, states of its shape, and 0-d tensors."""
        nodes = [n for n in self.module.graph.nodes if n.op not in ("placeholder", "output") and not says_nothing(n)]
        values = [value for node in nodes for value in pytree.tree_leaves(node.meta.get("val"))]
        shapes = [*self.shapes.values(), *(tuple(v.shape) for v in values if isinstance(v, torch.Tensor))]
        return set(shapes) <= {(), self.shape} and all(map(_is_pointwise, nodes))

    def at(self, shape: Sequence[int]) -> TracedStep:
        """The elementwise step for a parameter of another shape."""
        if tuple(shape) == self.shape:
            return self

        def moved(sized: Any) -> Any:
            if isinstance(sized, torch.Tensor) and tuple(sized.shape) == self.shape:
                return torch.empty(tuple(shape), dtype=sized.dtype, device="meta")
            return sized

        graph = torch.fx.Graph()
        places: dict[torch.fx.Node, torch.fx.Node] = {}
        graph.output(graph.graph_copy(self.module.graph, places))
        graph.set_codegen(self.module.graph._codegen)  # by which it takes a list of states
        for node in graph.nodes:
            node.meta["val"] = pytree.tree_map(moved, node.meta.get("val"))
        shapes = {name: tuple(shape) if sized else () for name, sized in self.shapes.items()}
        module = torch.fx.GraphModule(self.module, graph)
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
        aten.copy_.default,
        aten.detach.default,
        aten.full_like.default,
        aten.lift_fresh_copy.default,
        aten.ones_like.default,
        aten.scalar_tensor.default,
        aten.zeros_like.default,
        aten._local_scalar_dense.default,
    }
)
"""Elementwise ops and fills, though torch does not tag them so."""


@contextmanager
def as_compiled() -> Iterator[None]:
    """Optimizers keep their numbers in tensors where ``torch.compile`` is at work. A number that is read out of a
    tensor is a tensor still, of Python's precision, and so is the least or largest of two."""
    flag, low, high, item = torch.compiler._is_compiling_flag, builtins.min, builtins.max, torch.Tensor.item
    torch.compiler._is_compiling_flag = True
    builtins.min, builtins.max = _either(low, torch.minimum), _either(high, torch.maximum)
    torch.Tensor.item = _number  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = flag
        builtins.min, builtins.max = low, high
        torch.Tensor.item = item  # type: ignore[method-assign]


def _number(tensor: torch.Tensor) -> torch.Tensor:
    """``Tensor.item`` of a trace: a 0-d tensor."""
    return tensor.reshape(()).to(torch.float64 if tensor.is_floating_point() else tensor.dtype)


def _either(plain: Callable[..., Any], traced: Callable[..., Any]) -> Callable[..., Any]:
    """``min`` or ``max``; of two operands of which one is a 0-d tensor, as an op."""

    def chosen(*args: Any, **kwargs: Any) -> Any:
        if len(args) == 2 and not kwargs and any(isinstance(a, torch.Tensor) and a.dim() == 0 for a in args):
            return traced(*(a if isinstance(a, torch.Tensor) else torch.full((), a, dtype=torch.float64) for a in args))
        return plain(*args, **kwargs)

    return chosen


class StepProbe(TorchFunctionMode):
    """Records the line of ``file`` of each call, and comparisons with scheduled numbers. In-place methods that are
    composite (``square_``), which torch cannot functionalise, become a copy."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file
        self.asked = False
        """Whether a number was asked of a tensor that has dims: its shape, or a part of that."""
        self.numbers: dict[str, tuple[torch.Tensor, float]] = {}
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
        name = getattr(func, "__name__", "")
        if name.endswith("_") and not name.endswith("__") and hasattr(torch.Tensor, name[:-1]):
            op = getattr(getattr(torch.ops.aten, name, None), "default", None)
            if op is not None and op.has_kernel_for_dispatch_key(COMPOSITE):
                return args[0].copy_(getattr(args[0], name[:-1])(*args[1:], **(kwargs or {})))
        found = func(*args, **(kwargs or {}))
        if isinstance(found, (int, float, tuple, list)) and not isinstance(found, bool):
            self.asked |= any(isinstance(arg, torch.Tensor) and arg.dim() > 0 for arg in args)
        return found


RELATIONS = ("eq", "ne", "lt", "le", "gt", "ge")


def lone_step(
    group: OptimizerGroup,
    p: torch.Tensor,
    grad: torch.Tensor,
    numbers: Mapping[str, torch.Tensor],
    states: States,
    options: Mapping[str, Any],
    watched: StepProbe,
) -> States:
    """Step one parameter as if it were the only one of the group, in place; gives its states."""
    kind = type(group.optimizer)
    lone = object.__new__(kind)
    lone.__dict__.update(group.optimizer.__dict__)
    mine: dict[str, Any] = {**group.options, "params": [p]}
    mine.update({name: value for name, value in {**PLAIN, **options}.items() if name in mine})
    mine.update(replace_numbers(group.options, numbers))
    planned = group.numbers
    watched.numbers = {name: (numbers[name], planned[name]) for name in numbers if name != RATE}
    lone.param_groups, lone.state = [mine], defaultdict(dict)
    if states:
        lone.state[p] = dict(states)
    p.grad = grad
    with watched:
        lone.step()
    return dict(lone.state[p])


def first_states(
    group: OptimizerGroup, shape: Sequence[int], dtype: torch.dtype, states: States, watched: StepProbe, **options: Any
) -> States:
    """The states that a first step leaves of a parameter of this shape; tensors have no content."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode, as_compiled():
        p, grad = (torch.empty(tuple(shape), dtype=dtype) for _ in range(2))
        faked = {name: _fake(mode, value) for name, value in states.items()}
        numbers = {name: torch.empty((), dtype=torch.float64) for name in group.numbers}
        return lone_step(group, p, grad, numbers, faked, options, watched)


def _fake(mode: FakeTensorMode, value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if isinstance(value, torch.Tensor) else value


def trace_step(
    group: OptimizerGroup,
    shape: Sequence[int],
    dtype: torch.dtype,
    states: States,
    first: bool,
    watched: StepProbe,
    **options: Any,
) -> TracedStep:
    """Trace a step on a parameter that has ``states`` (tensors without content, or numbers); ``first``: on one that has
    none yet, which gives them."""
    fixed = {name: value for name, value in states.items() if _is_fixed(value)}
    open_ = {name: value for name, value in states.items() if name not in fixed}
    names = tuple(open_)
    numbers = {name: type(value) for name, value in open_.items() if not isinstance(value, torch.Tensor)}
    shapes = {name: tuple(v.shape) if isinstance(v, torch.Tensor) else () for name, v in open_.items()}
    dtypes = {name: held_as(value) for name, value in open_.items()}

    inputs = tuple(group.numbers)

    def step(
        p: torch.Tensor, grad: torch.Tensor, numbers: list[torch.Tensor], tensors: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        start = {} if first else {**fixed, **dict(zip(names, tensors, strict=True))}
        left = lone_step(group, p, grad, dict(zip(inputs, numbers, strict=True)), start, options, watched)
        return [p, *(_tensor(left[name], dtypes[name]) for name in names)]

    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    with mode, as_compiled(), fx_traceback.preserve_node_meta():
        p, grad = (torch.empty(tuple(shape), dtype=dtype) for _ in range(2))
        rates = [torch.empty((), dtype=torch.float64) for _ in inputs]
        given = [torch.empty(shapes[name], dtype=dtypes[name]) for name in names]
        made = make_fx(torch.func.functionalize(step), decompositions(), tracing_mode="fake")
        module = made(p, grad, rates, given)
    return TracedStep(module, names, numbers, dtypes, shapes, tuple(shape), inputs, frozenset(watched.decided))


def held_as(value: Any) -> torch.dtype:
    """The dtype in which a program holds a state: numbers as exactly as Python does."""
    if isinstance(value, torch.Tensor):
        is_number = value.dim() == 0 and value.dtype is torch.float32  # halves are states of a parameter without dims
        return torch.float64 if is_number else value.dtype
    return torch.float64


def _is_fixed(value: Any) -> bool:
    """Whether a state is no number and no tensor: it must not change."""
    return not isinstance(value, (torch.Tensor, int, float)) or isinstance(value, bool)


def _tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value if value.dtype == dtype else value.to(dtype)
    return torch.full((), value, dtype=dtype)


class StepTraces:
    """The traced steps of a plan: by group, options, dtype, and whether it is the first step."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[States, TracedStep]] = {}

    def step(
        self,
        group: OptimizerGroup,
        shape: Sequence[int],
        dtype: torch.dtype,
        states_: States,
        options: Mapping[str, Any],
        first: bool = False,
    ) -> tuple[States, TracedStep]:
        """The states that a step keeps, and the step of a parameter of this shape that has them.

        Args:
            given: the states that are there before the first step.
            first: the step of a parameter that has none yet.
        """
        key = (id(group), *sorted(options), dtype, first) if len(shape) and _all_tensors(states_) else None
        if key not in self._known:
            watched = StepProbe(group.where.file)
            states = first_states(group, shape, dtype, states_, watched, **options)
            _check_states(group, states)
            traced = trace_step(group, shape, dtype, states, first, watched, **options)
            if key is None or watched.asked or not traced.is_pointwise:
                return states, traced
            self._known[key] = states, traced
        states, traced = self._known[key]
        return states, traced.at(shape)


def _check_states(group: OptimizerGroup, states: States) -> None:
    """Check that states are tensors or numbers, not nests of them.

    Raises:
        Error: a state is a list, or the like, of such.
    """
    for key, value in states.items():
        leaves = [] if isinstance(value, (torch.Tensor, int, float)) else pytree.tree_leaves(value)
        if any(isinstance(leaf, (torch.Tensor, int, float)) and not isinstance(leaf, bool) for leaf in leaves):
            raise Error(
                f"a state of {group.kind} is several things in one",
                where=f"{WHERE}  {group.where}",
                expected="tensors and numbers in self.state[p], each by a name of its own",
                got=f"{key!r}, a {type(value).__name__} of {len(leaves)}",
                remedy=f"self.state[p]['{key}_0'], ...; or leave optimizer= out of the hints, and step it outside, of "
                "pm.parameters()",
            )


def _all_tensors(states: States) -> bool:
    """Whether nothing among the states could make the step of one parameter another than that of the next."""
    return all(isinstance(value, torch.Tensor) for value in states.values())
