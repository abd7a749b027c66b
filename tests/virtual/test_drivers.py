"""Programs in units as modules: a driver that calls each unit; copied, compiled, saved, changed, proven, refused."""

from __future__ import annotations

import copy
import operator
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import shardfx as sx
from shardfx.ir.program.program_text import parse_program
from shardfx.ir.program.rank_program import RankProgram
from shardfx.module.programs import TRAIN
from shardfx.runtime.export_programs import functions
from tests.plans import plan
from tests.unit_orders import ONE_AHEAD, ORDERS, in_order, program
from tests.zoo import make


def one_rank(order: str) -> tuple[RankProgram, list[Tensor]]:
    case = make("mlp3")
    pm = plan(case, sx.Mesh(one=1), grad_accumulation=4)
    state = {**pm.full_state_dict(), "args.0": case.args[0], "targets.0": case.targets[0]}
    made = program(pm, 0, order)
    return made, [state[given.name] for given in made.inputs]


@pytest.mark.long
@pytest.mark.one_in(4)
@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_a_driver_runs_as_it_stands(order: str) -> None:
    made, inputs = one_rank(order)
    module = made.module()
    called = [node.name for node in module.graph.nodes if node.op == "call_module"]
    assert called == [word.lower().replace(".", "_") for word in order.split()]
    whole = [each.clone() for each in plan(make("mlp3"), sx.Mesh(one=1), grad_accumulation=4).rank_module(0)(*inputs)]
    again = pickle.loads(pickle.dumps(module))
    assert again.code == module.code == copy.deepcopy(module).code and again.F0.code == module.F0.code
    for each in (module, again, torch.compile(module, backend="eager")):
        found = each(*inputs)
        assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(found, whole, strict=True))


@pytest.mark.long
def test_a_driver_is_text_and_read_back() -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    made = pm._programs.running(1, TRAIN)
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


@pytest.mark.slow
def test_compiled_units_are_the_same_units() -> None:
    case = make("mlp3")
    pm = plan(case, sx.Mesh(dp=2), grad_accumulation=4)
    loss = pm(*case.args, *case.targets)
    loss.backward()
    grads = pm.full_grads()
    pm.compile(backend="eager")
    for rank in range(2):
        pm._programs.step.put(rank, TRAIN, program(pm, rank, ONE_AHEAD, compiled=True))
    pm.zero_grad()
    again = pm(*case.args, *case.targets)
    again.backward()
    assert abs(again - loss) < 1e-12
    assert all((each - grads[name]).abs().max() < 1e-12 for name, each in pm.full_grads().items())


# ---- changed drivers


def call(graph: fx.Graph, name: str) -> fx.Node:
    return next(node for node in graph.nodes if node.op == "call_module" and node.name == name)


def left_out(module: fx.GraphModule) -> None:
    module.graph.erase_node(call(module.graph, "b0_1"))


def left_out_at_the_end(module: fx.GraphModule) -> None:
    last, before = call(module.graph, "b0_3"), call(module.graph, "b0_2")
    last.replace_all_uses_with(before)
    module.graph.erase_node(last)


def done_twice(module: fx.GraphModule) -> None:
    once = call(module.graph, "b0_1")
    with module.graph.inserting_after(once):
        module.graph.node_copy(once)


def values_of_another_iteration(module: fx.GraphModule) -> None:
    ours, theirs = call(module.graph, "b0_1"), call(module.graph, "b0_2")
    ours.args = (ours.args[0], *theirs.args[1:])


def value_of_another_iteration(module: fx.GraphModule) -> None:
    """The backward of iteration 2 reads one value that the forward of iteration 1 made."""
    ours, theirs = call(module.graph, "b0_2"), call(module.graph, "b0_1")
    at = next(i for i, (a, b) in enumerate(zip(ours.args, theirs.args, strict=True)) if i and a is not b)
    ours.update_arg(at, theirs.args[at])


