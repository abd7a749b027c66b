"""``Hints(mixed_precision=...)``: master weights in one dtype, the model in another; what is sent, kept and refused."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map_only

import shardfx as sx
from shardfx.ir.graph import Graph, Node
from tests.plans import MESHES, plan
from tests.reference import rel_err
from tests.zoo import Case, make

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
CLOSE = 1e-5
"""Sums in another order, in float32."""
STEPS = 2


def cast(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map_only(Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)


def as_hinted(model: nn.Module, case: Case, dtype: torch.dtype = F32) -> Tensor:
    """The loss of one device that computes in ``dtype``; batch norms in the master weights' dtype."""
    kept = {
        f"{path}.{name}" for path, m in model.named_modules() if isinstance(m, _BatchNorm) for name in m._parameters
    }
    weights = {n: p if n in kept else cast(p, dtype) for n, p in model.named_parameters()}
    args, kwargs = cast((case.args, dict(case.kwargs)), dtype)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.forward = lambda x, bn=module: type(bn).forward(bn, x.to(F64)).to(dtype)  # type: ignore[method-assign]
    return case.loss(torch.func.functional_call(model, weights, args, kwargs, tie_weights=True), *case.targets)


def made(name: str) -> Case:
    """A case in float64, whose tables are in the dtype that it computes in, as those of a model in float32 would be."""
    case = make(name)
    for module in case.model.modules():
        if not isinstance(module, _BatchNorm):
            module._buffers.update(cast(dict(module._buffers), F32))
    return case


def alone(case: Case, clip_grad_norm: float | None = None) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses, the first gradients, and the state after some steps."""
    model = deepcopy(case.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses, grads = [], dict[str, Tensor]()
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = as_hinted(model, case)
        loss.backward()
        losses.append(loss.item())
        if clip_grad_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
        if step == 0:
            grads = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
    return losses, grads, model.state_dict()


def beside(name: str, mesh: sx.Mesh, **hints: Any) -> None:
    """Train a case in float64 master weights, computed in float32, against one device."""
    case = made(name)
    losses, grads, state = alone(case, hints.get("clip_grad_norm"))
    pm = plan(made(name), mesh, mixed_precision=F32, **hints)
    in_program = "optimizer" in hints
    optimizer = None if in_program else torch.optim.SGD(pm.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        if optimizer is None:
            loss = pm.step(*case.args, *case.targets, **case.kwargs)
        else:
            optimizer.zero_grad()
            loss = pm(*case.args, *case.targets, **case.kwargs)
            loss.backward()
            if step == 0:
                mine = pm.full_grads()
                assert set(mine) == set(grads) and all(g.dtype == F64 for g in mine.values())
                assert max(rel_err(mine[n], g) for n, g in grads.items()) < CLOSE
            optimizer.step()
        assert rel_err(loss.item(), losses[step]) < CLOSE
    mine = pm.full_state_dict()
    assert all(mine[n].dtype == t.dtype and rel_err(mine[n], t) < CLOSE for n, t in state.items() if n in mine)
    assert pm.verify(), pm.verify().why


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "hints"),
    [
        ("mlp3", "dp2tp2", {}),
        ("resnet", "dp2", {"zero": 1}),
        ("llama", "dp2", {"zero": 3, "optimizer": sgd, "clip_grad_norm": 0.5}),
    ],
)
def test_master_weights_train_as_on_one_device(name: str, mesh: str, hints: dict[str, Any]) -> None:
    beside(name, MESHES[mesh], zero_min_numel=0, **hints)


# ---- what is exact -----------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the head too, and a scale that the loss's gradient comes to in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.tok.weight
        self.scale = nn.Parameter(torch.full((8,), 2.0))

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.head(self.tok(tokens) * self.scale)
        return out


def whole_numbers(model: nn.Module) -> nn.Module:
    """Small whole numbers for weights: what is computed with them is exact, in bfloat16 too."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randint(-1, 2, parameter.shape))
    return model


def exact_plan(mesh: sx.Mesh, **hints: Any) -> tuple[nn.Module, sx.ParallelModule, Tensor, Tensor]:
    model = whole_numbers(Tied())
    x, y = torch.randint(0, 12, (8,)), torch.randint(-1, 2, (8, 12)).float()
    specs = {"args.0": "dp"} | ({"tok.weight": "tp, -"} if "tp" in mesh.names else {})
    given: Any = {"args": (x,), "targets": (y,), "loss": inner, "specs": specs, "zero_min_numel": 0}
    return model, sx.parallelize(model, mesh, sx.Hints(**given, **hints), virtual=True), x, y


def inner(out: Tensor, y: Tensor) -> Tensor:
    return (out.float() * y).sum()


