"""Comparison of a captured graph with eager PyTorch, on the example: loss, results, gradients and buffers.

Code may do something else while it is traced (``torch.compiler.is_compiling()``, ``isinstance(x, FakeTensor)``), and
torch's Python decompositions of ops, which are traced, may differ from their kernels. So a model whose weights and
examples have content is run as it is beside its graph. What differs by more than rounding is compared again in float64,
where rounding is smaller by 2**29 than in float32 and another function differs as before; then it is an error.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.stateless import _reparametrize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map, tree_map_only

from shardfx.ir.builder import Call
from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Output, OutputKind, Value
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.ops.traits import draws, positional, with_defaults
from shardfx.ir.shards import wide
from shardfx.ir.spec import as_it_lies

from .canonical.batch_norms import BatchNorm, BatchParts
from .convert import ProgramNames
from .data_dependent import stored
from .frontend.model_preparation import Scopes, copied, python_state_restored, stand_in
from .frontend.routed_experts import experts_routed
from .graph_interpreter import interpret

aten = torch.ops.aten
MAX_NUMEL = 2**24
"""Elements of weights and inputs: a larger model costs more to run than to capture, and is not run, unless it is traced
with its content, which is a run already."""
TIGHT, LOOSE = 0.75, 0.5
"""Tolerance: the epsilon of the coarsest dtype to this power (6e-6 in float32), relative to the largest element that
differs; LOOSE where the model does not run in float64."""
SHARE = 2.0**-12
"""Rounding in float64, at most: as a share of that in float32, and in the model's own dtypes."""
COMPARED = (OutputKind.LOSS, OutputKind.RESULT, OutputKind.GRADIENT, OutputKind.BUFFER)
Draws = Mapping[Value, Call]
"""The values of a graph that are made of shardfx's random numbers, and torch's call that each stands for."""
RunOutputs = dict[str, Tensor]
"""The outputs of a run by name: ``loss``, ``result 0``, ``gradient fc.weight``, ``buffer norm.running_mean``."""