def iterations_exchanged(module: fx.GraphModule) -> None:
    first, second = call(module.graph, "f0_1"), call(module.graph, "f0_2")
    first.update_arg(0, 2)
    second.update_arg(0, 1)


def backward_before_its_forward(module: fx.GraphModule) -> None:
    call(module.graph, "f0_1").prepend(call(module.graph, "b0_1"))


def gradient_of_a_iteration_before(module: fx.GraphModule) -> None:
    got = next(user for user in call(module.graph, "b0_3").users)
    got.update_arg(0, call(module.graph, "b0_2"))


def without_a_number(module: fx.GraphModule) -> None:
    call(module.graph, "f0_2").update_arg(0, 2.0)


def other_weight(module: fx.GraphModule) -> None:
    """One iteration takes another operand of the same shape, from before the iterations."""
    node = call(module.graph, "b0_2")
    with module.graph.inserting_before(node):
        at = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and "weight" in arg.name)
        node.update_arg(at, module.graph.call_function(torch.ops.aten.neg.default, (node.args[at],)))


def another_forward(module: fx.GraphModule) -> None:
    unit: Any = module.F0
    relu = next(node for node in unit.graph.nodes if node.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.sigmoid.default
    unit.recompile()


def kept_value_exchanged(module: fx.GraphModule) -> None:
    """The backward takes two values of its forward the other way round."""
    for iteration in range(4):
        node = call(module.graph, f"b0_{iteration}")
        made = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and arg.target is operator.getitem]
        a, b = made[0], made[-1]
        first, last = node.args[a], node.args[b]
        node.update_arg(a, last)
        node.update_arg(b, first)


MUTANTS: list[tuple[Callable[[fx.GraphModule], None], str]] = [
    (left_out, "B0.1 is done 0 times"),
    (left_out_at_the_end, "B0.3 is done 0 times"),
    (done_twice, "B0.1 is done twice"),
    (values_of_another_iteration, "B0.1 is given what F0.2 makes"),
    (value_of_another_iteration, "B0.2 is given what F0.1 makes"),
    (iterations_exchanged, "B0.1 is given what F0.2 makes"),
    (backward_before_its_forward, "is used in B0 of iteration 1, before F0 makes it"),
    (gradient_of_a_iteration_before, "of iteration 2 is used behind the iterations"),
    (without_a_number, "F0 is called without the number of an iteration"),
    (other_weight, "B0.2 is given another value than B0.0"),
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
@pytest.mark.one_in(2)
@pytest.mark.parametrize(("damage", "said"), MUTANTS)
def test_damaged_drivers_are_refused(damage: Callable[[fx.GraphModule], None], said: str) -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    module = pm.rank_module(1)
    damage(module)
    module.recompile()
    why = refusal(pm, module)
    assert why and said in why


@pytest.mark.long
def test_calls_that_nobody_takes_from_stay() -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    for module in (pm.rank_module(1), copy.deepcopy(pm.rank_module(1)), pickle.loads(pickle.dumps(pm.rank_module(1)))):
        code = module.code
        for each in (module, module.F0, module.B0):
            assert isinstance(each, fx.GraphModule)
            each.graph.eliminate_dead_code()
            each.recompile()
        assert [n.name for n in module.graph.nodes if n.op == "call_module"] == [
            word.lower().replace(".", "_") for word in ONE_AHEAD.split()
        ]
        assert module.code == code
    assert pm.verify(modules={1: module})


@pytest.mark.long
def test_what_stands_between_calls_is_done_before() -> None:
    pm = in_order("mlp3", sx.Mesh(dp=2), ONE_AHEAD)
    module = pm.rank_module(1)
    for name in ("b0_1", "b0_2"):
        node = call(module.graph, name)
        with module.graph.inserting_before(node):
            at = next(i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node) and "fc2_weight" in arg.name)
            module.graph.call_function(torch.ops.aten.neg.default, (node.args[at],))
    module.recompile()
    assert pm.verify(modules={1: module})