@pytest.mark.long
@pytest.mark.parametrize(
    "mixed_precision",
    [sx.MixedPrecision(BF16, reduce_dtype=BF16), sx.MixedPrecision(torch.float16, loss_scale=64.0)],
)
def test_whole_numbers_are_exact(mixed_precision: Any) -> None:
    model, pm, x, y = exact_plan(MESHES["dp2tp2"], mixed_precision=mixed_precision, zero=3)
    weights = {name: parameter.to(mixed_precision.dtype) for name, parameter in model.named_parameters()}
    expected = inner(torch.func.functional_call(model, weights, (x,), tie_weights=True), y)
    expected.backward()
    loss = pm(x, y)
    loss.backward()
    assert torch.equal(loss, expected)
    grads = pm.full_grads()
    assert all(torch.equal(grads[name], p.grad) for name, p in model.named_parameters() if p.grad is not None)
    assert {p.dtype for p in pm.parameters()} == {g.dtype for g in grads.values()} == {F32}
    assert pm.verify()


def squared(out: Tensor, y: Tensor) -> Tensor:
    """Of one dtype: the backward of ``mse_loss`` takes no other in torch 2.11."""
    return F.mse_loss(out.float(), y.float())


def sent(graph: Graph, *ops: str) -> list[tuple[Node, torch.dtype, int]]:
    """The collectives of these kinds, with what each rank has of it, whole."""
    found = [node for node in graph.nodes if str(node.op).removeprefix("comm.") in ops]
    return [(n, v.type.dtype, v.type.nbytes) for n in found for v in n.operands if v.type.ndim]


def big(reduce: torch.dtype | None = None, mixed_precision: Any = BF16, **hints: Any) -> sx.ParallelModule:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64, bias=False))
    if mixed_precision is None:
        mixed_precision, x = sx.MixedPrecision(reduce_dtype=reduce), torch.zeros(8, 64, dtype=BF16)
        model = model.bfloat16()
    else:
        mixed_precision, x = (
            (mixed_precision if reduce is None else sx.MixedPrecision(mixed_precision, reduce_dtype=reduce)),
            torch.zeros(8, 64),
        )
    specs = {"args.0": "dp, -"}
    given: Any = {"args": (x,), "targets": (x,), "loss": squared, "specs": specs, "zero_min_numel": 0}
    return sx.parallelize(
        model, sx.Mesh(dp=2), sx.Hints(**given, mixed_precision=mixed_precision, **hints), virtual=True
    )


NUMBERS = 64 * 64 * 2 + 64


@pytest.mark.long
def test_zero_3_gathers_casts() -> None:
    """Half the bytes, before the forward, and before the backward again; in the ranks' programs too."""
    pm = big(zero=3, optimizer=sgd)
    gathers = sent(pm.planned, "all_gather")
    assert {dtype for _, dtype, _ in gathers} == {BF16}
    again = 64 * 64  # of the first weight and the bias nothing is asked in the backward
    assert sum(nbytes for *_, nbytes in gathers) == 2 * (NUMBERS + again)
    assert "torch.bfloat16" in str(pm.rank_program(0)) and pm.verify()


@pytest.mark.long
@pytest.mark.parametrize(
    ("mixed_precision", "reduce", "dtype", "zero"),
    [(BF16, None, F32, 0), (BF16, BF16, BF16, 1), (None, F32, F32, 3)],
)
def test_gradients_are_reduced_as_hinted(mixed_precision: Any, reduce: Any, dtype: torch.dtype, zero: int) -> None:
    pm = big(reduce, mixed_precision, zero=zero)
    reductions = [each for each in sent(pm.planned, "all_reduce", "reduce_scatter") if each[0].phase != "forward"]
    assert {str(node.op) for node, *_ in reductions} == {"comm.reduce_scatter" if zero else "comm.all_reduce"}
    assert {each for _, each, _ in reductions} == {dtype}
    assert sum(nbytes for *_, nbytes in reductions) == NUMBERS * dtype.itemsize
    assert zero == 3 or len({node for node, *_ in reductions}) == 1  # in one bucket; beside gathers, in finer ones
    if mixed_precision is None:
        gradients = {output.value.type.dtype for output in pm.planned.outputs if output.kind.value == "gradient"}
        assert gradients == {BF16} and pm.verify()


@pytest.mark.long
def test_gradient_that_is_summed_in_bfloat16_is_noted() -> None:
    """The gradient of a weight that is normalised is no sum of terms behind its norm."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8, bias=False))
    x = torch.zeros(4, 8)
    given: Any = {"args": (x,), "targets": (x,), "loss": squared, "specs": {"args.0": "dp, -"}, "mixed_precision": BF16}
    pm = sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(**given), virtual=True)
    assert any("a gradient is summed in bfloat16, as aten.mm makes it" in note for note in pm.planned.notes)
    assert not any("summed" in note for note in big().planned.notes)


# ---- further options ---------------------------------------------------------------------------------------


class Routed(nn.Module):
    """A router that shall not be cast."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.norm, self.out = nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.norm(self.router(x)).softmax(-1))
        return out


