"""torch's fused optimizer kernels, and the calls of a segment that one of them computes.

    aten.lerp.Scalar(c1, c2, 0.1)
    aten.mul.Tensor(c3, 0.999)                              aten._fused_adamw_.tensor_lr([c0], [c2], [c1], [c3], [],
    aten.addcmul.default(r1, c2, c2, value=0.001)     ->        [s1], lr=s0, beta1=0.9, beta2=0.999, eps=1e-08, ...)
    ...

A kernel is data: what it computes, as the terms that torch's own single-tensor step is made of, over tensors and
hyperparameters that are named as in the kernel's schema. Calls are a kernel's if their results are these terms, op by
op and number by number: nothing is assumed about arithmetic. What computes the gradient (clipping, a loss scale) stays
a call, and runs before the kernel.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.ops.local_ops import OVERWRITING
from shardfx.ir.ops.traits import with_defaults

from .segment import CAST, COPY, SegmentCall, SegmentRef, call_text, home, read_call

aten = torch.ops.aten
PLAIN_FORMS = {form: op for op, form in OVERWRITING.items()}
"""The op of each ``out`` variant."""


@dataclass(frozen=True)
class Name:
    """A tensor argument of a kernel, by name."""

    name: str


@dataclass(frozen=True)
class Number:
    """A hyperparameter of a kernel, by name; or one minus it (``complement``)."""

    name: str
    complement: bool = False


@dataclass(frozen=True)
class KernelTerm:
    """A call of terms; ``args`` are all that differ from the op's defaults, by name."""

    op: Any
    args: Mapping[str, Any]


@dataclass(frozen=True)
class FusedKernel:
    """A fused kernel with some flags.

    Args:
        op: of lists of tensors, which it writes over.
        results: by the name of a list that is written, the term that its tensors become.
        fixed: the arguments that say which of the kernel's variants it is.
    """

    op: Any
    results: Mapping[str, KernelTerm]
    fixed: Mapping[str, Any]


def _term(op: Any, *args: Any, **kwargs: Any) -> KernelTerm:
    return KernelTerm(op, with_defaults(op, args, kwargs))


def _decayed(decays: bool) -> Any:
    """The gradient with weight decay."""
    if not decays:
        return Name("grads")
    return _term(aten.add.Tensor, Name("grads"), Name("self"), alpha=Number("weight_decay"))


def _adam(decays: bool, decoupled: bool, amsgrad: bool) -> FusedKernel:
    """``torch.optim.adam._single_tensor_adam``; ``decoupled``: that of AdamW."""
    new: Name | KernelTerm = Name("self")
    lr, step, grad = Name("lr"), Name("state_steps"), _decayed(decays and not decoupled)
    if decoupled:
        rate = _term(aten.rsub.Scalar, _term(aten.mul.Tensor, lr, Number("weight_decay")), 1)
        new = _term(aten.mul.Tensor, new, rate)
    mean = _term(aten.lerp.Scalar, Name("exp_avgs"), grad, Number("beta1", complement=True))
    square = _term(aten.mul.Tensor, Name("exp_avg_sqs"), Number("beta2"))
    square = _term(aten.addcmul.default, square, grad, grad, value=Number("beta2", complement=True))
    largest = _term(aten.maximum.default, Name("max_exp_avg_sqs"), square) if amsgrad else square
    corrections = [_term(aten.rsub.Scalar, _term(aten.pow.Scalar, Number(b), step), 1) for b in ("beta1", "beta2")]
    root = _term(aten.pow.Tensor_Scalar, corrections[1], 0.5)
    rate = _term(aten.neg.default, _term(aten.div.Tensor, lr, corrections[0]))
    divisor = _term(aten.div.Tensor, _term(aten.sqrt.default, largest), root)
    divisor = _term(aten.add.Tensor, divisor, Number("eps"))
    stepped = _term(aten.addcdiv.default, new, _term(aten.mul.Tensor, mean, rate), divisor)
    results = {"self": stepped, "exp_avgs": mean, "exp_avg_sqs": square}
    results |= {"max_exp_avg_sqs": largest} if amsgrad else {}
    op = aten._fused_adamw_ if decoupled else aten._fused_adam_
    fixed = {"amsgrad": amsgrad, "maximize": False} | ({} if decays else {"weight_decay": 0.0})
    return FusedKernel(op.tensor_lr, results, fixed)


def _sgd(decays: bool, momentum: bool, nesterov: bool) -> FusedKernel:
    """``torch.optim.sgd._single_tensor_sgd`` without dampening: then a buffer of zeros is none yet."""
    grad = _decayed(decays)
    results = {}
    if momentum:
        by = Number("momentum")
        buffer = _term(aten.add.Tensor, _term(aten.mul.Tensor, Name("momentum_buffer_list"), by), grad)
        results["momentum_buffer_list"] = buffer
        grad = _term(aten.add.Tensor, grad, buffer, alpha=by) if nesterov else buffer
    step = _term(aten.mul.Tensor, grad, _term(aten.neg.default, Name("lr")))
    results["self"] = _term(aten.add.Tensor, Name("self"), step)
    fixed = {"dampening": 0.0, "nesterov": nesterov, "maximize": False, "is_first_step": False}
    fixed |= ({} if decays else {"weight_decay": 0.0}) | ({} if momentum else {"momentum": 0.0})
    return FusedKernel(aten._fused_sgd_.tensor_lr, results, fixed)


KERNELS: tuple[FusedKernel, ...] = (
    *(_adam(*flags) for flags in itertools.product((False, True), repeat=3) if flags[0] or not flags[1]),
    *(_sgd(*flags) for flags in itertools.product((False, True), repeat=3) if flags[1] or not flags[2]),
)
"""Of those that torch has for CPUs and CUDA."""


