"""Modules that are no programs: calls that no signature takes, operands that are not there, functions nobody knows."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from shardfx.ir.ops import memory_ops

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
Change = Callable[[fx.GraphModule, fx.Node], Any]
"""Changes a module at its first relu; what it gives is asked about in the module's place, if it is not None."""


def arguments(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Change:
    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        relu.args = change(relu.args)

    return damage


def keyword(**given: Any) -> Change:
    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        relu.kwargs = given

    return damage


def target(other: Any) -> Change:
    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        relu.target = other

    return damage


def followed(op: Any, *more: Any) -> Change:
    """The relu's users take another call of it."""

    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        with module.graph.inserting_after(relu):
            made = module.graph.call_function(op, (relu, *more))
        relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)

    return damage


def beside(op: Any, *more: Any, group: bool = False) -> Change:
    """A call whose result nobody uses; ``group``: its last argument is the group of the first collective."""

    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        named = next(n.args[-1] for n in module.graph.nodes if "all_reduce" in str(n.target))
        with module.graph.inserting_after(relu):
            module.graph.call_function(op, (relu, *more, *([named] if group else [])))

    return damage


def results(change: Callable[[list[Any]], Any]) -> Change:
    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        end = module.graph.output_node()
        end.args = (change(list(end.args[0])),)  # type: ignore[arg-type]

    return damage


def no_output(module: fx.GraphModule, relu: fx.Node) -> None:
    module.graph.erase_node(module.graph.output_node())


def not_there_yet(module: fx.GraphModule, relu: fx.Node) -> None:
    relu.args = (next(iter(relu.users)),)


def a_view_of_what_is_turned(module: fx.GraphModule, relu: fx.Node) -> None:
    """On the strides that are there it needs a copy."""
    with module.graph.inserting_after(relu):
        turned = module.graph.call_function(aten.t.default, (relu,))
    with module.graph.inserting_after(turned):
        flat = module.graph.call_function(aten.view.default, (turned, [-1]))
    with module.graph.inserting_after(flat):
        module.graph.call_function(aten.neg.default, (flat,))


def no_sizes(module: fx.GraphModule, relu: fx.Node) -> None:
    """Memory of no shape: of ours, where numbers are expected."""
    with module.graph.inserting_before(relu):
        flat = module.graph.call_function(memory_ops.empty, ([8], torch.float32))
        module.graph.call_function(memory_ops.part, (flat, 1, 0, None))


def a_result_beyond_a_list(module: fx.GraphModule, relu: fx.Node) -> None:
    with module.graph.inserting_after(relu):
        made = module.graph.call_function(operator.getitem, ([relu], 3))
    relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def no_placeholder(module: fx.GraphModule, relu: fx.Node) -> None:
    first, second, *_ = [node for node in module.graph.nodes if node.op == "placeholder"]
    first.replace_all_uses_with(second)
    module.graph.erase_node(first)


def one_placeholder_more(module: fx.GraphModule, relu: fx.Node) -> None:
    with module.graph.inserting_before(next(iter(module.graph.nodes))):
        module.graph.placeholder("more")


def a_method(module: fx.GraphModule, relu: fx.Node) -> None:
    with module.graph.inserting_after(relu):
        made = module.graph.call_method("neg", (relu,))
    relu.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


def another_group(name: Any) -> Change:
    def damage(module: fx.GraphModule, relu: fx.Node) -> None:
        start = next(node for node in module.graph.nodes if "all_reduce" in str(node.target))
        start.args = (*start.args[:-1], name)

    return damage


FORMS: dict[str, Change] = {
    "extra arguments": arguments(lambda args: (*args, 3, 4)),
    "no argument": arguments(lambda args: ()),
    "a number for a tensor": arguments(lambda args: (3,)),
    "a list for a tensor": arguments(lambda args: (list(args),)),
    "None for a tensor": arguments(lambda args: (None,)),
    "a text for a tensor": arguments(lambda args: ("x",)),
    "an operand that is not there yet": not_there_yet,
    "an unknown keyword": keyword(how=1),
    "a view that needs a copy": a_view_of_what_is_turned,
    "None is returned": results(lambda given: (None, *given[1:])),
    "a number is returned": results(lambda given: (1.0, *given[1:])),
    "a list is returned": results(lambda given: ([given[0]], *given[1:])),
    "an output is missing": results(lambda given: tuple(given[1:])),
    "no output": no_output,
    "a placeholder is missing": no_placeholder,
    "a placeholder more": one_placeholder_more,
    "an unknown collective, unused": beside(c10d.broadcast.default, 0, group=True),
    "an unknown reduction, unused": beside(c10d.all_reduce.default, "most", group=True),
    "an all-gather over other ranks, unused": beside(c10d.all_gather_into_tensor.default, 3, group=True),
    "an unknown group": another_group("nobody"),
    "a group that is no name": another_group(5),
    "a group of other axes": another_group("dp2/tp@0"),
    "a foreign function": target(len),
    "a function that is none": target(None),
    "a method": a_method,
    "None for sizes": no_sizes,
    "a result beyond a list": a_result_beyond_a_list,
    "a result of what has none": followed(operator.getitem, 7),
    "a key among results": followed(operator.getitem, "k"),
    "written in place": beside(aten.mul_.Tensor, 2),
    "no module": lambda module, relu: module.graph,
}


def malformed(name: str, module: fx.GraphModule) -> Any:
    """A rank's module with something wrong in its form."""
    relu = next(node for node in module.graph.nodes if node.target is aten.relu.default)
    given = FORMS[name](module, relu)
    return module if given is None else given
