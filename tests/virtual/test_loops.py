"""loop axes: loss and gradients of the whole batch, however many iterations it has; proven iteration by iteration."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import shardfx as sx
from shardfx.ir.cost.replay import replay
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.program_text import parse_program
from tests.damage_loops import calls
from tests.live_memory import check_footprint, held_in_a_step
from tests.plans import plan, train_beside
from tests.zoo import make
from tests.zoo.cases import as_it_is

slow = pytest.mark.slow
HINTS: dict[str, tuple[sx.Mesh, dict[str, Any]]] = {
    "2 iterations": (sx.Mesh(dp=1), {"grad_accumulation": 2}),
    "5 iterations of 8 rows": (sx.Mesh(dp=1), {"grad_accumulation": 5}),
    "8 iterations": (sx.Mesh(dp=1), {"grad_accumulation": 8}),
    "tp2, 5 iterations": (sx.Mesh(dp=1, tp=2), {"grad_accumulation": 5}),
    "dp2, 4 iterations": (sx.Mesh(dp=2), {"grad_accumulation": 4}),
    "dp2 tp2, 3 iterations": (sx.Mesh(dp=2, tp=2), {"grad_accumulation": 3}),
    "zero 1": (sx.Mesh(dp=2), {"grad_accumulation": 2, "zero": 1, "zero_min_numel": 0}),
    "zero 2": (sx.Mesh(dp=2), {"grad_accumulation": 2, "zero": 2, "zero_min_numel": 0}),
    "zero 3": (sx.Mesh(dp=2), {"grad_accumulation": 3, "zero": 3, "zero_min_numel": 0}),
    "each": (sx.Mesh(dp=2), {"grad_accumulation": 2, "reduce": "each"}),
    "recompute": (sx.Mesh(dp=2), {"grad_accumulation": 2}),
}
AGAIN = {
    "mlp3": "fc2",
    "gpt_fused": "layers.*",
    "llama": "layers.*",
    "unet": "down*",
    "hf_gpt2": "**.h.*",
    "hf_t5": "**.block.*",
    "hf_bert": "**.layer.*",
    "hf_vit": "**.layers.*",
    "moe_mixtral": "**.layers.*",
}
"""What is recomputed, with "recompute"."""
NAMES = ["mlp3", "gpt_fused", "llama", "unet", "moe_loop", "hf_gpt2", "hf_t5", "hf_bert", "hf_vit", "moe_mixtral"]
PREPARED: dict[str, Callable[[Any], object]] = {
    "moe_mixtral": lambda model: model.set_experts_implementation("batched_mm"),  # which sorts nothing over the batch
}
QUICK = {
    ("mlp3", "5 iterations of 8 rows"),
    ("mlp3", "dp2 tp2, 3 iterations"),
    ("mlp3", "8 iterations"),
    ("gpt_fused", "dp2, 4 iterations"),
    ("unet", "2 iterations"),
    ("gpt_fused", "zero 2"),
    ("gpt_fused", "zero 3"),
    ("mlp3", "each"),
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "how"),
    [
        pytest.param(name, how, marks=() if (name, how) in QUICK else slow)
        for name in NAMES
        for how in HINTS
        if how != "recompute" or name in AGAIN
    ],
)
@pytest.mark.one_in(3)
def test_training_in_iterations_equals_the_whole_batch_on_one_device(name: str, how: str) -> None:
    mesh, hints = HINTS[how]
    hints = hints | {"recompute": AGAIN[name]} if how == "recompute" else hints
    assert train_beside(name, mesh, prepare=PREPARED.get(name, as_it_is), **hints).worst < make(name).tolerance


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [*(pytest.param(how, marks=slow) for how in ("dp2, 4 iterations", "zero 3")), "5 iterations of 8 rows"]
)
def test_what_is_done_in_iterations_is_proven(how: str) -> None:
    mesh, hints = HINTS[how]
    pm = plan(make("gpt_fused"), mesh, **hints)
    verdict = pm.verify()
    assert verdict, verdict
    assert pm.verify(run=True)


@pytest.mark.long
@pytest.mark.parametrize("how", ["dp2, 4 iterations", "zero 3"])
def test_a_iteration_holds_what_a_run_holds(how: str) -> None:
    mesh, hints = HINTS[how]
    case = make("mlp3")
    pm = plan(case, mesh, **hints)
    held = held_in_a_step(pm, case)
    for rank in range(pm.mesh.size):
        check_footprint(pm.rank_program(rank), held[rank])


@pytest.mark.long
def test_many_iterations_are_as_long_as_few() -> None:
    case = make("mlp3")
    few, many = (
        sx.parallelize(
            case.model,
            sx.Mesh(dp=2),
            sx.Hints(
                args=(torch.zeros(512, 32, dtype=torch.float64),),
                loss=case.loss,
                targets=(torch.zeros(512, dtype=torch.int64),),
                specs={"args.0": "dp, -"},
                grad_accumulation=count,
            ),
            virtual=True,
        ).rank_program(1)
        for count in (2, 256)
    )
    assert len(few.graph.nodes) == len(many.graph.nodes)
    assert replay(many).cost.flops == replay(few).cost.flops > 0
    assert replay(many).peak.nbytes < replay(few).peak.nbytes


# ---- damaged programs


def rounder(graph: fx.Graph) -> None:
    node = calls(graph, "memory.filled")[-1]
    node.args = (*node.args[:2], torch.float16, *node.args[3:])


def the_last_iteration_alone(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    node.replace_all_uses_with(node.args[1], delete_user_cb=lambda user: user.target is not loop_ops.end)


def collected_before_the_end(graph: fx.Graph) -> None:
    node = calls(graph, "loop.add")[-1]
    with graph.inserting_after(node):
        read = graph.call_function(torch.ops.aten.neg.default, (node,))
    read.meta = dict(node.meta)


@pytest.mark.long
@pytest.mark.parametrize("damage", [rounder, the_last_iteration_alone, collected_before_the_end])
def test_damaged_iterations_are_refused(damage: Callable[[fx.Graph], None]) -> None:
    pm = plan(make("mlp3"), sx.Mesh(dp=2), grad_accumulation=4)
    program = pm.rank_program(1)
    damage(program.graph)
    verdict = pm.verify(modules={1: program.module()})
    assert not verdict and verdict.why


@pytest.mark.long
def test_a_program_with_iterations_is_text_a_module_and_a_file() -> None:
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


@slow
def test_compiled_iterations_are_the_same_iterations() -> None:
    case = make("gpt_fused")
    pm = plan(case, sx.Mesh(dp=2), grad_accumulation=2)
    loss = pm(*case.args, *case.targets)
    pm.compile(backend="eager")
    assert abs(pm(*case.args, *case.targets).item() - loss.item()) < 1e-12
    assert pm.verify()


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
    assert "norm  test_loops.py" in str(error.value) and "batch_stats" in str(error.value)


@pytest.mark.slow
def test_experts_that_sort_the_tokens_of_the_batch_need_all_iterations() -> None:
    with pytest.raises(sx.Error, match=r"must have come to this place") as error:
        plan(make("moe_mixtral"), sx.Mesh(dp=2), grad_accumulation=2)
    assert "set_experts_implementation" in str(error.value)


def weighted(out: Tensor, y: Tensor) -> Tensor:
    sure = out.softmax(-1).amax(-1)
    return (F.cross_entropy(out, y, reduction="none") * sure).sum() / sure.sum()


@pytest.mark.long
def test_what_all_iterations_must_know_of_the_forward_is_done_twice_and_said() -> None:
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
def test_hints_that_say_nothing_sensible(hints: dict[str, Any], said: str) -> None:
    with pytest.raises(sx.Error, match=said):
        in_iterations(nn.Linear(6, 3), F.cross_entropy, **hints)


@pytest.mark.slow
def test_batch_norms_of_each_iteration_are_those_of_a_loop_over_iterations() -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("data", ["dp", "-"])
def test_a_hint_on_a_module_says_nothing_of_iterations(data: str) -> None:
    """What is sharded over ranks between blocks (Megatron's tokens over tp) is so in each iteration."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 3)).double()
    x, t = torch.randn(8, 4, 6, dtype=torch.float64), torch.randint(3, (8, 4))
    pm = sx.parallelize(
        model,
        sx.Mesh(tp=2, **({"dp": 2} if data == "dp" else {})),
        sx.Hints(
            args=(x,),
            loss=lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
            targets=(t,),
            specs={"args.0": f"{data}, -, -", "1": f"{data}, tp, -", "3": f"{data}, tp, -"},
            grad_accumulation=2,
        ),
        virtual=True,
    )
    hints = [str(node.outs[0].hint) for node in pm.planned.nodes if node.outs and node.outs[0].hint is not None]
    assert hints == 2 * [f"[.{{{'mb,dp' if data == 'dp' else 'mb'}}}, .{{tp}}, .]"]
    loss, alone = pm(x, t), F.cross_entropy(model(x).flatten(0, 1), t.flatten())
    loss.backward(), alone.backward()
    torch.testing.assert_close(loss, alone)
    torch.testing.assert_close(pm.full_grads()["0.weight"], model[0].weight.grad)
    assert pm.verify()
