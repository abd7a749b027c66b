"""Gradient accumulation (loop axes over the batch): loss and gradients of the whole batch, however many iterations;
what iterations add into and when it is reduced; what cannot be done in iterations; pictures and reports of it."""

from __future__ import annotations

import copy
import pickle
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.ops import comm
from shardfx.ir.program.loops.loop_regions import regions
from shardfx.ir.program.program_text import parse_program
from shardfx.visualize.detail import show
from shardfx.visualize.graph_picture import picture_svg
from shardfx.visualize.style import TIMES
from tests.collective_counts import count_collectives
from tests.live_memory import check_footprint, held_in_a_step
from tests.models import Language, next_tokens
from tests.plans import plan, train_beside
from tests.reference import check_step
from tests.zoo import Case, make

DP, BOTH = sx.Mesh(dp=2), sx.Mesh(dp=2, tp=2)
SHARDS = {"zero_min_numel": 0}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "mesh", "hints"),
    [
        ("mlp3", BOTH, {"grad_accumulation": 3}),
        ("gpt_fused", DP, {"grad_accumulation": 4, "recompute": "layers.*"}),
        ("llama", DP, {"grad_accumulation": 3, "zero": 3, **SHARDS}),
        ("unet", DP, {"grad_accumulation": 2, "reduce": "each"}),
    ],
    ids=str,
)
def test_training_in_iterations_equals_the_whole_batch_on_one_device(
    name: str, mesh: sx.Mesh, hints: dict[str, Any]
) -> None:
    assert train_beside(name, mesh, **hints).worst < make(name).tolerance


@pytest.mark.long
def test_replay_of_iterations_predicts_what_a_run_holds() -> None:
    case = make("mlp3")
    pm = plan(case, DP, grad_accumulation=3, zero=3, **SHARDS)
    held = held_in_a_step(pm, case)
    for rank in range(pm.mesh.size):
        check_footprint(pm.rank_program(rank), held[rank])


def of_512_rows(count: int) -> sx.ParallelModule:
    case = make("mlp3")
    x, y = torch.zeros(512, 32, dtype=torch.float64), torch.zeros(512, dtype=torch.int64)
    specs = {"args.0": "dp, -"}
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs=specs, grad_accumulation=count)
    return sx.parallelize(case.model, DP, hints, virtual=True)


@pytest.mark.long
def test_many_iterations_are_as_long_as_few() -> None:
    few, many = (of_512_rows(count).rank_program(1) for count in (2, 256))
    assert len(few.graph.nodes) == len(many.graph.nodes)
    assert replay(many).cost.flops == replay(few).cost.flops > 0
    assert replay(many).peak.nbytes < replay(few).peak.nbytes


@pytest.mark.long
def test_program_with_iterations_round_trips_as_text_and_pickle_and_compiles() -> None:
    pm = plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4)
    program = pm.rank_program(1)
    assert str(parse_program(str(program), pm.planned)) == str(program)
    module = pm.rank_module(1)
    again = pickle.loads(pickle.dumps(module))
    assert "loop_ops_repeat" in module.code
    assert again.code == module.code == copy.deepcopy(module).code
    assert pm.verify(modules={1: again})
    pm.use(modules={1: again})
    case = make("mlp3")
    whole = case.loss(case.model(*case.args), *case.targets)
    assert abs(pm(*case.args, *case.targets).item() - whole.item()) < 1e-12
    pm = plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4)
    pm.compile(backend="eager")
    assert abs(pm(*case.args, *case.targets).item() - whole.item()) < 1e-12


# ---- what cannot be done in iterations


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.first(x))))


def in_iterations(model: nn.Module, loss: Callable[..., Tensor], **hints: Any) -> sx.ParallelModule:
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(3, (8,))
    given = sx.Hints(
        args=(x,), loss=loss, targets=(y,), **{"specs": {"args.0": "dp, -"}, "grad_accumulation": 2, **hints}
    )
    return sx.parallelize(model, sx.Mesh(dp=2), given, virtual=True)


def test_a_batch_norm_needs_all_iterations_at_each_layer() -> None:
    with pytest.raises(sx.Error, match=r"all micro-batches of 'mb' must have come to this place") as error:
        in_iterations(Normed(), F.cross_entropy)
    said = ("norm  test_grad_accumulation.py", "batch_stats", "set_experts_implementation")
    assert all(each in str(error.value) for each in said)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    sure = out.softmax(-1).amax(-1)
    return (F.cross_entropy(out, y, reduction="none") * sure).sum() / sure.sum()