def routed(**hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    given: Any = {"args": (x,), "targets": (y,), "loss": F.cross_entropy, "specs": {"args.0": "dp, -"}}
    return sx.parallelize(Routed(), sx.Mesh(dp=2), sx.Hints(**given | hints), virtual=True)


@pytest.mark.long
@pytest.mark.parametrize("guard", [False, True], ids=["Dynamo", "export"])
def test_kept_modules_compute_in_their_own_dtype(guard: bool) -> None:
    pm = routed(mixed_precision=sx.MixedPrecision(BF16, keep="router", output_dtype=F32), guard=guard)
    products = {
        n.where.module: n.outs[0].type.dtype for n in pm.captured.nodes if "mm" in str(n.op) and n.phase == "forward"
    }
    assert products == {"router": F32, "out": BF16}
    norm = next(node for node in pm.captured.nodes if "batch_norm" in str(node.op))
    assert {value.type.dtype for value in (*norm.operands, *norm.outs)} == {F32}
    assert pm.captured.outputs[0].value.type.dtype == F32 and pm.verify()
    x, y = torch.randn(8, 6), torch.randint(0, 4, (8,))
    pm(x, y).backward()
    assert pm(x).dtype == F32 and pm.eval()(x).dtype == F32


@pytest.mark.parametrize(
    ("what", "hints"),
    [
        (
            r"Hints\(mixed_precision=\.\.\.\) is not valid(.|\n)*torch.dtype",
            lambda: {"mixed_precision": "bf16"},
        ),
        ("nothing to compute in(.|\n)*torch.bfloat16", lambda: {"mixed_precision": torch.int32}),
        ("this is no dtype", lambda: {"mixed_precision": sx.MixedPrecision("bf16")}),  # type: ignore[arg-type]
        (
            "cannot be summed in torch.bfloat16(.|\n)*leave reduce_dtype= out",
            lambda: {"mixed_precision": sx.MixedPrecision(F32, reduce_dtype=BF16)},
        ),
        (
            "'router.weight' in torch.float32 cannot be summed",
            lambda: {"mixed_precision": sx.MixedPrecision(reduce_dtype=BF16)},
        ),
        ("'router.weight' is in torch.float32, and cannot be the master weight", lambda: {"mixed_precision": F64}),
        (
            "no module is called 'routr'(.|\n)*'router'",
            lambda: {"mixed_precision": sx.MixedPrecision(BF16, keep="routr")},
        ),
        (
            "keep says nothing(.|\n)*MixedPrecision.torch.bfloat16",
            lambda: {"mixed_precision": sx.MixedPrecision(keep="router")},
        ),
        ("no pattern of modules", lambda: {"mixed_precision": sx.MixedPrecision(BF16, keep=3)}),  # type: ignore[arg-type]
        ("float16 would vanish(.|\n)*scale=", lambda: {"mixed_precision": torch.float16}),
        ("nothing to scale a loss by", lambda: {"mixed_precision": sx.MixedPrecision(torch.float16, loss_scale=0.0)}),
    ],
)
def test_wrong_mixed_precision_is_an_error(what: str, hints: Any) -> None:
    with pytest.raises(sx.Error, match=what):
        routed(**hints())


@pytest.mark.long
def test_gradient_with_an_empty_shard_is_cast_from_a_partial_sum() -> None:
    """Three columns on four ranks: the last rank casts nothing, of what is a share of a sum over the batch."""
    model = nn.Sequential(nn.Linear(3, 8, bias=False), nn.Linear(8, 4)).double()
    x, y = torch.randn(8, 3), torch.ones(8, 4)
    specs = {"args.0": "b, -", "0.weight": "b, a"}
    hints = sx.Hints(args=(x.double(),), loss=inner, targets=(y.double(),), specs=specs, mixed_precision=F32)
    pm = sx.parallelize(model, sx.Mesh(a=4, b=2), hints, virtual=True)
    assert "aten.new_full" in str(pm.rank_program(6))
    assert pm.verify(), pm.verify().why


@pytest.mark.long
def test_clipped_gradient_of_a_bfloat16_number_keeps_its_dtype() -> None:
    """Of a product of numbers without dims torch's dtype is the wider one."""
    model = nn.Sequential(nn.Linear(6, 4), nn.PReLU()).bfloat16()
    model[1].weight = nn.Parameter(torch.tensor(0.25, dtype=BF16))
    hints = sx.Hints((torch.randn(8, 6).bfloat16(),), loss=torch.sum, specs={"args.0": "dp, -"}, clip_grad_norm=1e-3)
    pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    pm(*hints.args).backward()
    assert {grad.dtype for grad in pm.full_grads().values()} == {BF16} and pm.verify()
