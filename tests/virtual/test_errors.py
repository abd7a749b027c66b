"""Mistakes of callers, and what would be passed over in silence: what, where, expected, got and the remedy."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.runtime.virtual.virtual_engine import VirtualEngine
from tests.captures import captured_once

from .test_calls import F64, batch, mlp, near, parallel, same_step

X = torch.randn(8, 6, dtype=torch.float64)
Y = torch.randint(0, 4, (8,))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(6, 8, dtype=torch.float64)
        self.fc2 = nn.Linear(8, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.relu(self.fc1(x)))


@captured_once("test_errors")
def make(mesh: sx.Mesh | None = None, model: nn.Module | None = None, **hints: object) -> sx.ParallelModule:
    given = {"args": (X,), "loss": F.cross_entropy, "targets": (Y,), "specs": {"args.0": "dp, -"}} | hints
    return sx.parallelize(model or Net(), mesh or sx.Mesh(dp=2), sx.Hints(**given))  # type: ignore[arg-type]


def fails(*words: str, **hints: object) -> sx.Error:
    with pytest.raises(sx.Error) as caught:
        make(**hints)  # type: ignore[arg-type]
    text = str(caught.value)
    for word in words:
        assert word in text, text
    return caught.value


@pytest.mark.parametrize(
    ("words", "hints"),
    [
        (("unknown mesh axis 'tq'", "dp", "args.0", "remedy"), {"specs": {"args.0": "tq, -"}}),
        (("fc1.wieght", "did you mean", "fc1.weight"), {"specs": {"fc1.wieght": "dp, -"}}),
        (("blocks.*.weight", "matches nothing"), {"specs": {"blocks.*.weight": "dp, -"}}),
        (("used twice", "fc1.weight"), {"specs": {"fc1.weight": "dp, dp"}}),
        (("one entry per dim", "fc1.weight", "2 entries"), {"specs": {"fc1.weight": "dp"}}),
        (("disagree",), {"specs": {"fc1.weight": "dp, -", "*.weight": "-, dp"}}),
        (("no known form",), {"specs": {"fc1.weight": 3}}),
        (("is not valid",), {"args": X}),
        (("scalar",), {"loss": lambda out, y: out}),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_wrong_hints_are_named(words: tuple[str, ...], hints: dict[str, Any]) -> None:
    fails(*words, **hints)


@torch.library.custom_op("shardfx_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    """Every element of the result needs every element of x, so that nothing may be sharded."""
    return x.flatten().cumsum(0).tanh().view_as(x) + x.square().mean()


@mystery.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Mysterious(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return mystery(x) + 1


def test_op_without_a_rule_is_replicated_with_a_warning_or_refused_under_strict() -> None:
    hints = {"model": Mysterious(), "loss": None, "targets": ()}
    fails("no sharding rule", "shardfx_tests.mystery", "test_errors.py", strict=True, **hints)
    with pytest.warns(sx.ShardfxWarning, match="no sharding rule for shardfx_tests.mystery"):
        pm = make(model=Mysterious(), loss=None, targets=())
    assert torch.equal(pm(X), mystery(X) + 1)


def over_two() -> tuple[sx.ParallelModule, list[torch.fx.GraphModule]]:
    """A plan over tp, and the programs of both ranks."""
    pm = make(sx.Mesh(tp=2), specs={"fc1.weight": "tp, -"}, loss=None, targets=())
    return pm, [pm.rank_module(rank) for rank in range(2)]


def test_collectives_that_do_not_match_or_are_missing_are_named_by_rank_and_node() -> None:
    pm, modules = over_two()
    reduce = next(n for n in modules[1].graph.nodes if "all_reduce" in str(n.target))
    reduce.args = (reduce.args[0], "max", reduce.args[2])
    with pytest.raises(sx.Error, match="do not match between ranks") as caught:
        run_modules(pm, modules)
    assert "ranks 0 and 1" in str(caught.value) and reduce.name in str(caught.value)
    reduce.replace_all_uses_with(reduce.args[0])
    modules[1].graph.erase_node(reduce)
    with pytest.raises(sx.Error, match="deadlock"):
        run_modules(pm, modules)


def run_modules(pm: sx.ParallelModule, modules: list[torch.fx.GraphModule]) -> None:
    from shardfx.ir.shards import local_shard

    state = {**pm.full_state_dict(), "args.0": X}
    inputs = []
    for rank, module in enumerate(modules):
        names = [n.name for n in module.graph.nodes if n.op == "placeholder"]
        given = {g.name.replace(".", "_"): g for g in pm.planned.inputs}
        inputs.append([local_shard(state[given[n].name], given[n].value.spec, pm.mesh, rank) for n in names])
    programs = {rank: pm.rank_program(rank).changed(module) for rank, module in enumerate(modules)}
    VirtualEngine(pm.mesh).run(programs, dict(enumerate(inputs)))


def test_a_rank_that_raises_is_named() -> None:
    pm, modules = over_two()
    product = next(n for n in modules[1].graph.nodes if "mm" in n.name and "fc2" in str(n.meta["shardfx"].where))
    product.args = (product.args[0], product.args[0])
    with pytest.raises(sx.Error, match="a rank's program failed") as caught:
        run_modules(pm, modules)
    text = str(caught.value)
    assert f"rank 1; node {product.name!r}" in text and "fc2  test_errors.py:" in text, text
    assert "mat1 and mat2 shapes cannot be multiplied" in text, text


TP = {"0.weight": "tp, -"}


def with_hook(register: Callable[[nn.Sequential], Any]) -> nn.Module:
    model = mlp()
    register(model)
    return model


@pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    ("make", "hints", "what"),
    [
        (lambda: with_hook(lambda m: m[0].weight.register_hook(lambda g: g)), {}, "a hook would never be called"),
        (lambda: with_hook(lambda m: m[0].register_full_backward_hook(lambda *_: None)), {}, "a backward hook"),
        (lambda: torch.jit.script(mlp()), {}, "a ScriptModule cannot be captured"),  # type: ignore[no-untyped-call]
        (lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(8, 4))).double(), {}, "computed outside of forward"),
        (lambda: nn.DataParallel(mlp()), {}, "parallel already(.|\n)*model.module"),
        (lambda: mlp().half(), {"args": (batch()[0].half(),)}, "float16 would vanish"),
        (mlp, {"check_inputs": 1}, "check_inputs(.|\n)*bool . .broadcast."),
        (mlp, {"strict": "yes"}, "strict=(.|\n)*expected: bool"),
        (mlp, {"bucket_mb": -1}, "bucket_mb=(.|\n)*0 or more"),
        (mlp, {"device": "gpus"}, "name of a device"),
        (mlp, {"rank_passes": "waits"}, "rank_passes=(.|\n)*RankPass . str"),
        (mlp, {"max_specializations": 0}, "max_specializations=(.|\n)*1 or more"),
        (mlp, {"loss": 3}, "loss=(.|\n)*Callable"),
    ],
)
def test_model_or_hint_that_cannot_be_planned(make: Callable[[], nn.Module], hints: dict[str, Any], what: str) -> None:
    with pytest.raises(sx.Error, match=what):
        parallel(make(), **hints)


HOOKS = [name for name in dir(nn.Module) if name.startswith("register_") and name.endswith(("ward_hook", "pre_hook"))]
HOOKS.remove("register_state_dict_pre_hook"), HOOKS.remove("register_load_state_dict_pre_hook")  # these are called


def test_changes_to_a_parallel_module_that_would_be_lost_are_errors() -> None:
    x, y = batch()
    pm = parallel(mlp())
    part = pm.get_submodule("0")
    for wrong, what in (
        (lambda: pm.apply(nn.init.zeros_), "initialise the model before"),
        (lambda: part.apply(nn.init.zeros_), "initialise the model before"),
        *((lambda hook=hook: getattr(part, hook)(lambda *_: None), "never be called") for hook in HOOKS),
        (lambda: setattr(pm, "0", nn.Linear(8, 8)), "cannot be replaced"),
        (lambda: setattr(part, "weight", nn.Parameter(x)), "parallelize it again"),
        (lambda: part(x), "called on its own"),
        (lambda: torch.func.functional_call(pm, {"0.weight": torch.zeros(16, 8, dtype=F64)}, (x, y)), "was replaced"),
        (lambda: torch.save(pm, io.BytesIO()), "full_state_dict"),
        (lambda: pm.to("meta"), "cannot lose their content(.|\n)*load_full_state_dict"),
    ):
        with pytest.raises(sx.Error, match=what):
            wrong()
    assert near(pm(x, y), F.cross_entropy(mlp()(x), y))


def test_index_out_of_range_of_a_sharded_table_is_an_error() -> None:
    """Where no rank has the row, the sum over the ranks would be zero."""
    words = nn.Sequential(nn.Embedding(8, 6), nn.Flatten(), nn.Linear(18, 4)).double()
    tokens, labels = torch.randint(0, 8, (8, 3)), torch.randint(0, 4, (8,))
    pm = parallel(words, sx.Mesh(tp=2), args=(tokens,), targets=(labels,), specs=TP | {"2.weight": "tp, -"})
    labels[2] = -100
    same_step(pm, copy.deepcopy(words), tokens, labels)
    for given, target, what in ((8, 0, "index 8 .* 0 .. 7"), (-1, 0, "index -1"), (0, 4, "index 4 .* 0 .. 3")):
        wrong, label = tokens.clone(), labels.clone()
        wrong[1, 1], label[1] = given, target
        with pytest.raises(sx.Error, match=what):
            pm(wrong, label)


def test_loss_scaled_outside_matches_eager_and_float16_needs_a_scale() -> None:
    """With others it changes nothing, and steps are as without it."""
    x, y = batch()
    pm, alone = parallel(mlp()), mlp()
    with torch.autocast("cpu", dtype=torch.float16), pytest.raises(sx.Error, match=r"autocast\('cpu', torch.float16\)"):
        parallel(mlp().float(), args=(x.float(),))
    (pm(x, y) * 1024.0).backward(), F.cross_entropy(alone(x), y).backward()
    grads = pm.full_grads()
    assert all(p.grad is not None and near(grads[name] / 1024, p.grad) for name, p in alone.named_parameters())


def test_state_dict_of_the_model_is_loaded_by_copies() -> None:
    model = mlp()
    pm = parallel(model, sx.Mesh(dp=2, tp=2), specs={"args.0": "dp, -", **TP})
    with pytest.raises(sx.Error, match=r"leave assign=True out"):
        pm.load_state_dict(pm.state_dict(), assign=True)
    more = {name: value + 1 for name, value in model.state_dict().items()}
    pm.load_state_dict(more)
    assert all(near(pm.full_state_dict()[name], value) for name, value in more.items())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated")
def test_transforms_traces_and_batched_gradients_of_a_parallel_module_are_refused() -> None:
    """A tangent would be lost, and a gradient be that of something else."""
    pm, (x, y) = parallel(mlp()), batch()
    with pytest.raises(sx.Error, match="within a transform"):
        torch.func.jvp(pm, (x,), (x,))
    with pytest.raises(sx.Error, match="within a transform"):
        torch.func.grad(lambda x: pm(x, y))(x)
    with pytest.raises(sx.Error, match=r"(?s)no part of a trace.*with pm.gathered"):
        torch.export.export(pm, (x,))
    out = pm(x.requires_grad_()).sum(0)
    with pytest.raises(sx.Error, match=r"(?s)in a batch.*retain_graph=True"):
        torch.autograd.grad(out, x, torch.eye(4, dtype=F64), is_grads_batched=True)


def test_models_that_are_not_ready_or_parallel_already() -> None:
    x, y = batch()
    with pytest.raises(sx.Error, match="call the model once"):
        parallel(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(sx.Error, match="parallel already"):
        sx.parallelize(parallel(mlp()), sx.Mesh(dp=2), sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,)))


def test_a_model_that_raises_on_its_example_is_said_to() -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) + {"a": 1}["b"]

    for model, got in ((Wrong(), "KeyError: 'b'"), (nn.Linear(5, 4), "mat1 and mat2 shapes cannot be multiplied")):
        with pytest.raises(sx.Error, match=rf"raises on its example, on one device as well(.|\n)*{got}"):
            sx.parallelize(model, sx.Mesh(dp=2), sx.Hints(args=(torch.randn(4, 4),), loss=torch.sum))