@pytest.mark.long
def test_forward_that_all_iterations_need_runs_twice_with_a_warning() -> None:
    model = nn.Linear(6, 3).double()
    torch.manual_seed(0)
    x, y = torch.randn(8, 6, dtype=torch.float64), torch.randint(3, (8,))
    hints = sx.Hints(args=(x,), loss=weighted, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=2)
    with pytest.warns(sx.ShardfxWarning, match="runs twice"):
        pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    loss = weighted(model(x), y)
    loss.backward()
    made = pm(x, y)
    made.backward()
    assert abs(made.item() - loss.item()) < 1e-12
    assert model.weight.grad is not None
    assert (pm.full_grads()["weight"] - model.weight.grad).abs().max() < 1e-12
    with pytest.raises(sx.Error, match="before any can go on"):
        in_iterations(nn.Linear(6, 3), weighted, strict=True)


@pytest.mark.parametrize(
    ("hints", "said"),
    [
        ({"grad_accumulation": 0}, "grad_accumulation"),
        ({"reduce": "never"}, "reduce"),
        ({"specs": {"args.0": "dp, -", "weight": "mb, -"}}, "a parameter is sharded over 'mb', a loop axis"),
    ],
)
def test_wrong_hints_on_iterations_are_errors(hints: dict[str, Any], said: str) -> None:
    with pytest.raises(sx.Error, match=said):
        in_iterations(nn.Linear(6, 3), F.cross_entropy, **hints)


@pytest.mark.long
def test_batch_norms_of_each_micro_batch_match_a_loop_over_micro_batches() -> None:
    torch.manual_seed(0)
    model = Normed().double()
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.randint(3, (12,))
    hints = sx.Hints(
        args=(x,),
        loss=F.cross_entropy,
        targets=(y,),
        specs={"args.0": "dp, -"},
        grad_accumulation=3,
        batch_stats="microbatch",
    )
    pm = sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), hints, virtual=True)
    made = pm(x, y)
    made.backward()
    for a, b in zip(x.chunk(3), y.chunk(3), strict=True):
        (F.cross_entropy(model(a), b) / 3).backward()
    grads, state = pm.full_grads(), pm.full_state_dict()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (grads[name] - parameter.grad).abs().max() < 1e-12
    for name in ("norm.running_mean", "norm.running_var"):
        assert (state[name] - model.get_buffer(name)).abs().max() < 1e-12
    assert pm.verify()


