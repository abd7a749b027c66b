"""Experts of transformers as products with routed rows, by the interface that their modules have for that.

    experts(hidden [n h], ids [n k], weights [n k])       ->  shardfx.routed_mm(hidden, gate_up, ids), ...

A class that ``use_experts_implementation`` of transformers decorates says of itself what it has: a gate, biases, how
matrices are stored. So a trace needs none of its implementations, which loop over experts that got a token, or sort
rows; and takes float64.

Experts that are modules of their own, called one after the other on the rows that ``torch.where`` finds for each
(Switch Transformers, NLLB-MoE), say nothing; they are known by what they consist of:

    experts(hidden [n h], mask [n k g] or ids [n k], weights [n k])    ->  shardfx.routed_mm(hidden, stack(w), ids), ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from shardfx.ir.errors import Error
from shardfx.ir.ops.experts.routed_product import routed_mm

SAYS = ("has_gate", "has_bias", "has_post_expert_norm", "is_transposed", "is_concatenated", "_apply_gate")
"""What such a module says of itself."""
PLAIN = (int, float, str, type(None))
IMPLEMENTATIONS = (None, "eager", "grouped_mm", "batched_mm")
"""The implementations of transformers that compute the same; a user's own stays what it is."""


def is_routed(module: nn.Module) -> bool:
    """Whether a module is the experts of a model of transformers, on one device, by one of its own implementations."""
    known = all(hasattr(module, name) for name in SAYS) and not getattr(module, "_is_expert_parallel", True)
    return known and getattr(module.config, "_experts_implementation", "") in IMPLEMENTATIONS


def is_looped(module: nn.Module) -> bool:
    """Whether a module is experts of transformers that are modules of their own: all alike, each of two linear layers,
    an activation and a dropout between them, as they were written: without hooks, and with no other ``forward``."""
    if not isinstance(module, nn.ModuleDict) or not type(module).__module__.startswith("transformers.models."):
        return False
    experts = _experts(module)
    inside = [each for expert in experts for each in expert.modules()]
    known = len(experts) == getattr(module, "num_experts", 0) and {*module} <= {
        *(f"expert_{i}" for i in range(len(experts))),
        "token_dropout",
    }
    known &= all(_described(expert) == _described(experts[0]) for expert in experts) and all(
        map(_is_as_written, (module, *inside))
    )
    for expert in experts:
        linear = {*_linear_names(expert)}
        known &= len(linear) == 2 and expert._modules.keys() - linear == {"act", "dropout"}
    return known and not any(each._forward_hooks or each._forward_pre_hooks for each in inside)


def _described(module: nn.Module) -> list[Any]:
    """What a module and those in it are: equal for two that compute the same of their parameters."""
    return [
        (path, type(each), name, value if isinstance(value, PLAIN) else id(value))
        for path, each in module.named_modules()
        for name, value in {"": None, **vars(each)}.items()
        if not name.startswith("_")
    ]


def _is_as_written(module: nn.Module) -> bool:
    """Whether the ``forward`` of a module of torch or transformers is that of its class."""
    forward = type(module).forward
    library = forward.__module__.startswith(("torch.nn.", "transformers."))
    return library and "forward" not in vars(module) and forward.__name__ == "forward"


def _experts(module: nn.ModuleDict) -> list[nn.Module]:
    return [each for name, each in module.items() if name.startswith("expert_")]


def _linear_names(expert: nn.Module) -> list[str]:
    """The names of the linear layers of an expert, in their order."""
    return [name for name, each in expert.named_children() if type(each) is nn.Linear]


