"""What stays one op, or becomes another one, at capture: resized pictures, lookups, batch norms, complex numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import op_name
from tests.reference import check_step


class Picture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.interpolate(self.first(x), scale_factor=(1.5, 0.7), mode="bilinear"))


class Resized(nn.Module):
    def __init__(self, how: dict[str, Any]) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, **self.how)


class LastOf(nn.Module):
    """Rows of each sample, counted from either end."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(12, 6), nn.Linear(6, 5)

    def forward(self, ids: Tensor, at: Tensor) -> Tensor:
        return self.head(self.emb(ids)[torch.arange(ids.shape[0])[:, None], at])


def squares(out: Tensor) -> Tensor:
    return (out**2).mean()


def beside_one_device(model: nn.Module, args: tuple[Tensor, ...], mesh: sx.Mesh, specs: dict[str, str]) -> list[str]:
    """The ops of the plan, once loss, gradients and buffers are equal to one device's and the plan is proven."""
    alone = copy.deepcopy(model)
    pm = sx.parallelize(model, mesh, sx.Hints(args=args, loss=squares, specs=specs, strict=True), virtual=True)
    check_step(pm, alone, squares, args, bound=1e-11)
    return [op_name(node.op) for node in pm.planned.nodes]


@pytest.mark.long
def test_a_resized_picture_is_one_op_each_way() -> None:
    x, mesh = torch.randn(4, 3, 8, 8, dtype=torch.float64), sx.Mesh(dp=2, tp=2)
    specs = {"args.0": "dp, -, -, -", "first.weight": "tp, -, -, -"}
    ops = [op for op in beside_one_device(Picture().double(), (x,), mesh, specs) if "upsample" in op]
    assert len(ops) == 2 and "backward" in ops[1] and "backward" not in ops[0]


@pytest.mark.long
def test_a_lookup_within_rows_sends_nothing() -> None:
    ids, at = torch.randint(0, 12, (8, 7)), torch.randint(-7, 7, (8, 3))
    specs = {"args.0": "dp, -", "args.1": "dp, -"}
    ops = beside_one_device(LastOf().double(), (ids, at), sx.Mesh(dp=4), specs)
    assert {op for op in ops if op.startswith("comm.")} == {"comm.all_reduce"}
    assert "aten.gather" in ops and "aten.index" not in ops


def test_an_index_out_of_a_row_is_an_error() -> None:
    ids, at = torch.randint(0, 12, (8, 7)), torch.zeros(8, 1, dtype=torch.int64)
    hints = sx.Hints(args=(ids, at), loss=squares, specs={"args.0": "dp, -", "args.1": "dp, -"})
    pm = sx.parallelize(LastOf(), sx.Mesh(dp=2), hints, virtual=True)
    with pytest.raises(sx.Error, match="out of bounds"):
        pm(ids, torch.full((8, 1), -8))


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_a_resized_picture_of_bytes_matches_eager(mode: str) -> None:
    """The kernel rounds in integers, and torch's decomposition does not."""
    x, model = torch.randint(0, 256, (4, 3, 8, 6), dtype=torch.uint8), Resized({"mode": mode, "scale_factor": 2.0})
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(x,), specs={"args.0": "dp, -, -, -"}), virtual=True)
    assert torch.equal(pm(x), model(x))


RESIZED = {
    "bilinear": ({"mode": "bilinear", "size": (6, 3)}, 5),
    "copied, bilinear": ({"mode": "bilinear", "size": (4, 6), "align_corners": True}, 4),
}


@pytest.mark.parametrize("name", RESIZED)
def test_a_resized_picture_of_what_is_infinite(name: str) -> None:
    """A row that lies beside those that another is made of is no part of it, not with a weight of zero either."""
    how, size = RESIZED[name]
    x = torch.randn(1, 2, size, size, dtype=torch.float64)
    x[0, 0, 2, 2], x[0, 1, 0, 0] = float("inf"), float("nan")
    weight = torch.randn(1, 2, *how["size"], dtype=torch.float64)
    weight[0, 0, -1, 1] = float("inf")
    model, mine = Resized({"mode": "area", **how}), x.clone().requires_grad_()

    def weighed(out: Tensor, by: Tensor) -> Tensor:
        return (out * by).sum()

    weighed(model(x.requires_grad_()), weight).backward()
    hints = sx.Hints(args=(mine,), loss=weighed, targets=(weight,), specs={"args.0": "-, -, x, -"})
    pm = sx.parallelize(model, sx.Mesh(x=2), hints)
    loss, out = pm(mine, weight, with_results=True)
    loss.backward()
    torch.testing.assert_close(out, model(x), equal_nan=True)
    torch.testing.assert_close(mine.grad, x.grad, equal_nan=True)


