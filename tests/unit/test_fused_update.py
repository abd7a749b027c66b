"""Fused optimizer kernels: each computes the calls that it stands for, and nothing else is taken for one."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from shardfx.ir.ops.computing.fused_update import KERNELS, FusedKernel, KernelTerm, Name, Number, run_of
from shardfx.ir.ops.computing.segment import SegmentRef, call_text, read_call, segment
from shardfx.ir.ops.local_ops import OVERWRITING
from tests.on_gpu import without_synchronisation

NUMBERS = {
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-3,
    "lr_decay": 0.25,
    "momentum": 0.75,
    "weight_decay": 0.125,
}
SCALARS = {"lr": SegmentRef("s", 0), "state_steps": SegmentRef("s", 1)}


def written(kernel: FusedKernel) -> tuple[list[str], list[int], dict[str, SegmentRef]]:
    """The calls of a kernel, each result over the column that it is the new content of; and the columns by name."""
    calls, known, columns = list[str](), dict[int, SegmentRef](), dict[str, SegmentRef]()

    def put(term: Any, into: str = "") -> Any:
        if isinstance(term, Name):
            return SCALARS.get(term.name) or columns.setdefault(term.name, SegmentRef("c", len(columns)))
        if isinstance(term, Number):
            return 1 - NUMBERS[term.name] if term.complement else NUMBERS[term.name]
        if not isinstance(term, KernelTerm):
            return term
        if id(term) not in known:
            args, named = list[Any](), dict[str, Any]()
            for each in term.op._schema.arguments:
                arg = put(term.args[each.name])
                args += [] if each.kwarg_only else [arg]
                named |= {each.name: arg} if each.kwarg_only else {}
            named |= {"out": put(Name(into))} if into else {}
            calls.append(call_text(OVERWRITING[term.op] if into else term.op, args, named))
            known[id(term)] = SegmentRef("r", len(calls) - 1)
        return known[id(term)]

    order = sorted(kernel.results, key=lambda name: name == "self")  # which is made of the others
    for name in order:
        put(kernel.results[name], name)
    return calls, [columns[name].index for name in order], columns


def name_of(kernel: FusedKernel) -> str:
    """The kernel and its flags."""
    flags = [key for key, value in kernel.fixed.items() if value is True]
    flags += [f"no {key}" for key, value in kernel.fixed.items() if value == 0 and value is not False]
    return " ".join([kernel.op._schema.name.removeprefix("aten::"), *flags])


def both(kernel: FusedKernel, dtype: torch.dtype, device: str = "cpu") -> tuple[list[Tensor], list[Tensor]]:
    """What a kernel gives for three parameters after three steps, and what its calls give in float64."""
    calls, gives, columns = written(kernel)
    fused = run_of(calls, gives)
    generator = torch.Generator().manual_seed(0)
    shapes = [(3, 5), (7,), (2, 3, 4)]
    draws = [[torch.rand(shape, generator=generator) + 0.5 for _ in columns] for shape in shapes]
    mine = [draw.to(device, dtype) for row in draws for draw in row]
    theirs = [draw.to(dtype).double() for row in draws for draw in row]
    got, wanted = [], []
    for step in range(1, 4):
        scalars = [torch.tensor(number, dtype=torch.float64) for number in (0.03125, float(step))]
        there = [each.to(device) for each in scalars]
        with without_synchronisation() if device == "cuda" else nullcontext():
            got = segment(calls, gives, 3, mine, there, fused)
        wanted = segment(calls, gives, 3, theirs, scalars)
    return got, wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_kernel_computes_its_calls(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """With all flags; to the rounding of the dtype."""
    calls, gives, _ = written(kernel)
    (text,) = run_of(calls, gives)
    run = read_call(text)
    assert run.op is kernel.op
    assert {**kernel.fixed, **run.kwargs} == run.kwargs
    assert all(run.kwargs[name] in (value, 0.0) for name, value in NUMBERS.items() if name in run.kwargs)
    far = 8 * torch.finfo(dtype).eps
    got, wanted = both(kernel, dtype)
    assert len(got) == len(kernel.results) * 3
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=far, atol=far)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_kernel_computes_its_calls_on_cuda(kernel: FusedKernel, dtype: torch.dtype) -> None:
    """Without a synchronisation of the host."""
    got, wanted = both(kernel, dtype, "cuda")
    far = 8 * torch.finfo(dtype).eps
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine.double().cpu(), theirs, rtol=far, atol=far)


def adamw() -> FusedKernel:
    """That with weight decay, and nothing else."""
    return next(each for each in KERNELS if name_of(each) == "_fused_adamw_")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("aten.sqrt.default", "aten.abs.default"),
        ("0.19999999999999996", "0.2"),
        ("0.5)", "0.25)"),
        ("lerp.Scalar_out(c0, c1", "lerp.Scalar_out(c0, c2"),
        ("out=c3)", "out=c1)"),
    ],
)
def test_calls_that_differ_are_no_kernel(old: str, new: str) -> None:
    """In an op, a number, an operand, or in where they leave their result."""
    calls, gives, _ = written(adamw())
    assert run_of(calls, gives)
    changed = [call.replace(old, new) for call in calls]
    assert changed != calls
    assert not run_of(changed, gives)


@pytest.mark.parametrize("layout", ["a gradient transposed", "all transposed", "a state transposed"])
def test_members_that_a_kernel_does_not_take_are_computed_all_the_same(layout: str) -> None:
    """A gradient is copied; what is written elsewhere than in the order of the parameter goes call by call."""
    calls, gives, columns = written(adamw())
    names = list(columns)
    rows = [[torch.rand(6, 4, dtype=torch.float32) + 0.5 for _ in names] for _ in range(2)]
    odd = {"a gradient transposed": ["grads"], "all transposed": names, "a state transposed": ["exp_avgs"]}
    for name in odd[layout]:
        rows[0][names.index(name)] = rows[0][names.index(name)].t().contiguous().t()
    scalars = [torch.tensor(number, dtype=torch.float64) for number in (0.1, 2.0)]
    copies = [column.clone() for row in rows for column in row]
    got = segment(calls, gives, 2, [column for row in rows for column in row], scalars, run_of(calls, gives))
    wanted = segment(calls, gives, 2, copies, scalars)
    assert all(a is rows[i // 3][gives[i % 3]] for i, a in enumerate(got))
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-6) for a, b in zip(got, wanted, strict=True))