class EagerReference:
    """A model and its loss run eagerly on the example, once and before any trace, to be compared with captured graphs.

    It is not run where weights or examples have no content. ``note`` says that the model does not run on its example
    (token ids that were never set, say). ``recast``: it computes in another dtype than its parameters'.
    ``kept``: outputs that the code keeps, and are not compared.
    """

    def __init__(
        self,
        program: nn.Module,
        tensors: tuple[Tensor, ...],
        names: ProgramNames,
        parts: BatchParts,
        *,
        guarded: bool = False,
        recast: bool = False,
        kept: Collection[str] = (),
        scopes: Scopes = (),
    ) -> None:
        self._program, self._given, self._names, self._parts = program, tensors, names, parts
        self.note, self._recast, self._kept = "", recast, kept
        self._expected: RunOutputs = {}
        self.raised: Exception | None = None
        everything = [*program.parameters(), *program.buffers(), *tensors]
        self._runs = all(each.device.type == "cpu" and not isinstance(each, FakeTensor) for each in everything)
        self._runs &= guarded or sum(each.numel() for each in everything) <= MAX_NUMEL
        if self._runs:
            try:
                with _stand_ins(program), python_state_restored(program, scopes=scopes):
                    self._expected = self._eager(program, tensors, ReproducibleRun())
            except Exception as error:  # reported where the capture succeeds, or fails too
                self.raised = error

    def check(self, graph: Graph, drawn: Draws) -> None:
        """Raise if an output of a captured graph is not what the model computes.

        Raises:
            Error: one is not, which it names; the model does not run in the dtype in which it is to compute.
        """
        if isinstance(self.raised, Error):
            raise self.raised
        if self.raised is not None:
            if isinstance(self.raised, RuntimeError) and self._recast and "dtype" in str(self.raised):
                raise _mixed_dtypes(self.raised) from self.raised
            kind = type(self.raised).__name__
            self.note = f"the model does not run on its example, so its trace was not compared ({kind}: {self.raised})"
        if not self._runs or self.raised is not None:
            return
        mode = ReproducibleRun() if graph.of_kind(InputKind.SEED) else None
        got, expected = self._captured(graph, drawn, mode), self._expected
        epsilon = max(epsilon_of(value.type.dtype) for value in graph.values())
        names = [name for name in dict.fromkeys((*got, *expected)) if name not in self._kept]
        differing = _differing(names, got, expected, epsilon**TIGHT)
        differing = self._beyond_rounding(graph, drawn, got, differing, epsilon) if differing else []
        if differing:
            raise _traced_differs(graph, differing[0], got, expected)

    def _beyond_rounding(
        self, graph: Graph, drawn: Draws, got: RunOutputs, names: list[str], epsilon: float
    ) -> list[str]:
        """The differing outputs that differ in float64 too, by more than its rounding."""
        try:
            mode = ReproducibleRun(torch.float64)
            own = copied(self._program, {})._apply(mode.cast)  # `to` would make complex parameters real
            inputs = [mode.cast(each.detach()).requires_grad_(each.requires_grad) for each in self._given]
            ours, theirs = self._captured(graph, drawn, mode), self._eager(own, inputs, mode)
            coarse = self._captured(graph, drawn, ReproducibleRun(torch.float32))
        except Exception:  # of code that takes no other precision
            most = max(_largest(wide(each.detach()).abs()) for each in self._expected.values())
            return _differing(names, got, self._expected, epsilon**LOOSE, epsilon * most)

        def is_rounding(name: str) -> bool:
            pairs = (ours, theirs), (coarse, ours), (got, ours), (self._expected, theirs)
            far, *rounding = (_largest(_distance(one.get(name), other.get(name))[0]) for one, other in pairs)
            there = all(name in run for run in (got, self._expected, ours, theirs))
            return there and far <= SHARE * min(max(rounding), torch.finfo(torch.float32).max)

        return [name for name in names if not is_rounding(name)]

    def _eager(self, program: nn.Module, tensors: Sequence[Tensor], mode: ReproducibleRun) -> RunOutputs:
        """The outputs of the program, whose buffers are its own, by torch's own autograd. Generators are left as they
        were."""
        model: nn.Module = program.get_submodule("model")
        aliases, trains = self._names.aliases, self._names.loss is not None
        before = [name for name, _ in model.named_buffers(remove_duplicate=False) if name in aliases]
        own = [as_it_lies(each).requires_grad_(each.requires_grad) for each in tensors]  # which may be written into
        parameters = dict(model.named_parameters(remove_duplicate=False))
        with _seeded(), ReferenceOps(self._parts), mode, experts_routed(model, eager=True):
            outs = program(*own)
            trained: dict[str, Tensor] = {aliases[name]: p for name, p in parameters.items() if p.requires_grad}
            trained |= {name: x for name, x in zip(self._names.leaves, own, strict=True) if x.requires_grad}
            for each in trained.values():
                each.grad = None
            if trains and outs[0].requires_grad and trained:
                outs[0].backward(torch.full_like(outs[0], self._names.seed))
        after = dict(model.named_buffers(remove_duplicate=False))
        made = {"loss": outs[0].detach()} if trains else {}
        made |= {f"result {number}": each.detach() for number, each in enumerate(outs[trains:])}
        made |= {f"gradient {name}": each.grad.to_dense() for name, each in trained.items() if each.grad is not None}
        known = (name for name in before if name in after)  # one that had no content is no input
        return made | {f"buffer {aliases[name]}": after[name].detach() for name in known}

    def _captured(self, graph: Graph, drawn: Draws, mode: ReproducibleRun | None) -> RunOutputs:
        """The outputs of the graph, on the same weights and inputs."""
        model, names = self._program.get_submodule("model"), self._names
        buffers = dict(model.named_buffers(remove_duplicate=False))
        known = {names.aliases[name]: each.detach() for name, each in stored(model).items()}
        known |= {name: each.detach() for name, each in zip(names.leaves, self._given, strict=True)}
        known |= {each.name: each.constant for each in graph.inputs if each.constant is not None}
        for each in graph.inputs:
            if each.kind is InputKind.SEED:
                known[each.name] = torch.zeros((), dtype=torch.int64)
            elif each.kind is InputKind.STATE and each.name == names.seed_state:
                known[each.name] = torch.tensor(names.seed, dtype=torch.float64)
        if mode is not None:
            known = {name: mode.cast(each) for name, each in known.items()}
        values = {output.value for output in graph.outputs}
        with _seeded(), mode or nullcontext():
            env = interpret(graph, known, only=values, instead=drawn)
        made = {output_name(output): env[output.value] for output in graph.outputs if output.kind in COMPARED}
        return {f"buffer {names.aliases[name]}": each for name, each in buffers.items()} | made