def routed_experts(self: Any, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the experts of each token make of it: ``[n h]``."""
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    up_bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    rows = _linear(hidden.unsqueeze(1).to(up.dtype), up, up_bias, ids, self.is_transposed)
    rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
    rows = _linear(rows, down, self.down_proj_bias if self.has_bias else None, ids, self.is_transposed)
    if self.has_post_expert_norm:
        rows = self.post_expert_norm(rows)
    return (rows * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def looped_experts(self: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what the chosen experts of each token make of it, ``[n h]``: by their ids ``[n k]``, or by a
    mask ``[n k g]``, in which a token beyond the capacity of its expert has none."""
    ids = torch.where(chosen.any(-1), chosen.argmax(-1), -1) if chosen.dim() == 3 else chosen
    experts: list[Any] = _experts(self)
    drop = experts[0].dropout
    assert all(each.dropout.p == drop.p and each.dropout.training == drop.training for each in experts)  # guards
    up, down = _linear_names(experts[0])
    rows = drop(experts[0].act(_stacked(experts, up, hidden.unsqueeze(1), ids)))
    rows = _stacked(experts, down, rows, ids) * weights.unsqueeze(-1)
    if (share := getattr(self, "moe_token_dropout", 0)) > 0:
        rows = self.token_dropout(rows) if self.training else rows * (1 - share)
    made: Tensor = rows.to(hidden.dtype).sum(1)
    return made


def _stacked(experts: Sequence[nn.Module], name: str, x: Tensor, ids: Tensor) -> Tensor:
    """A linear layer of each expert."""
    layers: list[Any] = [getattr(expert, name) for expert in experts]
    w = torch.stack([each.weight for each in layers])
    bias = None if layers[0].bias is None else torch.stack([each.bias for each in layers])
    return _linear(x.to(w.dtype), w, bias, ids, False)


def _linear(x: Tensor, w: Tensor, bias: Tensor | None, ids: Tensor, transposed: bool) -> Tensor:
    made: Tensor = routed_mm(x, w if transposed else w.transpose(1, 2), ids)
    if bias is None:
        return made
    of_bias: Tensor = routed_mm(x.new_ones((x.shape[0], 1, 1)), bias.unsqueeze(1), ids)
    return made + of_bias


def _unconverted(self: nn.Module, convert: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """``module.to(dtype)`` in a forward, which changes nothing where it is in that already.

    Raises:
        Error: it changes a parameter or a buffer.
    """
    for module in self.modules() if recurse else (self,):
        for name, each in (*module._parameters.items(), *module._buffers.items()):
            if each is not None and _is_other(each, made := convert(each)):
                raise Error(
                    "the model's code converts its own modules",
                    expected="parameters and buffers that are in that dtype before the call",
                    got=f"{name} of {made.dtype}, which was of {each.dtype}",
                    remedy="convert it before, as model.router.classifier.to(dtype); with mixed_precision=, let it be "
                    'as it is: MixedPrecision(torch.bfloat16, keep="**.router")',
                )
    return self


def _is_other(was: Tensor, made: Tensor) -> bool:
    """Whether a conversion makes something else; a copy in the same dtype is none."""
    if made is was:
        return False
    known = isinstance(was, (FakeTensor, FunctionalTensor)) or was.is_meta
    return known or made.dtype != was.dtype or not torch.equal(made, was)


def _draws(module: nn.Module) -> bool:
    """Whether experts that are modules draw random numbers of their rows, which other rows would have otherwise."""
    drops = (each for each in module.modules() if isinstance(each, nn.Dropout))
    return is_looped(module) and module.training and any(each.p > 0 for each in drops)


@contextmanager
def experts_routed(model: nn.Module, eager: bool = False) -> Iterator[list[nn.Module]]:
    """Within, the experts of transformers in a model, which it gives, are :func:`routed_experts` or
    :func:`looped_experts`, and modules convert no weights. ``eager``: those alone that draw random numbers, so that
    they draw those of a trace."""
    kinds = ((_draws, looped_experts),) if eager else ((is_routed, routed_experts), (is_looped, looped_experts))
    modules = [module for module in model.modules() if "forward" not in vars(module)]
    found = {module: forward for module in modules for known, forward in kinds if known(module)}
    for module, forward in found.items():
        vars(module)["forward"] = MethodType(forward, module)
    try:
        with mock.patch.object(nn.Module, "_apply", _unconverted):
            yield [*found]
    finally:
        for module in found:
            del vars(module)["forward"]
