"""The private parts of torch that capture replaces or relies on, in each version of torch: what it takes them for.

Each failure names what a new version of torch changed, and the module that has to follow.
"""

from __future__ import annotations

from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._functorch import eager_transforms
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.autograd.function import FunctionMeta
from torch.utils import checkpoint as torchs

from shardfx.ir.capture.abstract_tensors import AbstractTensor, TensorSignature
from shardfx.ir.capture.export_program import OF_PYTHON, own_kernels
from shardfx.ir.capture.frontend.forward_probes import GENERATOR
from shardfx.ir.capture.optimizer.step_trace import as_compiled


class Identity(torch.autograd.Function):
    """A function whose ``apply`` is bound before anything is replaced."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


apply = Identity.apply


def test_function_apply_reads_forward_from_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """capture/intake/own_gradients.py."""
    seen: list[bool] = []

    def forward(ctx: Any, x: Tensor) -> Tensor:
        seen.append(torch._C._is_fwd_grad_enabled())
        return x * 2

    def read(kind: type, name: str) -> Any:
        return forward if name == "forward" else type.__getattribute__(kind, name)

    monkeypatch.setattr(FunctionMeta, "__getattribute__", read)
    made = apply(torch.ones(2, requires_grad=True))
    assert seen == [False], "Function.apply no longer looks up cls.forward, or leaves forward-mode AD on"
    assert made.tolist() == [2, 2]
    assert made.grad_fn is not None


def test_checkpoint_takes_what_it_is_made_of_from_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """capture/intake/checkpointed.py."""
    plain, seen = getattr(torchs, GENERATOR), []

    def noted(called: Any, *rest: Any, **options: Any) -> Any:
        seen.append(called)
        return plain(called, *rest, **options)

    class Reentrant:
        @staticmethod
        def apply(called: Any, preserve_rng_state: bool, *args: Any) -> Any:
            seen.append(called)
            return called(*args)

    monkeypatch.setattr(torchs, GENERATOR, noted)
    monkeypatch.setattr(torchs, "CheckpointFunction", Reentrant)
    for reentrant in (False, True):
        assert torchs.checkpoint(torch.neg, torch.ones(2), use_reentrant=reentrant).tolist() == [-1, -1]
    assert seen == [torch.neg] * 2, "torch.utils.checkpoint.checkpoint no longer passes the function first to these"


@pytest.mark.parametrize("asked", [torch.compiler.is_compiling, torch.compiler.is_exporting])
def test_code_of_what_asks_for_the_compiler_can_be_replaced(asked: Any) -> None:
    """capture/named/whether_compiled.py."""
    assert isinstance(asked, FunctionType), f"{asked} is no Python function"
    assert isinstance(asked.__code__, CodeType)
    assert not asked.__code__.co_freevars, f"{asked} has a closure"


def test_the_flag_of_the_compiler() -> None:
    """capture/update/step_trace.py."""
    assert not torch.compiler.is_compiling()
    with as_compiled():
        assert torch.compiler.is_compiling(), "torch.compiler._is_compiling_flag is not what is_compiling() reads"


def test_transforms_begin_by_functions_of_their_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """capture/intake/transforms.py."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("refused")

    x = torch.ones(())
    monkeypatch.setattr(eager_transforms, "grad_increment_nesting", refuse)
    for transform in (torch.func.grad(torch.sin), lambda x: torch.func.vjp(torch.sin, x)):
        with pytest.raises(RuntimeError, match="refused"):
            transform(x)
    monkeypatch.setattr(eager_transforms, "jvp_increment_nesting", refuse)
    with pytest.raises(RuntimeError, match="refused"):
        torch.func.jvp(torch.sin, (x,), (x,))
    monkeypatch.setattr(forward_ad, "enter_dual_level", refuse)
    with pytest.raises(RuntimeError, match="refused"), forward_ad.dual_level():
        pass


def test_the_python_dispatcher_keeps_kernels_by_key() -> None:
    """capture/joint/own_kernels.py."""
    op = torch.ops.aten.multilabel_margin_loss_forward.default
    held = [each for each in decomposition_table if OF_PYTHON in getattr(each, "py_kernels", ())]
    assert held, "no op has a kernel of autograd's in py_kernels"
    with own_kernels():
        assert OF_PYTHON not in op.py_kernels
    assert held == [each for each in decomposition_table if OF_PYTHON in getattr(each, "py_kernels", ())]


def test_abstract_tensor_is_a_fake_tensor_to_torch() -> None:
    """capture/abstract_tensors.py."""
    mode = FakeTensorMode()
    abstract = AbstractTensor(TensorSignature((2, 3), (3, 1), torch.float32, torch.device("cpu")), mode)
    with mode:
        made = abstract.sin() + torch.empty(2, 3)
    assert (made.shape, made.device, made.dtype) == ((2, 3), torch.device("cpu"), torch.float32)