def output_name(output: Output) -> str:
    """The name of an output of a graph, as runs have it."""
    if output.kind is OutputKind.LOSS:
        return "loss"
    return f"{output.kind.value} {output.name.removeprefix('results.')}"


@contextmanager
def _stand_ins(program: nn.Module) -> Iterator[None]:
    """Within, a program has copies of its parameters and buffers, which may be changed and have no hooks."""
    own = stored(program)
    made = {id(each): stand_in(each, each.detach().clone()) for each in own.values()}
    tensors = {name: made[id(each)] for name, each in own.items()}
    with _reparametrize_module(program, tensors):
        yield


@contextmanager
def _seeded() -> Iterator[None]:
    """Within, the CPU's generator begins at seed 0 (``torch.manual_seed`` would seed GPUs too)."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        yield


# ---- tolerance ----------------------------------------------------------------------------------------------------


def epsilon_of(dtype: torch.dtype) -> float:
    """The epsilon of a floating dtype; 0 of others."""
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def _distance(ours: Tensor | None, theirs: Tensor | None) -> tuple[Tensor, float]:
    """The elementwise distance of two outputs, and the largest element of theirs that differs. The distance is infinite
    where shapes differ, or one is NaN or infinite and the other is not the same. An output that a run does not have is
    zero."""
    mine, other = (None if each is None else wide(each.detach()) for each in (ours, theirs))
    mine = torch.zeros_like(other) if mine is None and other is not None else mine
    other = torch.zeros_like(mine) if other is None and mine is not None else other
    if mine is None or other is None or mine.shape != other.shape:
        return torch.tensor(torch.inf), 0.0
    same = (mine == other) | (mine.isnan() & other.isnan())
    far = torch.where(same, 0.0, (mine - other).abs().nan_to_num(torch.inf, torch.inf, torch.inf))
    return far, _largest(torch.where(far > 0, other.abs().nan_to_num(0.0, 0.0, 0.0), 0.0))


def _differing(
    names: Iterable[str], got: RunOutputs, expected: RunOutputs, tolerance: float, least: float = 0.0
) -> list[str]:
    """The outputs that differ by more than ``tolerance`` times the largest element that does, and than ``least``."""
    found = {name: _distance(got.get(name), expected.get(name)) for name in names}
    return [name for name, (far, largest) in found.items() if _largest(far) > max(tolerance * largest, least)]


def _largest(each: Tensor) -> float:
    return each.max().item() if each.numel() else 0.0


# ---- modes --------------------------------------------------------------------------------------------------------


class ReproducibleRun(TorchDispatchMode):
    """Within, each draw of random numbers starts from seed 0: draws of one shape and kind are equal, in any order and
    by any generator. Attention has no dropout.

    With a ``dtype`` all floating numbers are of it, whatever the code says.
    """

    def __init__(self, dtype: torch.dtype | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._dtype is not None:
            args, kwargs = tree_map(self.cast, (args, kwargs))
        if draws(func):
            out = self._drawn(func, args, kwargs)
        elif func in (attention, attention_backward):
            names = [each.name for each in func._schema.arguments]
            out = func(*(0.0 if name == "p" else arg for name, arg in zip(names, args, strict=False)), **kwargs)
        elif func.namespace == "shardfx":  # which may make numbers of a dtype within
            with self:
                out = func.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
        else:
            out = func(*args, **kwargs)
        return out if self._dtype is None or func._schema.is_mutable else tree_map(self.cast, out)

    def cast(self, each: Any) -> Any:
        """A dtype, a tensor, or a number, in the dtype of this run."""
        if self._dtype is None:
            return each
        if (
            isinstance(each, float) and torch.finfo(self._dtype).max < abs(each) < math.inf
        ):  # what a mask is filled with
            return math.copysign(torch.finfo(self._dtype).max, each)
        if isinstance(each, torch.dtype) and (each.is_floating_point or each.is_complex):
            return self._dtype.to_complex() if each.is_complex else self._dtype
        if isinstance(each, Tensor) and (each.is_floating_point() or each.is_complex()):
            dtype = self.cast(each.dtype)
            return each if each.dtype is dtype else each.to(dtype)
        return each

    def _drawn(self, func: Any, args: Any, kwargs: Any) -> Any:
        torch.default_generator.manual_seed(0)
        if kwargs.get("generator") is not None:
            kwargs["generator"].manual_seed(0)
        changed = args[0] if func._schema.is_mutable else None
        args = tree_map_only(Tensor, Tensor.contiguous, args) if changed is None else args  # whose order numbers have
        if changed is None or changed.is_contiguous():
            return func(*args, **kwargs)
        changed.copy_(func(torch.empty_like(changed, memory_format=torch.contiguous_format), *args[1:], **kwargs))
        return changed


class ReferenceOps(TorchFunctionMode):
    """Within, batch norms normalise the parts of the batch that the hints say, with statistics as wide as in graphs,
    and attention has no dropout, whose mask differs by kernel; also where torch's own functions call them."""

    def __init__(self, parts: BatchParts) -> None:
        super().__init__()
        norm, sdpa, normalise = aten.batch_norm.default, F.scaled_dot_product_attention, BatchNorm(parts)

        def normalised(*args: Any, **kwargs: Any) -> Tensor:
            return normalise(*positional(norm, with_defaults(norm, args, kwargs)))

        def attended(*args: Any, **kwargs: Any) -> Any:
            return sdpa(**{**with_defaults(aten.scaled_dot_product_attention.default, args, kwargs), "dropout_p": 0.0})

        self._instead = {torch.batch_norm: normalised, norm: normalised}
        self._instead |= dict.fromkeys((sdpa, aten.scaled_dot_product_attention.default), attended)
        self._within = ExitStack()

    def __enter__(self) -> Any:
        for place, name in ((torch, "batch_norm"), (F, "scaled_dot_product_attention")):
            self._within.enter_context(mock.patch.object(place, name, self._instead[getattr(place, name)]))
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
        self._within.close()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._instead.get(func, func)(*args, **kwargs or {})


