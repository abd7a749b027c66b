"""Op instances from PyTorch's own operator database: the ATen calls of its samples, forward and backward.

An op that changes its argument is recorded as the one that gives a new tensor, as in a captured graph; an op that
capture decomposes (:data:`shardfx.ir.capture.trace.DECOMPOSED`) as its parts. Left out, as capture refuses them: ops
that draw random numbers, and ops whose result's shape depends on the values.
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves

from shardfx.ir.capture.canonical.decompositions import DECOMPOSED
from shardfx.ir.capture.canonical.random_numbers import draws_nothing
from shardfx.ir.ops.traits import positional, storage_offset, with_defaults
from shardfx.ir.oracle.instance import Instance, instance

MOST_ELEMENTS = 3000
"""Larger tensors make a sample slow to shard, and teach no more."""
REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
aten = torch.ops.aten


class Recorder(TorchDispatchMode):
    """Keeps the calls of ops: at most ``most`` of one overload, no two of the same shapes and arguments."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.found: dict[Any, dict[object, Instance]] = {}
        self.left_out: set[Any] = set()
        self._parts = get_decompositions(DECOMPOSED)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in self._parts and func not in self.found:
            with self:
                return self._parts[func](*args, **kwargs)
        self.record(func, args, kwargs)
        return func(*args, **kwargs)

    def record(self, func: Any, args: Any, kwargs: Any) -> None:
        """Keep a call, if it is of a kind that a captured graph can have."""
        func = functional(func)
        if func is None:
            return
        if storage_offset(func, args, kwargs) == 0:  # capture leaves it out
            args, kwargs = positional(func, with_defaults(func, args, kwargs) | {"storage_offset": None}), {}
        if refused(func, args, kwargs):
            self.left_out.add(func)
            return
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if any(t.numel() > MOST_ELEMENTS or t.layout != torch.strided or t.is_quantized for t in tensors):
            return
        key = signature(args, kwargs)
        known = self.found.setdefault(func, {})
        if key in known or len(known) >= self.most:
            return
        try:
            made = instance(func, args, kwargs)
        except Exception:  # a call that fails on its own is no instance
            return
        if all(r is None or r.layout == torch.strided for r in made.results):
            known[key] = made


def refused(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether capture writes no such call: it draws random numbers, the shape of its result depends on values, or it
    is a view at a storage offset."""
    if storage_offset(func, args, kwargs) is not None:
        return True
    if func is aten.index.Tensor:
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if torch.Tag.nondeterministic_seeded in func.tags and draws_nothing(func, args, kwargs):
        return False
    return any(tag in func.tags for tag in REFUSED)


def functional(func: Any) -> Any:
    """The op that gives a new tensor where ``func`` changes one; None if there is none."""
    if not func._schema.is_mutable:
        return func
    namespace, name = func._schema.name.split("::")
    if name in ("copy_", "resize_", "resize_as_", "set_") or not name.endswith("_") or name.startswith("_foreach"):
        return None
    packet = getattr(getattr(torch.ops, namespace), name[:-1], None)
    overload = getattr(packet, func._overloadname, None) if packet is not None else None
    return overload if overload is not None and not overload._schema.is_mutable else None


def signature(args: Any, kwargs: Any) -> object:
    """Equal for calls of the same shapes, dtypes and other arguments."""
    leaves, tree = tree_flatten((args, kwargs))
    return str(tree), tuple(
        (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )


def record(
    samples: int = 6, most: int = 6, progress: Callable[[str], None] | None = None, every: int = 1, seed: int = 0
) -> Recorder:
    """Run the samples of the operator database, forward and backward, and keep what they call; of every so many-th op
    alone if ``every`` says so. With another ``seed`` there are other samples, of other values."""
    from torch.testing._internal.common_methods_invocations import op_db

    recorder = Recorder(most)
    for info in op_db[::every]:
        if torch.float64 not in info.dtypes or info.name.startswith("jiterator"):
            continue
        if progress is not None:
            progress(info.name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for sample in _samples(info, samples, seed):
                _run(info, sample, recorder)
    return recorder


def _samples(info: Any, most: int, seed: int) -> Iterator[Any]:
    """The first samples of an op, and a few of those behind."""
    torch.manual_seed(seed)
    try:
        given = list(
            itertools.islice(info.sample_inputs("cpu", torch.float64, requires_grad=info.supports_autograd), 60)
        )
    except Exception:  # a sample that this build cannot make
        return
    step = max(len(given) // most, 1)
    yield from given[seed % step :: step][:most]


def _run(info: Any, sample: Any, recorder: Recorder) -> None:
    try:
        with recorder:
            out = info.op(sample.input, *sample.args, **sample.kwargs)
    except Exception:  # a sample that this build cannot run
        return
    outs, inputs = _differentiable(out), _differentiable((sample.input, sample.args, sample.kwargs))
    if not outs or not inputs:
        return
    torch.manual_seed(1)
    grads = [torch.randn_like(t) for t in outs]
    try:
        with recorder:
            torch.autograd.grad(outs, inputs, grads, allow_unused=True)
    except Exception:  # a backward that this build does not have
        return


def _differentiable(tree: Any) -> list[torch.Tensor]:
    tensors = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
    return [t for t in tensors if t.requires_grad and t.layout == torch.strided]
