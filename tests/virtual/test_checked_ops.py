"""Ops that raise where their operands are not what they should be: on ranks they are an error, too."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.text import parse_graph, print_graph
from tests.reference import check_step, rel_err

OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "linalg.inv": torch.linalg.inv,
    "linalg.cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(4, dtype=x.dtype)),
}


class Matrices(nn.Module):
    """A matrix of each sample, and an op of it."""

    def __init__(self, op: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 16, dtype=torch.float64)
        self.op = op

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.layer(x).view(-1, 4, 4) + 3 * torch.eye(4, dtype=x.dtype))


def loss(out: Tensor, scale: Tensor) -> Tensor:
    return (out.sin() * torch.linalg.inv(scale)[0, 0]).sum()


@pytest.mark.long
@pytest.mark.parametrize("name", OPS)
def test_factorizations_equal_one_device_and_raise_where_it_raises(name: str) -> None:
    torch.manual_seed(0)
    x, scale = torch.randn(4, 6, dtype=torch.float64), 2 * torch.eye(2, dtype=torch.float64)
    model = Matrices(OPS[name])
    alone = copy.deepcopy(model)
    hints = sx.Hints(args=(x,), loss=loss, targets=(scale,), specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    text = print_graph(pm.planned)
    assert "expects False for " in text and print_graph(parse_graph(text)) == text
    check_step(pm, alone, loss, (x,), (scale,))

    with torch.no_grad():
        pm(x)  # the check in the loss asks nothing of results
    with pytest.raises(sx.Error, match=r"linalg\.inv cannot be computed of these data"):
        pm(x, torch.zeros_like(scale))
    if name != "linalg.inv":
        return
    zeros = {"layer.weight": torch.zeros(16, 6), "layer.bias": -3 * torch.eye(4).flatten()}
    pm.load_full_state_dict({key: value.double() for key, value in zeros.items()})
    with pytest.raises(sx.Error, match=r"linalg\.inv cannot be computed of these data"):
        pm(x)


CHANCES = torch.tensor([0.0, 0.25, 1.0, 0.5], dtype=torch.float64)
WANTED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor, list[Tensor]]] = {
    "one_hot": (
        lambda x, y: x * F.one_hot(y, 4),
        torch.tensor([0, 3, 1, 3]),
        [torch.tensor([0, 4, 1, 3]), torch.tensor([0, 3, -1, 3])],
    ),
    "binary_cross_entropy": (
        lambda x, y: F.binary_cross_entropy(x.sigmoid(), y[:, None].expand(4, 4), reduction="none"),
        CHANCES,
        [CHANCES + 1, CHANCES - 1],
    ),
    "bernoulli_": (lambda x, y: x * torch.empty_like(x).bernoulli_(y), CHANCES, [-CHANCES]),
    "_assert_async": (lambda x, y: _asserted(x, y), torch.tensor(True), [torch.tensor(False)]),
}


def _asserted(x: Tensor, holds: Tensor) -> Tensor:
    torch._assert_async(holds, "it holds")
    return 2 * x


class OfTwo(nn.Module):
    """A layer, and a function of what it gives and of a second input."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4, dtype=torch.float64)
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(self.layer(x), y)


@pytest.mark.long
@pytest.mark.parametrize("name", WANTED)
def test_range_checks_of_functions_are_made_at_each_call(name: str) -> None:
    """These are decomposed when they are traced, and their checks would be lost."""
    function, good, bad = WANTED[name]
    torch.manual_seed(0)
    x, model = torch.randn(4, 6, dtype=torch.float64), OfTwo(function)
    hints = sx.Hints(args=(x, good), loss=torch.sum, specs={"args.0": "dp, -"})
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    pm(x, good).backward()
    if "bernoulli" not in name:
        assert rel_err(pm(x, good), model(x, good).sum()) < 1e-12
    assert pm.verify(), pm.verify().why
    for each in bad:
        with pytest.raises((RuntimeError, IndexError)):
            model(x, each)
        with pytest.raises(sx.Error):
            pm(x, each)


