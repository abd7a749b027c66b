"""Ops that have a kernel and a gradient of their own are traced as these, which eager torch runs.

    F.multilabel_margin_loss(x, y)  ->  aten.multilabel_margin_loss_forward(x, y, 1), and behind it its backward

For some of them torch has another form in Python, for its compilers (this one's counts padded places as targets, in
2.13).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import _C
from torch._decomp import decomposition_table

OF_PYTHON = _C.DispatchKey.Autograd
COMPOSED = _C.DispatchKey.CompositeImplicitAutograd


@contextmanager
def own_kernels() -> Iterator[None]:
    """Within, torch's Python dispatcher takes none of these forms."""
    held = {op: op.py_kernels.pop(OF_PYTHON) for op in _with_other_forms() if OF_PYTHON in op.py_kernels}
    for op in held:
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, form in held.items():
            op.py_kernels[OF_PYTHON] = form
            op._dispatch_cache.clear()


@cache
def _with_other_forms() -> tuple[Any, ...]:
    return tuple(op for op in decomposition_table if isinstance(op, torch._ops.OpOverload) and _is_one(op))


def _is_one(op: torch._ops.OpOverload) -> bool:
    of_python = OF_PYTHON in op.py_kernels and COMPOSED not in op.py_kernels
    of_its_own = all(
        _C._dispatch_has_computed_kernel_for_dispatch_key(op.name(), key) for key in ("AutogradCPU", "CPU")
    )
    return of_python and of_its_own and not op._can_decompose()
