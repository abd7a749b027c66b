"""An op without a rule: its rule is found by running it on small tensors, and is kept."""

from __future__ import annotations

import copy
import os
import signal
import time
import warnings

import pytest
import torch
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.graph import Node, Value
from shardfx.ir.oracle.discover import Discovery
from shardfx.ir.oracle.instance import instance
from shardfx.ir.oracle.run_isolated import Lost, isolated
from shardfx.ir.rules.sharding_rule import ShardingRule, rule_text
from shardfx.ir.spec import TensorType


@torch.library.custom_op("shardfx_tests::row_softmax", mutates_args=())
def row_softmax(x: Tensor, scale: Tensor) -> Tensor:
    """The softmax of each row of x[n, d], column j times scale[j]."""
    return torch.softmax(x, -1) * scale


@torch.library.custom_op("shardfx_tests::row_softmax_backward", mutates_args=())
def row_softmax_backward(grad: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    y = torch.softmax(x, -1)
    inner = grad * scale
    return y * (inner - (inner * y).sum(-1, keepdim=True)), (grad * y).sum(0)


@torch.library.custom_op("shardfx_tests::noisy", mutates_args=())
def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


@torch.library.custom_op("shardfx_tests::counting", mutates_args=())
def counting(x: Tensor) -> Tensor:
    counting.calls += 1  # type: ignore[attr-defined]
    return x + counting.calls  # type: ignore[attr-defined]


@torch.library.custom_op("shardfx_tests::first_nonzero", mutates_args=())
def first_nonzero(x: Tensor) -> Tensor:
    """Where in x the first number stands that is not zero: no part of x knows."""
    return (x.flatten() != 0).to(torch.int64).argmax()


@torch.library.custom_op("shardfx_tests::failing", mutates_args=())
def failing(x: Tensor) -> Tensor:
    raise RuntimeError("only on a machine of ours")


@torch.library.custom_op("shardfx_tests::waiting", mutates_args=())
def waiting(x: Tensor) -> Tensor:
    time.sleep(1.1)
    return x * 2


@torch.library.custom_op("shardfx_tests::heads", mutates_args=())
def heads(x: Tensor, count: int) -> Tensor:
    """Each of ``count`` heads of x[n, count * d] divided by its norm."""
    parts = x.view(x.shape[0], count, -1)
    return (parts / parts.norm(dim=-1, keepdim=True)).reshape(x.shape)


counting.calls = 0  # type: ignore[attr-defined]
for op in (noisy, counting, failing, waiting):
    op.register_fake(lambda x: torch.empty_like(x))
row_softmax.register_fake(lambda x, scale: torch.empty_like(x))
row_softmax_backward.register_fake(lambda grad, x, scale: (torch.empty_like(x), torch.empty_like(scale)))
heads.register_fake(lambda x, count: torch.empty_like(x))


def keep(ctx: torch.autograd.function.FunctionCtx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


row_softmax.register_autograd(lambda ctx, grad: row_softmax_backward(grad, *ctx.saved_tensors), setup_context=keep)
ops = torch.ops.shardfx_tests


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 8, dtype=torch.float64)
        self.scale = nn.Parameter(torch.rand(8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return row_softmax(self.fc(x), self.scale)


def node(op: object, *args: object) -> Node:
    """A node on tensors of the given shapes (tuples), with the results that a run on zeros has."""
    made = instance(op, [torch.rand(a, dtype=torch.float64) if isinstance(a, tuple) else a for a in args])
    return made.node


def big(op: object, results: tuple[tuple[int, ...], ...], *args: object) -> Node:
    """The same of shapes that are too large to be run."""
    values = [
        Value(TensorType(a, torch.float32), name=f"x{i}") if isinstance(a, tuple) else a for i, a in enumerate(args)
    ]
    made = Node(op, tuple(values), {})
    made.results = [Value(TensorType(r, torch.float32), made, i, f"y{i}") for i, r in enumerate(results)]
    return made


@pytest.mark.long
def test_a_users_op_trains_as_on_one_device() -> None:
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(8, 6, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return ((out - wanted) ** 2).mean()

    hints = sx.Hints(args=(x,), loss=loss, targets=(y,), specs={"args.0": "dp, -"}, strict=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pm = sx.parallelize(model, sx.Mesh(dp=2), hints, virtual=True)
    forward = next(n for n in pm.planned.nodes if n.op is ops.row_softmax.default)
    assert str(forward.outs[0].spec) == "[.{dp}, .]"
    backward = next(n for n in pm.planned.nodes if n.op is ops.row_softmax_backward.default)
    assert [str(v.spec) for v in backward.outs] == ["[.{dp}, .]", "[.] +{dp}"]
    model = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, pm)]
    for _ in range(3):
        expected, together = loss(model(x), y), pm(x, y)
        torch.testing.assert_close(together, expected, rtol=1e-12, atol=1e-12)
        for optimizer, each in zip(optimizers, (expected, together), strict=True):
            optimizer.zero_grad()
            each.backward()
            optimizer.step()
        for name, grad in pm.full_grads().items():
            torch.testing.assert_close(grad, model.get_parameter(name).grad, rtol=1e-12, atol=1e-12)
    assert pm.verify()
    said = "the rule of shardfx_tests.row_softmax"
    assert any(said in note and "a b!, c! -> a d!" in note for note in pm.report().warnings)
    assert "found by running the op" in str(pm.explain(f"%{forward.name}"))


def rule_of(made: Node) -> ShardingRule | None:
    entry = Discovery().entry(made.op)
    return entry.make(made) if entry is not None else None


@pytest.mark.long
@pytest.mark.parametrize(
    ("made", "text", "linear"),
    [
        (node(ops.row_softmax_backward.default, (6, 4), (6, 4), (4,)), "a b!, a c!, d! -> a e!, f!", ["0>0&1", "2>0"]),
        (big(ops.row_softmax.default, ((4096, 50304),), (4096, 50304), (50304,)), "a b!, c! -> a d!", ["1>0"]),
        (big(ops.heads.default, ((64, 4096),), (64, 4096), 32), "a (b c!) -> a (b d!)", []),
    ],
)
def test_discovered_rule_has_the_shardable_dims(made: Node, text: str, linear: list[str]) -> None:
    rule = rule_of(made)
    assert rule is not None
    assert rule_text(rule) == text
    assert list(map(str, rule.linear)) == linear


@pytest.mark.long
@pytest.mark.parametrize("op", [ops.noisy, ops.counting, ops.failing, ops.waiting])
def test_op_that_cannot_be_run_repeatably_has_no_rule(op: object) -> None:
    assert rule_of(big(op.default, ((6, 4),), (6, 4))) is None  # type: ignore[attr-defined]


def test_op_that_depends_on_rare_values_has_no_rule() -> None:
    assert rule_of(node(ops.first_nonzero.default, (6, 4))) is None


def test_discovery_leaves_the_users_random_numbers_alone() -> None:
    made = node(ops.row_softmax.default, (6, 4), (4,))
    state = torch.get_rng_state()
    rule_of(made)
    assert torch.equal(state, torch.get_rng_state())


# ---- kernels that do not check what they are given


@torch.library.custom_op("shardfx_tests::crashing", mutates_args=())
def crashing(x: Tensor) -> Tensor:
    """Ends its process on a part of x."""
    if x.shape[0] < 6:
        os.kill(os.getpid(), signal.SIGSEGV)
    return x * 2


@torch.library.custom_op("shardfx_tests::in_groups", mutates_args=())
def in_groups(x: Tensor, ends: Tensor) -> Tensor:
    """x[n, d] times the number of groups that end before a row; those that end before row 2 do not count."""
    before = (ends[None] <= torch.arange(x.shape[0])[:, None]) & (ends[None] >= 2)
    return x * (1 + before.sum(1, keepdim=True))


crashing.register_fake(lambda x: torch.empty_like(x))
in_groups.register_fake(lambda x, ends: torch.empty_like(x))


def test_kernel_that_crashes_has_no_rule() -> None:
    assert rule_of(node(ops.crashing.default, (6, 4))) is None


def test_index_operands_are_drawn_over_their_whole_range() -> None:
    """By ends of 0 and 1 alone rows might be sharded."""
    x, ends = Value(TensorType((12, 4), torch.float64), name="x"), Value(TensorType((4,), torch.int64), name="ends")
    made = Node(ops.in_groups.default, (x, ends), {})
    made.results = [Value(TensorType((12, 4), torch.float64), made, 0, "y")]
    rule = rule_of(made)
    assert rule is not None and rule_text(rule) == "b! a, c! -> d! a"


@pytest.mark.long
def test_isolated_run_survives_crashes_and_time_limits() -> None:
    for work, said in ((os.abort, "SIGABRT"), (lambda: time.sleep(9), "within 2 s"), (lambda: 1 // 0, "ZeroDiv")):
        with pytest.raises(Lost, match=said):
            isolated(work, seconds=2)
