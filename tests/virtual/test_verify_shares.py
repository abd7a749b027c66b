"""What ranks add must be shares of one sum: where that is so it is proven, though no rank alone can tell which sum.

Four rows over 2 x 2 x 2 ranks are one each on every second rank, and row 0 on rank 0 is also that of a sharded over two
of the axes. A sum of squares of such rows is a share of the same sum by either sharded, on rank 0 alone.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import shardfx as sx
from shardfx.ir.rules import Emit

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
AXES = {"2x2x2": {"a": 2, "b": 2, "c": 2}, "3x2": {"a": 3, "b": 2}, "2x3": {"a": 2, "b": 3}}


def planned(mesh: str, specs: dict[str, str], **hints: object) -> sx.ParallelModule:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4 if mesh == "2x2x2" else 5, dtype=torch.float64)
    x, y = torch.randn(4, 6, dtype=torch.float64), torch.randint(4, (4,))
    given = sx.Hints(args=(x,), loss=F.cross_entropy, targets=(y,), specs=specs, **hints)  # type: ignore[arg-type]
    return sx.parallelize(model, sx.Mesh(**AXES[mesh]), given)


@pytest.mark.long
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mesh", "specs"),
    [
        ("2x2x2", {"weight": "a, c", "bias": "a b c"}),
        pytest.param("2x2x2", {"weight": "a b c, -", "bias": "a b"}, marks=pytest.mark.slow),
        ("2x3", {"args.0": "a, -", "weight": "b a, -"}),
    ],
)
def test_a_norm_of_parameters_sharded_over_other_axes_is_proven(mesh: str, specs: dict[str, str]) -> None:
    pm = planned(mesh, specs, clip_grad_norm=0.01)
    assert pm.verify(), pm.verify().why


def adafactor(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(parameters)  # type: ignore[arg-type]


@pytest.mark.long
def test_means_over_rows_of_sharded_states_are_proven() -> None:
    pm = planned("3x2", {"weight": "a b, -"}, optimizer=adafactor)
    assert pm.verify(), pm.verify().why


class Squared(torch.nn.Module):
    """A product of a square matrix with itself, which is a sum over what is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = x @ self.weight
        return found @ found


@pytest.mark.parametrize("swapped", [False, True])
def test_shares_that_were_made_in_other_ways_are_not_added(swapped: bool) -> None:
    """``share @ sum`` of all ranks add up to the product; that of one rank and ``sum @ share`` of the other do not."""
    torch.manual_seed(0)
    hints = sx.Hints(args=(torch.randn(4, 6, dtype=torch.float64),), specs={"args.0": "-, a", "weight": "a, -"})
    pm = sx.parallelize(Squared(), sx.Mesh(a=2), hints, virtual=True)
    changed = {rank: pm.rank_module(rank) for rank in range(2)}
    for rank, module in changed.items():
        nodes = list(module.graph.nodes)
        first, second = (node for node in nodes if node.target is aten.mm.default)
        wait = next(node for node in nodes if node.target is c10d.wait_tensor.default)
        with module.graph.inserting_after(first):
            share = module.graph.call_function(aten.clone.default, (first,))
        second.args = (wait, share) if swapped and rank else (share, wait)
        with module.graph.inserting_after(second):
            started = module.graph.call_function(c10d.all_reduce.default, (second, *wait.args[0].args[1:]))
        with module.graph.inserting_after(started):
            done = module.graph.call_function(c10d.wait_tensor.default, (started,))
        second.replace_all_uses_with(done, delete_user_cb=lambda user, last=started: user is not last)  # type: ignore[misc]
        module.recompile()
    assert bool(pm.verify(changed)) == bool(pm.verify(changed, run=True)) == (not swapped)


class Filled(torch.nn.Module):
    """Adds a constant to each of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.by = torch.nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *xs: torch.Tensor) -> torch.Tensor:
        made = [(x * self.by + torch.ones(x.shape, dtype=x.dtype)).relu().square().sum() for x in xs]
        return torch.stack(made).sum()


@pytest.mark.slow
def test_what_is_a_part_of_many_constants_is_proven_as_each_of_them() -> None:
    """On each rank all of them are one call, ``ones([4, 4, 4])``."""
    shardings = [
        sharding
        for sharding in itertools.product("-ab", repeat=3)
        if len(set(sharding) - {"-"}) == 3 - sharding.count("-") > 0
    ]
    assert len(shardings) == 12
    xs = tuple(
        torch.randn([4 if axis == "-" else 8 for axis in sharding], dtype=torch.float64) for sharding in shardings
    )
    specs = {f"args.{i}": ", ".join(sharding) for i, sharding in enumerate(shardings)}
    hints = sx.Hints(args=xs, loss=lambda out: out, specs=specs)
    pm = sx.parallelize(Filled(), sx.Mesh(a=2, b=2), hints, virtual=True)
    verdict = pm.verify()
    assert verdict, verdict.why


CALLS = 20


@torch.library.custom_op("docs_many::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """x times two, so many times."""
    return x * 2.0**CALLS


doubled.register_fake(lambda x: torch.empty_like(x))
doubled.register_autograd(lambda ctx, grad: doubled(grad))


def by_sums(emit: Emit) -> Any:
    """A rank's version: each call of the one before it, twice."""
    (x,) = emit.args
    for _ in range(CALLS):
        x = emit.call(aten.add.Tensor, x, x)
    return x


@pytest.mark.long
def test_a_rule_may_write_many_calls_one_behind_the_other() -> None:
    rule = sx.rule(torch.ops.docs_many.doubled.default, "n d -> n d", linear="0", local=by_sums)

    class Net(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return doubled(super().forward(x)).relu()

    hints = sx.Hints((torch.randn(4, 4),), loss=lambda out: out.sum(), specs={"args.0": "dp, -"}, rules=[rule])
    pm = sx.parallelize(Net(4, 6), sx.Mesh(dp=2), hints, virtual=True)
    changed = pm.rank_module(1)
    last = [node for node in changed.graph.nodes if node.target is aten.add.Tensor][10]
    last.replace_all_uses_with(last.args[0])
    changed.recompile()
    assert pm.verify() and not pm.verify(modules={1: changed})
