"""Schedule actions as modules, one for each action: copied, compiled, pickled, changed, proven, refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardfx as sx
from shardfx.ir.ops.loop import loop_ops
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.program.rank_program import RankProgram
from shardfx.runtime.export_programs import functions
from tests.plans import plan
from tests.unit_orders import BACKWARDS, ONE_AHEAD, in_order, program
from tests.zoo import make


def one_rank(order: str) -> tuple[RankProgram, list[Tensor]]:
    case = make("mlp3")
    pm = plan(case, sx.Mesh(one=1), grad_accumulation=4)
    state = {**pm.full_state_dict(), "args.0": case.args[0], "targets.0": case.targets[0]}
    made = program(pm, 0, order)
    return made, [state[given.name] for given in made.inputs]


@pytest.mark.long
def test_module_of_actions_runs_copied_pickled_and_compiled() -> None:
    made, inputs = one_rank(BACKWARDS)
    module = made.module()
    assert loop_of(module).args[4] == BACKWARDS
    whole = [each.clone() for each in plan(make("mlp3"), sx.Mesh(one=1), grad_accumulation=4).rank_module(0)(*inputs)]
    again = pickle.loads(pickle.dumps(module))
    assert again.code == module.code == copy.deepcopy(module).code and again.F0.code == module.F0.code
    for each in (module, again, torch.compile(module, backend="eager")):
        found = each(*inputs)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, whole, strict=True))


@pytest.mark.long
def test_module_of_actions_round_trips_as_text() -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    made = pm.rank_program(1)
    assert str(parse_program(str(made), pm.planned)) == str(made)
    read = made.changed(made.module())
    again = read.changed(read.module())
    assert [(n.op, n.target) for n in read.graph.nodes] == [(n.op, n.target) for n in made.graph.nodes]
    assert str(again) == str(read)
    pm.use(modules={rank: pm.rank_module(rank) for rank in range(2)})
    case = make("mlp3")
    whole = case.loss(case.model(*case.args), *case.targets)
    assert abs(pm(*case.args, *case.targets).item() - whole.item()) < 1e-12
    code = functions(made.module(), "forward")
    assert any(each.startswith("def forward_B0(iteration, ") for each in code) and "self." not in "".join(code)


# ---- changed modules


def loop_of(module: fx.GraphModule) -> fx.Node:
    """The loop in units: the last one."""
    return [node for node in module.graph.nodes if node.target is loop_ops.repeat][-1]


def operands(module: fx.GraphModule) -> list[Any]:
    """The operands of the backward, to be changed."""
    takes: Any = loop_of(module).args[3]
    return list(takes["B0"])


def take(module: fx.GraphModule, changed: list[Any]) -> None:
    takes: Any = loop_of(module).args[3]
    loop_of(module).update_arg(3, {**takes, "B0": changed})


def no_module(module: fx.GraphModule) -> None:
    bodies: Any = loop_of(module).args[2]
    loop_of(module).update_arg(2, {**bodies, "B0": next(iter(module.graph.nodes))})


def other_weight(module: fx.GraphModule) -> None:
    """The backward takes another operand of the same shape, from before the iterations."""
    taken = operands(module)
    at = next(i for i, arg in enumerate(taken) if isinstance(arg, fx.Node) and "weight" in arg.name)
    with module.graph.inserting_before(loop_of(module)):
        taken[at] = module.graph.call_function(torch.ops.aten.neg.default, (taken[at],))
    take(module, taken)


def another_forward(module: fx.GraphModule) -> None:
    unit: Any = module.F0
    relu = next(node for node in unit.graph.nodes if node.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.sigmoid.default
    unit.recompile()


def kept_value_exchanged(module: fx.GraphModule) -> None:
    """The backward takes two values of its forward the other way round."""
    taken = operands(module)
    made = [i for i, arg in enumerate(taken) if isinstance(arg, tuple)]
    taken[made[0]], taken[made[-1]] = taken[made[-1]], taken[made[0]]
    take(module, taken)


MUTANTS: list[tuple[Callable[[fx.GraphModule], None], str]] = [
    (lambda module: take(module, operands(module)[:-1]), "operands of 'B0'"),
    (no_module, "no module of calls"),
    (lambda module: loop_of(module).update_arg(1, 3), ""),
    (other_weight, ""),
    (another_forward, ""),
    (kept_value_exchanged, ""),
]


def refusal(pm: sx.ParallelModule, module: fx.GraphModule) -> str:
    """Why a module of rank 1 is refused: as no program of this plan, or as another one."""
    try:
        verdict = pm.verify(modules={1: module})
    except sx.Error as error:
        return str(error)
    return "" if verdict else verdict.why


@pytest.mark.long
@pytest.mark.parametrize(("damage", "said"), MUTANTS)
def test_damaged_modules_of_actions_are_refused(damage: Callable[[fx.GraphModule], None], said: str) -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    module = pm.rank_module(1)
    damage(module)
    module.recompile()
    why = refusal(pm, module)
    assert why and said in why


@pytest.mark.long
def test_dead_code_elimination_keeps_actions_without_users() -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    for module in (pm.rank_module(1), copy.deepcopy(pm.rank_module(1)), pickle.loads(pickle.dumps(pm.rank_module(1)))):
        code = module.code
        for each in (module, module.F0, module.B0):
            assert isinstance(each, fx.GraphModule)
            each.graph.eliminate_dead_code()
            each.recompile()
        assert module.code == code
    assert pm.verify(modules={1: module})
