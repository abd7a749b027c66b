"""Mistakes of callers: what, where, expected, got and the remedy; never a hang, never a wrong number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardfx as sx
from shardfx.runtime.virtual.virtual_engine import VirtualEngine
from tests.captures import captured_once

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
        (("of another kind",), {"args": X}),
        (("scalar",), {"loss": lambda out, y: out}),
    ],
    ids=lambda each: each[0] if isinstance(each, tuple) else "",
)
def test_hints_that_are_wrong(words: tuple[str, ...], hints: dict[str, Any]) -> None:
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


def test_an_op_without_a_rule_under_strict_names_the_users_line() -> None:
    hints = {"model": Mysterious(), "loss": None, "targets": ()}
    fails("no sharding rule", "shardfx_tests.mystery", "test_errors.py", strict=True, **hints)


def test_an_op_without_a_rule_is_computed_replicated_with_a_warning() -> None:
    with pytest.warns(sx.ShardfxWarning, match="no sharding rule for shardfx_tests.mystery"):
        pm = make(model=Mysterious(), loss=None, targets=())
    assert torch.equal(pm(X), mystery(X) + 1)


def test_a_wrong_input_shape() -> None:
    pm = make()
    with pytest.raises(sx.Error, match=r"batch_size \(5\)"):
        pm(X[:5], Y)
    with pytest.raises(sx.Error, match="must have the same dtype"):
        pm(X.float(), Y)
    with pytest.raises(sx.Error, match="not those that the model was captured with"):
        pm(X, Y, Y)


def over_two() -> tuple[sx.ParallelModule, list[torch.fx.GraphModule]]:
    """A plan over tp, and the programs of both ranks."""
    pm = make(sx.Mesh(tp=2), specs={"fc1.weight": "tp, -"}, loss=None, targets=())
    return pm, [pm.rank_module(rank) for rank in range(2)]


def test_collectives_that_do_not_match_are_named_by_rank_and_node() -> None:
    pm, modules = over_two()
    reduce = next(n for n in modules[1].graph.nodes if "all_reduce" in str(n.target))
    reduce.args = (reduce.args[0], "max", reduce.args[2])
    with pytest.raises(sx.Error, match="do not match between ranks") as caught:
        run_modules(pm, modules)
    assert "ranks 0 and 1" in str(caught.value) and reduce.name in str(caught.value)


def test_a_collective_that_never_comes_is_no_hang() -> None:
    pm, modules = over_two()
    reduce = next(n for n in modules[1].graph.nodes if "all_reduce" in str(n.target))
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