# ---- errors -------------------------------------------------------------------------------------------------------


def _traced_differs(graph: Graph, name: str, ours: RunOutputs, theirs: RunOutputs) -> Error:
    output = next((each for each in graph.outputs if output_name(each) == name), None)
    made_in = (output.value.where if output is not None else None) or ""
    mine, other = ours.get(name), theirs.get(name)
    got, expected = ("nothing" if each is None else f"shape {tuple(each.shape)}" for each in (mine, other))
    if mine is not None and other is not None and mine.shape == other.shape:
        at = int(_distance(mine, other)[0].flatten().argmax())
        got, expected = (f"{each.flatten()[at].item():.6g}" for each in (mine, other))
    return Error(
        "the model computes something else when it is traced",
        where=f"{name}, on the example inputs" + (f": made in {made_in}" if str(made_in) else ""),
        expected=f"{expected}, as the model gives",
        got=f"{got}, as it was traced",
        remedy="look for code that asks whether it is traced or compiled (torch.compiler.is_compiling(), "
        "torch.jit.is_tracing()), and let it do the same in both; in transformers, masks are made in two ways: pass "
        "the one that is meant as attention_mask; wrap an op whose decomposition differs from its kernel in a "
        "torch.library.custom_op with a gradient",
    )


def _mixed_dtypes(error: RuntimeError) -> Error:
    return Error(
        "the model does not run in the dtype in which it is to compute",
        where="Hints(mixed_precision=...)",
        expected="a model that casts what it keeps in another dtype, such as a buffer, before it multiplies by it",
        got=str(error).splitlines()[0],
        remedy="register such buffers in that dtype, or cast them in forward; or name the modules that compute as they "
        "are: MixedPrecision(..., keep=...)",
    )
