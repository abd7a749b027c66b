"""What an odd model is: a module, the shapes of its data, a loss, and the ways in which it is sharded.

    @odd(normal(4, 6, 8), targets=(ids(5, 4),), loss=F.cross_entropy, tp={"up.weight": "tp, -"}, more={"zero": 3})
    class Model(nn.Module): ...

Each is run on ``dp=2`` (the first argument's rows), on ``tp=2`` where a weight can be sharded, and on both with
``more``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardfx as sx
from tests.zoo.cases import double

Draw = Callable[[], Tensor]


def normal(*shape: int) -> Draw:
    """Numbers of both signs."""
    return lambda: torch.randn(shape)


def uniform(*shape: int) -> Draw:
    """Numbers between 0.1 and 1."""
    return lambda: torch.rand(shape) * 0.9 + 0.1


def ids(count: int, *shape: int) -> Draw:
    """Integers below ``count``."""
    return lambda: torch.randint(count, shape)


def flags(*shape: int) -> Draw:
    """Booleans, of which the first of each row is true."""

    def draw() -> Tensor:
        made = torch.rand(shape) < 0.6
        made[..., 0] = True
        return made

    return draw


def waves(*shape: int) -> Draw:
    """Complex numbers."""
    return lambda: torch.randn(shape, dtype=torch.complex128)


@dataclass(frozen=True)
class Given:
    """A model with its data, newly made; ``alone`` is a second one, for one device."""

    model: nn.Module
    alone: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]


@dataclass(frozen=True)
class Odd:
    """An entry of the table: how it is made, and how it is sharded."""

    name: str
    made_by: Callable[[], nn.Module]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    targets: tuple[Any, ...]
    loss: Callable[..., Tensor]
    dp: Mapping[str, str]
    tp: Mapping[str, str]
    more: Mapping[str, Any] = field(default_factory=dict)
    always: Mapping[str, Any] = field(default_factory=dict)
    close: float = 1e-9

    def given(self) -> Given:
        """The same model and data at every call."""
        with double():
            model, alone = self.made_by(), self.made_by()
            alone.load_state_dict(model.state_dict())
            drawn = [_drawn(each) for each in (self.args, self.kwargs, self.targets)]
        return Given(model, alone, *drawn)

    def ways(self) -> Iterator[str]:
        """The meshes on which it is run."""
        yield "dp=2"
        if self.tp:
            yield from ("tp=2", "dp=2,tp=2")
        else:
            yield "dp=3"

    def hints(self, way: str, given: Given, **more: Any) -> sx.Hints:
        """What is said of it on a mesh: what it holds of its own is said on the mesh that is the last."""
        specs = {**(self.dp if "dp" in way else {}), **(self.tp if "tp" in way else {})}
        own = self.more if way in ("dp=2,tp=2", "dp=3") else {}
        hinted = {**self.always, **own, **more}
        return sx.Hints(given.args, given.kwargs, self.loss, given.targets, specs=specs, **hinted)


ODD: dict[str, Odd] = {}
"""All of them, by name."""


def mesh(way: str) -> sx.Mesh:
    """``dp=2,tp=2`` as a mesh."""
    return sx.Mesh(**{axis: int(size) for axis, _, size in (each.partition("=") for each in way.split(","))})


def odd(
    *args: Any,
    kwargs: Mapping[str, Any] | None = None,
    targets: tuple[Any, ...] = (),
    loss: Callable[..., Tensor] = F.mse_loss,
    dp: Mapping[str, str] | None = None,
    tp: Mapping[str, str] | None = None,
    more: Mapping[str, Any] | None = None,
    always: Mapping[str, Any] | None = None,
    close: float = 1e-9,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Enter a class of modules.

    Args:
        args, kwargs, targets: what draws each tensor, in any tuples and dicts.
        dp, tp: hints on the axes; without ``dp`` the first argument's rows are sharded.
        more: further hints, on the last mesh; ``always``: on all.
        close: how far apart numbers may be, in view of the largest.
    """

    def entered(module: type[nn.Module]) -> type[nn.Module]:
        name = module.__name__
        rows = dp if dp is not None else {"args.0": f"dp{', -' * (_dims(args[0]) - 1)}"}
        assert name not in ODD, f"two odd models are named {name}"
        given = (args, kwargs or {}, targets, loss, rows, tp or {}, more or {}, always or {}, close)
        ODD[name] = Odd(name, module, *given)
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