@pytest.mark.long
def test_hint_on_a_module_holds_in_each_iteration() -> None:
    """What is sharded over ranks between blocks: Megatron's tokens over tp."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x, t = torch.randn(8, 4, 6, dtype=torch.float64), torch.randint(3, (8, 4))
    pm = sx.parallelize(
        model,
        BOTH,
        sx.Hints(
            args=(x,),
            loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            targets=(t,),
            specs={"args.0": "dp, -, -", "1": "dp, tp, -", "3": "dp, tp, -"},
            grad_accumulation=2,
        ),
        virtual=True,
    )
    hints = [str(node.outs[0].hint) for node in pm.planned.nodes if node.outs and node.outs[0].hint is not None]
    assert hints == 2 * ["[.{mb,dp}, .{tp}, .]"]
    loss, alone = pm(x, t), F.cross_entropy(model(x).flatten(0, 1), t.flatten())
    loss.backward(), alone.backward()
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(pm.full_grads()["0.weight"], model[0].weight.grad)
    assert pm.verify()


# ---- what iterations add into, and when it is reduced


@pytest.mark.long
def test_batch_with_too_few_rows_is_an_error_that_says_how_many() -> None:
    case = make("gpt_fused")
    x, y = case.args[0][:6], case.targets[0][:6]
    hints = sx.Hints(args=(x,), loss=case.loss, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=4)
    with pytest.raises(sx.Error, match="too few rows to be done in micro-batches") as error:
        sx.parallelize(case.model, sx.Mesh(dp=2), hints, virtual=True)
    said = str(error.value)
    assert "args.0" in said and "at least 8 rows, one for each of 4 micro-batches by 2 ranks" in said


@pytest.mark.long
def test_batch_is_split_beside_a_loop_over_another_dim() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    x, y = torch.randn(8, 4, 6, dtype=torch.float64), torch.randn(8, 4, 3, dtype=torch.float64)
    for mesh, spec, expected in (
        (sx.Mesh(chunk=sx.Loop(2)), "-, chunk, -", "[.{mb}, .{chunk}, .]"),
        (sx.Mesh(chunk=sx.Loop(2)), "chunk, -, -", "[.{mb,chunk}, ., .]"),
    ):
        hints = sx.Hints(args=(x,), loss=F.mse_loss, targets=(y,), specs={"args.0": spec}, grad_accumulation=2)
        pm = sx.parallelize(copy.deepcopy(model), mesh, hints, virtual=True)
        assert str(pm.planned.input("args.0").value.spec) == expected
        model.zero_grad()
        check_step(pm, model, F.mse_loss, (x,), (y,), bound=1e-12)


def planned(**hints: Any) -> sx.ParallelModule:
    return plan(make("mlp3"), DP, grad_accumulation=4, **SHARDS, **hints)


def reduced_in_iterations(pm: sx.ParallelModule) -> bool:
    """Whether a gradient is reduced among ranks in iterations."""
    nodes = pm.rank_program(0).graph.nodes
    inside = regions(nodes)
    return any("reduce_scatter" in node.name and inside[node] for node in nodes)


@pytest.mark.long
def test_gradients_are_reduced_in_each_iteration_only_if_memory_asks_for_it() -> None:
    zero = 2  # with zero=3 buckets are finer, and "last" holds no more than "each"
    last, each = (planned(zero=zero, reduce=way) for way in ("last", "each"))
    assert not reduced_in_iterations(last) and reduced_in_iterations(each)
    peaks = [pm.memory(0).peak for pm in (last, each)]
    assert peaks[1] < peaks[0]
    ample, tight = (planned(zero=zero, memory=peak) for peak in (peaks[0], peaks[0] - 1))
    assert not reduced_in_iterations(ample) and reduced_in_iterations(tight)
    assert ample.memory(0).peak == peaks[0] and tight.memory(0).peak == peaks[1]
    for pm, said in ((ample, "reduced once, behind the last iteration"), (tight, "reduced in each iteration")):
        (sent,) = (node for node in pm.planned.nodes if node.op is comm.reduce_scatter)
        assert said in str(pm.explain(f"%{sent.name}"))
    assert any("which is faster" in note for note in ample.report().warnings)
    assert any("may hold" in note for note in tight.report().warnings)
    assert ample.verify() and tight.verify()

    assert not reduced_in_iterations(planned(zero=2, machine="h100-dgx")) and reduced_in_iterations(planned(zero=2))


WORDS, WIDTH = 61, 8


def batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, y = torch.randint(WORDS - 1, (8, 6)), torch.randint(WORDS - 1, (8, 6))
    y[0, :5] = -100
    return x, y


def add_planned(model: nn.Module, **hints: Any) -> sx.ParallelModule:
    x, y = batch()
    given = sx.Hints(args=(x,), loss=next_tokens, targets=(y,), specs={"args.0": "dp, -"}, grad_accumulation=3, **hints)
    return sx.parallelize(copy.deepcopy(model), sx.Mesh(dp=2), given, virtual=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("table", "hints"),
    [({"padding_idx": 5}, {}), ({"words": 60}, {"zero": 2, **SHARDS, "reduce": "last"})],
    ids=str,
)
def test_gradients_of_a_table_are_added_where_they_lie(table: dict[str, Any], hints: dict[str, Any]) -> None:
    torch.manual_seed(1)
    model = Language(**{"words": WORDS, **table}).double()
    pm = add_planned(model, **hints)
    x, y = batch()
    check_step(pm, model, next_tokens, (x,), (y,), bound=1e-12)
    text = str(pm.rank_program(1))
    in_shards = "zero" in hints and "words" in table  # rows of both ranks stand together: so is a product added
    assert "loop.addmm" in text and ("loop.index_add" in text) != in_shards


@pytest.mark.long
def test_no_second_buffer_holds_an_accumulated_gradient() -> None:
    x, y = batch()
    pm = add_planned(Language(WORDS).double())
    held = held_in_a_step(pm, Case("language", Language(WORDS).double(), (x,), {}, next_tokens, (y,)))
    for rank in range(2):
        check_footprint(pm.rank_program(rank), held[rank])
    table = WORDS * WIDTH * 8
    assert all(storage.nbytes != table for storage in pm.memory(0).footprint.storages)


# ---- pictures and reports


def texts(pm: sx.ParallelModule) -> list[str]:
    root = ET.fromstring(picture_svg(show(pm.planned), "a title"))
    return ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]


@pytest.mark.long
def test_iterations_are_drawn_once_with_their_count() -> None:
    few, many = texts(of_512_rows(4)), texts(of_512_rows(256))
    assert [text for text in few if "iterations" in text] == [
        text.replace("256 iterations", "4 iterations") for text in many if "iterations" in text
    ]
    assert len(many) == len(few)
    assert sum(f"{TIMES} 256 iterations" in text for text in many) > 1
    assert any("accumulated over iterations; nothing is sent" in text for text in many)


@pytest.mark.long
def test_report_counts_what_ranks_send_in_all_iterations() -> None:
    case = make("gpt_fused")
    pm = plan(case, DP, grad_accumulation=2, zero=3, reduce="each", **SHARDS)
    report = pm.report().communication
    assert all("mb" not in row.axes for row in report.rows)
    with count_collectives() as counts:
        pm(*case.args, *case.targets).backward()
    assert report.calls == counts.calls and report.nbytes == pytest.approx(counts.nbytes)