@dataclass(frozen=True)
class Fusion:
    """A kernel that computes what calls do.

    Args:
        computed: the numbers of the calls that it stands for.
        call: of the kernel: lists of columns and of results of other calls; the learning rate and step counts.
        scalars: the last two.
    """

    computed: frozenset[int]
    call: str
    scalars: tuple[SegmentRef, ...]


@functools.lru_cache(maxsize=4096)
def fusion_of(calls: tuple[str, ...], gives: tuple[int, ...]) -> Fusion | None:
    """The kernel that computes most of what calls give, over what they write; None where there is none.

    Other calls may compute the gradient that it takes; they write nothing that it writes.
    """
    read = [read_call(text) for text in calls]
    last = {home(read, SegmentRef("r", number)): number for number in range(len(read))}
    columns = {
        SegmentRef("c", column): last[SegmentRef("c", column)] for column in gives if SegmentRef("c", column) in last
    }
    if len(columns) != len(gives):
        return None
    found = list[Fusion]()
    for kernel in KERNELS:
        if len(kernel.results) != len(columns):
            continue
        for order in itertools.permutations(columns):
            wanted = dict(zip(kernel.results, order, strict=True))
            match = _Match(read, wanted)
            if all(match.same(kernel.results[name], SegmentRef("r", columns[c])) for name, c in wanted.items()):
                found += _fusions(kernel, match)
    return max(found, key=lambda each: len(each.computed), default=None)


def run_of(calls: Sequence[str], gives: Sequence[int]) -> list[str]:
    """What is run for calls that a kernel computes: what it does not, and the kernel; nothing where there is none."""
    found = fusion_of(tuple(calls), tuple(gives))
    if found is None or any(each.kind != "s" for each in found.scalars):
        return []
    read = [read_call(text) for text in calls]
    others = [number for number in range(len(read)) if number not in found.computed]
    places = {SegmentRef("r", number): SegmentRef("r", place) for place, number in enumerate(others)}
    kernel = read_call(found.call)
    return [_moved(call, places) for call in (*(read[number] for number in others), kernel)]


def _moved(call: SegmentCall, places: Mapping[SegmentRef, SegmentRef]) -> str:
    def put(arg: Any) -> Any:
        return places.get(arg, arg) if isinstance(arg, SegmentRef) else arg

    return call_text(call.op, *fx.node.map_aggregate((call.args, call.kwargs), put))


class _Match:
    """Terms of a kernel, matched with calls: what its names and numbers stand for, and which calls it computes."""

    def __init__(self, calls: Sequence[SegmentCall], names: Mapping[str, SegmentRef]) -> None:
        self.calls = calls
        self.names: dict[str, SegmentRef] = dict(names)
        self.numbers: dict[str, float] = {}
        self.complements: dict[str, float] = {}
        self.computed: set[int] = set()

    def same(self, term: Any, found: Any) -> bool:
        """Whether what stands in calls is a term."""
        if isinstance(term, Name):
            found = self.uncast(found)
            return isinstance(found, SegmentRef) and self.names.setdefault(term.name, found) == found
        if isinstance(term, Number):
            known = self.complements if term.complement else self.numbers
            return type(found) in (int, float) and known.setdefault(term.name, found) == found
        if not isinstance(term, KernelTerm):
            return type(term) is type(found) and bool(term == found)
        found = self.uncast(found)
        if not isinstance(found, SegmentRef) or found.kind != "r":
            return False
        call = self.calls[found.index]
        if PLAIN_FORMS.get(call.op, call.op) is not term.op:
            return False
        bound = with_defaults(term.op, call.args, {key: arg for key, arg in call.kwargs.items() if key != "out"})
        if bound.keys() != term.args.keys() or not all(self.same(term.args[key], bound[key]) for key in bound):
            return False
        self.computed.add(found.index)
        return True

    def uncast(self, found: Any) -> Any:
        """Behind casts: a kernel computes columns of 16 bits in float32, and rounds what it writes."""
        while isinstance(found, SegmentRef) and found.kind == "r" and self.calls[found.index].op in (CAST, COPY):
            self.computed.add(found.index)
            found = self.calls[found.index].args[-1]
        return found


def _fusions(kernel: FusedKernel, match: _Match) -> list[Fusion]:
    """The call of a kernel with what was matched, if that may run behind all other calls."""
    numbers, calls = match.numbers, match.calls
    if any(key not in numbers or 1 - numbers[key] != found for key, found in match.complements.items()):
        return []
    others = [number for number in range(len(calls)) if number not in match.computed]
    written = {match.names[name] for name in kernel.results}
    if any(home(calls, SegmentRef("r", number)) in written for number in others):
        return []
    taken = {ref.index for number in others for ref in calls[number].refs if ref.kind == "r"}
    taken |= {ref.index for ref in match.names.values() if ref.kind == "r"}
    if taken & match.computed:
        return []
    args, kwargs = list[Any](), dict[str, Any]()
    for each in kernel.op._schema.arguments:
        if str(each.type) == "List[Tensor]":
            args.append([match.names[each.name]] if each.name in match.names else [])
        elif each.name == "lr":
            kwargs["lr"] = match.names["lr"]
        elif not each.has_default_value():
            fixed = kernel.fixed.get(each.name)
            kwargs[each.name] = float(numbers[each.name]) if fixed is None else fixed
    scalars = tuple(match.names[name] for name in ("lr", "state_steps") if name in match.names)
    return [Fusion(frozenset(match.computed), call_text(kernel.op, args, kwargs), scalars)]
