"""What an odd model is: a module, the shapes of its data, a loss, and the ways in which it is sharded.

    @odd(normal(4, 6, 8), targets=(ids(5, 4),), loss=F.cross_entropy, tp={"up.weight": "tp, -"}, more={"zero": 3})
    class Model(nn.Module): ...

Each is run on ``dp=2,tp=2`` (the first argument's rows over dp), or on ``dp=3`` where no weight can be sharded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

import shardfx as sx
from tests.zoo.cases import double

Draw = Callable[[], Tensor]


def normal(*shape: int) -> Draw:
    """Numbers of both signs."""
    return lambda: torch.randn(shape)


def ids(count: int, *shape: int) -> Draw:
    """Integers below ``count``."""
    return lambda: torch.randint(count, shape)


@dataclass(frozen=True)
class Given:
    """A model with its data, newly made; ``alone`` is a second one, for one device."""

    model: nn.Module
    alone: nn.Module
    args: tuple[Any, ...]
    targets: tuple[Any, ...]


@dataclass(frozen=True)
class Odd:
    """An entry of the table: how it is made, and how it is sharded."""

    name: str
    made_by: Callable[[], nn.Module]
    args: tuple[Any, ...]
    targets: tuple[Any, ...]
    loss: Callable[..., Tensor]
    dp: Mapping[str, str]
    tp: Mapping[str, str]
    more: Mapping[str, Any]
    close: float

    def given(self) -> Given:
        """The same model and data at every call."""
        with double():
            model, alone = self.made_by(), self.made_by()
            alone.load_state_dict(model.state_dict())
            drawn = [_drawn(each) for each in (self.args, self.targets)]
        return Given(model, alone, *drawn)

    def parallel(self, given: Given) -> sx.ParallelModule:
        """The model on its mesh."""
        hints = sx.Hints(given.args, {}, self.loss, given.targets, specs={**self.dp, **self.tp}, **self.more)
        mesh = sx.Mesh(dp=2, tp=2) if self.tp else sx.Mesh(dp=3)
        return sx.parallelize(given.model, mesh, hints, virtual=True)


ODD: dict[str, Odd] = {}
"""All of them, by name."""


def odd(
    *args: Any,
    targets: tuple[Any, ...] = (),
    loss: Callable[..., Tensor] = F.mse_loss,
    dp: Mapping[str, str] | None = None,
    tp: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    close: float = 1e-9,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a class of modules.

    Args:
        args, targets: what draws each tensor, in any tuples and dicts.
        dp, tp: hints on the axes; without ``dp`` the first argument's rows are sharded.
        more: further hints.
        close: how far apart numbers may be, in view of the largest.
    """

    def entered(module: type[nn.Module]) -> type[nn.Module]:
        name = module.__name__
        rows = dp if dp is not None else {"args.0": f"dp{', -' * (_dims(args[0]) - 1)}"}
        assert name not in ODD, f"two odd models are named {name}"
        ODD[name] = Odd(name, module, args, targets, loss, rows, tp or {}, more or {}, close)
        return module

    return entered


def _dims(draw: Draw) -> int:
    with double():
        return draw().dim() if callable(draw) else 0


def _drawn(given: Any) -> Any:
    if isinstance(given, dict):
        return {name: _drawn(each) for name, each in given.items()}
    if isinstance(given, (tuple, list)):
        return type(given)(_drawn(each) for each in given)
    return given() if callable(given) else given


MLP = {"up.weight": "tp, -", "down.weight": "-, tp"}


class TwoLayers(nn.Module):
    """An up and a down."""

    def __init__(self, width: int = 6, inner: int = 8, out: int = 6) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, out)

    def both(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


# ---- against one device: two steps of training, evaluation, the proof, warnings

RATE = 0.05


def run(odd: Odd) -> list[str]:
    """Train, evaluate, prove; gives what is not as it should be: differences, verdicts, warnings."""
    given = odd.given()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "redundant compute")  # batches and heads are odd too
        pm = odd.parallel(given)
        wrong = [*trained(odd, pm, given), *evaluated(odd, pm, given)]
        verdict = pm.verify()
    return [*wrong, *([] if verdict else [str(verdict)]), *(f"warned: {each.message}" for each in caught)]


def trained(odd: Odd, pm: sx.ParallelModule, given: Given) -> list[str]:
    """What differs in two steps: losses, gradients of parameters and inputs, parameters and buffers at the end."""
    wrong: list[str] = []
    for step in range(2):
        mine, theirs = (wanting(given.args) for _ in range(2))
        ours = pm(*mine, *given.targets)
        ours.backward()
        loss = odd.loss(given.alone(*theirs), *given.targets)
        loss.backward()
        wrong += differs(f"loss of step {step}", ours, loss, odd.close)
        grads = pm.full_grads()
        own = {name: each.grad for name, each in given.alone.named_parameters() if each.grad is not None}
        wrong += [f"gradients of {set(own) ^ set(grads)} on one side"] if set(own) != set(grads) else []
        for name in {*own} & {*grads}:
            wrong += differs(f"gradient of {name} in step {step}", grads[name], own[name], odd.close)
        for at, (a, b) in enumerate(zip(tree_leaves(mine), tree_leaves(theirs), strict=True)):
            if isinstance(a, Tensor) and a.requires_grad:
                wrong += differs(f"gradient of input {at}", a.grad, b.grad, odd.close)
        for module in (pm, given.alone):
            for each in module.parameters():
                if each.grad is not None:
                    each.data -= RATE * each.grad
                    each.grad = None
    state = pm.full_state_dict()
    for name, tensor in given.alone.state_dict().items():
        wrong += differs(f"{name} at the end", state[name], tensor, odd.close)
    return wrong


def evaluated(odd: Odd, pm: sx.ParallelModule, given: Given) -> list[str]:
    """What differs in results and loss without training."""
    pm.eval(), given.alone.eval()
    with torch.no_grad():
        loss, results = pm(*given.args, *given.targets, with_results=True)
        out = given.alone(*given.args)
        theirs = odd.loss(out, *given.targets)
    wrong = differs("loss in evaluation", loss, theirs, odd.close)
    for at, (a, b) in enumerate(zip(tree_leaves(results), tree_leaves(out), strict=True)):
        wrong += differs(f"result {at} in evaluation", a, b, odd.close) if isinstance(b, Tensor) else []
    return wrong


def wanting(given: Any) -> Any:
    """The same numbers, which want gradients."""

    def wants(each: Any) -> Any:
        if not isinstance(each, Tensor):
            return each
        inexact = each.is_floating_point() or each.is_complex()
        return each.clone().requires_grad_() if inexact else each

    return tree_map(wants, given)


def differs(what: str, ours: Tensor | None, theirs: Tensor | None, close: float) -> list[str]:
    """A line if they do, by more than rounding does."""
    if ours is None or theirs is None:
        none = [each is None or not each.any() for each in (ours, theirs)]
        return [] if all(none) else [f"{what}: on one side there is none"]
    ours, theirs = ours.detach(), theirs.detach()
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return [f"{what}: {ours.dtype} {tuple(ours.shape)} for {theirs.dtype} {tuple(theirs.shape)}"]
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return []
    kind = torch.complex128 if theirs.is_complex() else torch.float64
    error = (ours.to(kind) - theirs.to(kind)).abs().max() / theirs.to(kind).abs().max().clamp_min(1e-3)
    return [] if error < close else [f"{what}: off by {error.item():.1e}"]