class Eighths(nn.Module):
    """A layer whose product goes through eight bits, as it is done for products of such numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.layer(x)
        scale = h.detach().abs().max() / 448
        few = (h / scale).to(torch.float8_e4m3fn)
        return self.head(h + (few.float() * scale - h).detach()), few


@pytest.mark.long
def test_numbers_of_eight_bits_are_cast_and_given_back() -> None:
    """Torch neither promotes them nor asks which are finite."""
    torch.manual_seed(0)
    model, x = Eighths(), torch.randn(4, 8)
    hints = sx.Hints(args=(x,), loss=lambda out: squares(out[0]), specs={"args.0": "r, -", "layer.weight": "r, -"})
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(r=2), hints, virtual=True)
    loss, (_, few) = pm(x, with_results=True)
    torch.testing.assert_close(loss, squares(model(x)[0]))
    assert torch.equal(few.float(), model(x)[1].float()) and pm.verify(), pm.verify().why


OF_ONE_TERM: dict[str, tuple[Any, float]] = {
    "no bias, batches": (lambda b, x, w: torch.baddbmm(b, x[None], w[None], beta=0), float("nan")),
    "no product": (lambda b, x, w: torch.addmm(b, x * float("inf"), w, alpha=0), 1.0),
}


@pytest.mark.long
@pytest.mark.parametrize("name", OF_ONE_TERM)
def test_what_a_product_takes_zero_times_is_not_looked_at(name: str) -> None:
    """Of what is infinite it would be NaN, where the sum is decomposed because the product's inner dim is sharded."""
    made, value = OF_ONE_TERM[name]
    given = (
        torch.full((6,), value, dtype=torch.float64),
        *(torch.randn(*n, dtype=torch.float64) for n in ((4, 8), (8, 6))),
    )

    class Term(nn.Module):
        def forward(self, b: Tensor, x: Tensor, w: Tensor) -> Tensor:
            return torch.as_tensor(made(b, x, w))

    with torch.no_grad():
        pm = sx.parallelize(Term(), sx.Mesh(r=2), sx.Hints(args=given, specs={"args.1": "-, r"}), virtual=True)
        torch.testing.assert_close(pm(*given), made(*given))
    assert pm.verify(), pm.verify().why


class Waves(nn.Module):
    """Complex weights with dims and without, beside a real one."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(0)
        self.wave = nn.Parameter(torch.randn(8, 4, dtype=torch.complex128, generator=draw))
        self.phase = nn.Parameter(torch.randn((), dtype=torch.complex128, generator=draw))
        self.bias = nn.Parameter(torch.randn(8, dtype=torch.float64, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (torch.complex(x, 1 - x) @ self.wave.mT * self.phase).abs() + self.bias
        return out


X = torch.linspace(-1, 1, 16, dtype=torch.float64).cos().reshape(4, 4)
SHARDED: dict[str, dict[str, Any]] = {
    "sharded": {"specs": {"args.0": "dp, -", "wave": "tp, -"}, "grad_accumulation": 2},
    "zero": {"specs": {"args.0": "dp, -"}, "zero": 3, "zero_min_numel": 1},
}


class Polar(nn.Module):
    """A complex number whose gradient is rounding of a sum that cancels."""

    def __init__(self) -> None:
        super().__init__()
        self.wave, self.layer = nn.Parameter(torch.randn((), dtype=torch.complex64)), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        z = torch.polar(F.softplus(self.layer(x)), x) * self.wave
        return (z * z.conj()).real / 9


@pytest.mark.long
def test_rounding_of_complex64_gradients_is_no_other_function() -> None:
    torch.manual_seed(4)
    x = torch.randn(64, 8)
    hints = sx.Hints((x,), loss=lambda out: F.log_softmax(out / 10, -1)[:, 0].mean(), specs={"args.0": "dp, -"})
    assert sx.parallelize(Polar(), sx.Mesh(dp=2), hints).verify()


def complex_squares(out: Tensor) -> Tensor:
    return out.pow(2).sum()


def clipped(most: float, kind: float = 2.0) -> tuple[Tensor, dict[str, Tensor]]:
    """One device's norm, and its gradients."""
    model = Waves()
    complex_squares(model(X)).backward()
    total = nn.utils.clip_grad_norm_(model.parameters(), most, kind)
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("how", SHARDED)
def test_clip_grad_norm_of_complex_shards_is_the_norm_of_one_device(how: str) -> None:
    pm = sx.parallelize(Waves(), sx.Mesh(dp=2, tp=2), sx.Hints((X,), loss=complex_squares, **SHARDED[how]))
    for kind in (1.0, 2.0, float("inf")):
        total, grads = clipped(0.5, kind)
        for clip in (pm.clip_grad_norm_, lambda *given: nn.utils.clip_grad_norm_(pm.parameters(), *given)):
            pm.zero_grad()
            pm(X).backward()
            torch.testing.assert_close(clip(0.5, kind), total)
            torch.testing.assert_close(pm.full_grads(), grads)


@pytest.mark.long
def test_step_with_complex_parameters_loss_scale_and_clip_matches_single_device() -> None:
    def optimizer(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.01, momentum=0.9)

    compute = sx.MixedPrecision(torch.float64, loss_scale=sx.LossScale(2.0**10))
    hints = sx.Hints(
        (X,),
        loss=complex_squares,
        clip_grad_norm=0.5,
        mixed_precision=compute,
        optimizer=optimizer,
        **SHARDED["sharded"],
    )
    pm, model = sx.parallelize(Waves(), sx.Mesh(dp=2, tp=2), hints), Waves()
    own = optimizer(model.parameters())
    for _ in range(2):
        pm.step(X)
        own.zero_grad()
        complex_squares(model(X)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        own.step()
    torch.testing.assert_close(pm.full_state_dict(), copy.copy(model.state_dict()))


class Diagonal(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x).clone()
        out.diagonal().mul_(2)
        return out


@pytest.mark.filterwarnings("ignore:no sharding rule:shardfx.ShardfxWarning")
def test_decomposition_that_writes_to_an_operand_is_not_used() -> None:
    """Torch's for ``diagonal_scatter`` is a clone and ``prims.copy_to``: as values, the clone alone."""
    model, x = Diagonal().double(), torch.randn(4, 6, dtype=torch.float64)
    hints = sx.Hints(args=(x,), loss=squares, specs={"args.0": "dp, -"})
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    check_step(pm, model, squares, (x,))