FACTORED: dict[str, Callable[[Tensor], Tensor]] = {
    "det of a slice": lambda x: torch.linalg.det(x[:, :6]),
    "solve": lambda x: torch.linalg.solve(x[:, :6].T + torch.eye(6, dtype=x.dtype), x),
}


@pytest.mark.long
@pytest.mark.parametrize(("name", "specs"), [("det of a slice", {"args.0": "r, -"}), ("solve", {"weight": "r, -"})])
def test_gradients_of_factorizations_do_not_depend_on_strides(name: str, specs: dict[str, str]) -> None:
    """Kernels factor a matrix or the transposed one, as it lies in memory: gathered columns lie otherwise than rows."""
    torch.manual_seed(0)
    x, layer = torch.randn(6, 7, dtype=torch.float64), nn.Linear(7, 8, bias=False, dtype=torch.float64)

    class Factored(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(layer.weight.detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            return FACTORED[name](x @ self.weight.T).sin().sum()

    model, alone = Factored(), Factored()
    hints = sx.Hints(args=(x,), loss=lambda out: out, specs=specs)
    pm = sx.parallelize(model, sx.Mesh(r=2), hints, virtual=True)
    check_step(pm, alone, lambda out: out, (x,))


class Density(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.distributions.Normal(self.linear(x), scale, validate_args=True).log_prob(x[:, :4])


def test_a_distribution_that_validates_its_arguments() -> None:
    """What it validates is asked of each call, with guards."""
    torch.manual_seed(0)
    model, x, scale = Density().double(), torch.randn(8, 8, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    hints = sx.Hints(args=(x, scale), loss=torch.mean, specs={"args.0": "dp, -"}, guard=True)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints)
    assert torch.allclose(pm(x, 2 * scale), model(x, 2 * scale).mean(), rtol=0, atol=1e-12)
    with pytest.raises(sx.Error, match=r"(?s)distribution that validates.*Normal"):
        pm(x, -scale)


def test_ctc_loss_is_computed_outside() -> None:
    x, y = torch.randn(8, 6, 4, dtype=torch.float64), torch.randint(1, 4, (8, 3))
    lengths = torch.full((8,), 6), torch.tensor([3, 2, 3, 1, 3, 2, 3, 1])
    model = nn.Linear(4, 4).double()

    def loss(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.ctc_loss(out.log_softmax(-1).transpose(0, 1), y, *lengths)

    with pytest.raises(sx.Error, match=r"(?s)ctc_loss cannot be captured.*outside"):
        sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), loss=loss, targets=(y,)))
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), specs={"args.0": "dp, -, -"}))
    loss(pm(x), y).backward(), loss(model(x), y).backward()
    assert model.weight.grad is not None
    assert torch.allclose(pm.full_grads()["weight"], model.weight.grad, rtol=0, atol=1e-12)


def test_masked_scatter_of_too_few_values_is_an_error_on_ranks_too() -> None:
    """Each rank's part of the mask has one place for the one value: the whole has two, which torch refuses."""

    class Put(nn.Module):
        def forward(self, x: Tensor, mask: Tensor, values: Tensor) -> Tensor:
            return x.masked_scatter(mask, values)

    x, values = torch.zeros(2, 3, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    one, two = torch.zeros(2, 3, dtype=torch.bool), torch.zeros(2, 3, dtype=torch.bool)
    one[0, 1] = two[0, 1] = two[1, 2] = True
    hints = sx.Hints(args=(x, one, values), specs={"args.0": "r, -", "args.1": "r, -"})
    with torch.no_grad():
        pm = sx.parallelize(Put(), sx.Mesh(r=2), hints, virtual=True)
        assert torch.equal(pm(x, one, values), x.masked_scatter(one, values))
        with pytest.raises(sx.Error, match=r"[Nn]umber of elements of source"):
            pm(x, two, values)
