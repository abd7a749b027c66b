"""Rank modules are fx GraphModules like any other: copied, pickled, transformed, compiled; changed, proven and run."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.passes.split_module import split_module
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.program.rank_module import NodeOrigin
from tests.captures import captured_once
from tests.plans import plan
from tests.zoo import make

aten = torch.ops.aten


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)))


X, Y = torch.randn(8, 6), torch.randint(0, 4, (8,))


@captured_once("test_rank_modules")
def planned(mesh: sx.Mesh, **more: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    specs = {"args.0": "dp, -"} if mesh.size > 1 else {}
    hints = sx.Hints((X,), loss=F.cross_entropy, targets=(Y,), specs=specs, **more)
    return sx.parallelize(MLP(), mesh, hints, virtual=True)


def one_rank(pm: sx.ParallelModule) -> tuple[fx.GraphModule, list[Tensor]]:
    """A module that needs no other rank, and what goes in."""
    module, state = pm.rank_module(0), {**pm.full_state_dict(), "args.0": X, "targets.0": Y}
    return module, [state[given.name] for given in pm.rank_program(0).inputs]


def same(a: Any, b: Any) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_module_is_copied_and_pickled() -> None:
    module, inputs = one_rank(planned(sx.Mesh(dp=1)))
    for again in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert again.code == module.code and same(again(*inputs), module(*inputs))
        origins = [node.meta.get("shardfx") for node in again.graph.nodes]
        assert any(isinstance(each, NodeOrigin) and each.where.module == "up" for each in origins)


@pytest.mark.long
def test_nodes_know_what_they_give() -> None:
    """``meta["val"]`` has the shape, stride and dtype of what really comes out, of views too."""
    case = make("gpt_fused")
    hints = sx.Hints(case.args, loss=case.loss, targets=case.targets)
    pm = sx.parallelize(case.model, sx.Mesh(dp=1), hints, virtual=True)
    state = pm.full_state_dict()
    state |= {f"args.{i}": t for i, t in enumerate(case.args)} | {f"targets.{i}": t for i, t in enumerate(case.targets)}
    wrong: list[str] = []

    def layout(each: Any) -> Any:
        return (each.shape, each.stride(), each.dtype) if isinstance(each, Tensor) else each

    class Compare(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            given = super().run_node(n)
            if list(map(layout, tree_leaves(given))) != list(map(layout, tree_leaves(n.meta["val"]))):
                wrong.append(f"{n.format_node()}: {given}, said {n.meta['val']}")
            return given

    Compare(pm.rank_module(0)).run(*(state[given.name] for given in pm.rank_program(0).inputs))
    assert not wrong, "\n".join(wrong)


def test_a_module_is_transformed() -> None:
    module, inputs = one_rank(planned(sx.Mesh(dp=1)))
    assert same(fx.Transformer(module).transform()(*inputs), module(*inputs))

    def twice(x: Tensor) -> Tensor:
        return aten.relu.default(x)

    def clamped(x: Tensor) -> Tensor:
        return aten.clamp_min.default(x, 0)

    assert fx.replace_pattern(module, twice, clamped)
    assert "clamp_min" in module.code and torch.allclose(
        module(*inputs)[0], one_rank(planned(sx.Mesh(dp=1)))[0](*inputs)[0]
    )


def test_a_module_compiles_whole() -> None:
    module, inputs = one_rank(planned(sx.Mesh(dp=1)))
    with torch.no_grad():
        assert same(torch.compile(module, fullgraph=True, backend="eager")(*inputs), module(*inputs))


@pytest.mark.long
def test_steps_go_through_torch_compile() -> None:
    pm, reference = planned(sx.Mesh(dp=2)), planned(sx.Mesh(dp=2))
    pm.compile(backend="aot_eager")
    text = str(pm.rank_program(1))
    assert "memory." not in text and "all_reduce_(" not in text
    pm(X, Y).backward()
    reference(X, Y).backward()
    assert all(torch.allclose(pm.full_grads()[n], g) for n, g in reference.full_grads().items())
    assert pm.verify()


@pytest.mark.long
def test_a_program_that_is_not_the_model_is_not_run() -> None:
    pm = planned(sx.Mesh(dp=2))
    wrong = pm.rank_module(1)
    relu = next(node for node in wrong.graph.nodes if node.target is aten.relu.default)
    relu.target = aten.abs.default
    wrong.recompile()
    with pytest.raises(sx.Error, match="not the model") as caught:
        pm.use({1: wrong})
    assert "up" in str(caught.value) or "relu" in str(caught.value)
    right = pm(X, Y)
    pm.use({1: wrong}, proven=False)
    assert not torch.equal(pm(X, Y), right)
    assert not pm.verify()
    assert any("unproven" in warning and "rank 1" in warning for warning in pm.report().warnings)


def test_a_module_of_another_plan_is_an_error() -> None:
    other = plan(make("mlp3"), sx.Mesh(dp=2)).rank_module(1)
    for ask in (lambda pm: pm.use({1: other}), lambda pm: pm.verify(modules={1: other})):
        with pytest.raises(sx.Error, match="not a program of this plan"):
            ask(planned(sx.Mesh(dp=2)))
    with pytest.raises(sx.Error, match="no rank 7"):
        planned(sx.Mesh(dp=2)).use({7: other})


@pytest.mark.long
def test_a_module_of_modules_is_proven_run_and_priced() -> None:
    pm, reference = planned(sx.Mesh(dp=2)), planned(sx.Mesh(dp=2))
    halves = {}
    for rank in range(2):
        module = pm.rank_module(rank)
        names = [node.name for node in module.graph.nodes]
        first = set(names[: len(names) // 2])
        halves[rank] = split_module(module, module, lambda node, first=first: int(node.name not in first))
        assert [node.op for node in halves[rank].graph.nodes].count("call_module") == 2
    assert pm.verify(modules=halves)
    pm.use(halves)
    pm(X, Y).backward()
    reference(X, Y).backward()
    assert all(torch.equal(pm.full_grads()[n], g) for n, g in reference.full_grads().items())
    assert replay(pm.rank_program(1)).peak.nbytes > 0


def test_a_module_that_calls_no_function_is_an_error() -> None:
    pm = planned(sx.Mesh(dp=2))
    changed = pm.rank_module(1)
    relu = next(node for node in changed.graph.nodes if node.target is aten.relu.default)
    relu.op, relu.target = "call_method", "relu"
    with pytest.raises(sx.Error, match="calls what is no function") as caught:
        pm.verify(modules={1: changed})
    assert caught.value.got == "call_method" and "relu" in str(caught.value.where)


SEEN: list[torch.Tensor] = []


@sx.observes
def returns_another(x: torch.Tensor, operand: torch.Tensor) -> torch.Tensor:
    return x * 2


@sx.observes
def writes_through_data(x: torch.Tensor, operand: torch.Tensor) -> None:
    x.data.mul_(2)


@sx.observes
def writes_to_another(x: torch.Tensor, operand: torch.Tensor) -> None:
    SEEN.append(x)
    if len(SEEN) > 4:
        operand.add_(1)


@dataclass(frozen=True)
class Observed(sx.RankPass):
    """Observes what goes into the loss, and the operand of that."""

    name: ClassVar[str] = "observed"
    by: Any = None

    def run(self, program: Any, context: Any) -> bool:
        node = next(node for node in program.graph.nodes if node.target is aten.relu.default)
        with program.graph.inserting_after(node):
            seen = program.graph.call_function(self.by, (node, node.args[0]))
        node.replace_all_uses_with(seen, delete_user_cb=lambda user: user is not seen)
        return True


@pytest.mark.long
@pytest.mark.parametrize("by", [returns_another, writes_through_data])
def test_observer_returns_its_operand_and_is_an_assumption(by: Any) -> None:
    pm, reference = planned(sx.Mesh(dp=2), rank_passes=[Observed(by)]), planned(sx.Mesh(dp=2))
    assert torch.equal(pm(X, Y), reference(X, Y))
    pm.compile(backend="eager")
    assert torch.equal(pm(X, Y), reference(X, Y))
    verdict = pm.verify()
    assert verdict and any(by.__qualname__ in each for each in verdict.assumptions)
    assert not any("observer" in each for each in reference.verify().assumptions)


def test_observer_that_writes_in_place_at_a_later_call_is_an_error() -> None:
    SEEN.clear()
    by: Any = writes_to_another
    pm = planned(sx.Mesh(dp=2), rank_passes=[Observed(by)])
    before = [pm(X, Y).detach() for _ in range(2)]
    with pytest.raises(sx.Error, match=f"{by.__qualname__} writes in place") as caught, torch.inference_mode():
        pm(X, Y)
    assert torch.equal(*before) and str(caught.value.where).startswith(__file__)


def test_another_dtype_is_another_plan() -> None:
    pm = planned(sx.Mesh(dp=2))
    assert pm.to("cpu") is pm and pm.to(X.dtype) is pm and pm(X, Y).isfinite()
    for wrong in (torch.float32, torch.float64):
        if wrong is not X.dtype:
            with pytest.raises(sx.Error, match="dtypes that it was captured in"):
                pm.to(wrong)


def test_a_plan_for_another_device_names_it() -> None:
    """A model on meta is planned for a device that need not be here: its programs ask for memory there."""
    hints = sx.Hints((X,), loss=F.cross_entropy, targets=(Y,), specs={"args.0": "dp, -"}, device="cuda")
    with torch.device("meta"):
        model = MLP()
    text = str(sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True).rank_program(0))
    assert 'torch.float32, "cuda"' in text and '"cpu"' not in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_plan_moves_to_a_gpu() -> None:
    pm, reference = planned(sx.Mesh(dp=2)).to("cuda"), planned(sx.Mesh(dp=2))
    loss = pm(X.cuda(), Y.cuda())
    loss.backward()
    reference(X, Y).backward()
    for name, grad in reference.full_grads().items():
        torch.testing.assert_close(pm.full_grads()[name].cpu(), grad)


@pytest.mark.long
def test_what_somebody_put_in_outlasts_compile() -> None:
    """Also its warning; elsewhere than on its kind of device it cannot run, and nothing is moved."""
    pm = planned(sx.Mesh(dp=2))
    wrong = pm.rank_module(1)
    next(node for node in wrong.graph.nodes if node.target is aten.relu.default).target = aten.abs.default
    wrong.recompile()
    pm.use({1: wrong}, proven=False)
    loss = pm(X, Y).detach()
    pm.compile(backend="eager")
    assert torch.allclose(pm(X, Y), loss) and not pm.verify()
    assert any("unproven" in warning for warning in pm.report().warnings)
    with pytest.raises(sx.Error, match=r"kind of device that they were made on(.|\n)*rank 1"):
        pm.to("meta")
    assert all(parameter.device.type == "cpu" for parameter in pm.parameters())
