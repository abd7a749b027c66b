"""Loops as modules: a ``GraphModule`` whose loop bodies are submodules, written, and read back after changes.

    iterations = loop.begin('mb', 4, [w, x, total])
        ...                                  ->   iterations = loop.repeat(self.each_mb_0, 'mb', 4, w, x, total)
        sum = loop.add(total, grad)               sum = iterations[0]
    done = loop.end(iterations, [w, x], [total])

A loop in schedule actions becomes a driver, which calls the module of each action in the order of the schedule:

    iterations = loop.begin('mb', 2, [w, x], 'F0.0 F0.1 B0.0 B0.1')
        unit = loop.action(iterations, 'F0')                           f0_0 = self.F0(0, x);      relu_mb0 = f0_0[0]
            relu = aten.relu(...)                         ->    f0_1 = self.F0(1, x);      relu_mb1 = f0_1[0]
        unit_1 = loop.action(iterations, 'B0')                         b0_0 = self.B0(0, w, relu_mb0)
            ...                                                 b0_1 = self.B0(1, w, relu_mb1)
    done = loop.end(iterations, [w, x], [])

A module that somebody changed is read back from these calls: their order is that of the actions, and what goes from one
to another must be alike in all iterations.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.loop import loop_ops

from .loop_regions import (
    ActionOrder,
    ActionStep,
    action_name,
    action_order,
    declare_uses,
    is_induction_variable,
    loop_end,
    loop_role,
    regions,
)


@dataclass
class _ActionPart:
    """A schedule action: its calls, its inputs, and its results that others use."""

    name: str
    nodes: list[fx.Node]
    takes: list[fx.Node] = field(default_factory=list)
    gives: list[fx.Node] = field(default_factory=list)


def write_driver(
    nodes: Sequence[fx.Node], made: fx.Graph, env: dict[fx.Node, fx.Node], found: dict[str, fx.Graph]
) -> None:
    """Write the driver of a loop in schedule actions into a graph: of ``nodes``, from its begin to its end, with
    ``env`` for values of before, and behind; the graphs of the actions are added to ``found`` by attribute name."""
    begin, axis = nodes[0], str(nodes[0].args[0])
    units = _action_parts(nodes)
    inside = {node for unit in units.values() for node in unit.nodes}
    head = [node for node in nodes[1:] if is_induction_variable(node) and node not in inside]
    modules = {}
    for unit in units.values():
        name = unit.name
        while name in found:
            name += "_"
        modules[unit.name], found[name] = name, _action_graph(begin, axis, unit, head)
    order = ActionOrder.of(action_order(begin).split())
    last = {word.unit: word for word in order.words}
    there: dict[tuple[fx.Node, int], fx.Node] = {}
    for word in order.words:
        unit = units[word.unit]
        args = [
            there.get((each, word.iteration)) or env.get(each) or _not_yet(each, word, units) for each in unit.takes
        ]
        name = f"{word.unit.lower()}_{word.iteration}"
        call = made.create_node("call_module", modules[word.unit], (word.iteration, *args), name=name)
        for place, each in enumerate(unit.gives):
            handed_on = any(each in other.takes for other in units.values())
            if not handed_on and word != last[word.unit]:
                continue  # the last iteration gives what all have collected
            name = f"{each.name}_{axis}{word.iteration}" if handed_on else each.name
            got = made.create_node("call_function", operator.getitem, (call, place), name=name)
            got.meta = dict(each.meta)
            there[each, word.iteration] = env[each] = got


def _not_yet(value: fx.Node, word: ActionStep, units: Mapping[str, _ActionPart]) -> NoReturn:
    """Raise for a value that an action uses before it is made.

    Raises:
        Error: naming both actions.
    """
    maker = next((name for name, unit in units.items() if value in unit.nodes), "")
    raise Error(
        f"{word} takes {value.name} before it is made",
        where=f"the order of actions, {word}",
        expected=f"{ActionStep(maker, word.iteration)} before it" if maker else "what was made before the loop",
        got=value.format_node() or value.name,
        remedy="let the action that makes it stand earlier in the order",
    )


def _action_parts(nodes: Sequence[fx.Node]) -> dict[str, _ActionPart]:
    """The schedule actions, with their inputs and outputs."""
    inside, found = regions(nodes), dict[str, _ActionPart]()
    of: dict[fx.Node, _ActionPart] = {}
    for node in nodes[1:-1]:
        if loop_role(node) == "unit" and len(inside[node]) == 1:
            found[action_name(node)] = _ActionPart(action_name(node), [])
        elif len(inside[node]) > 1:
            unit = of[node] = found[action_name(inside[node][1])]
            unit.nodes.append(node)
    for unit in found.values():
        own = set(unit.nodes)
        used = [each for node in unit.nodes for each in node.all_input_nodes if each not in own]
        for each in used:  # and what numbers of the iteration are made of, which stand in each action that uses them
            used += each.all_input_nodes if each in inside and each not in of and each is not nodes[0] else []
        outer = dict.fromkeys(each for each in used if each is not nodes[0])
        unit.takes = [each for each in outer if each not in inside or each in of]
        unit.gives = [node for node in unit.nodes if any(user not in own for user in node.users)]
    return found


def body_inputs(graph: fx.Graph, begin: fx.Node, takes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The inputs of a module of iterations that begin at a node: the number of the iteration, and what it takes, each
    by its name (a number of the iterations around is called ``iteration``, too)."""
    made, names = {begin: graph.placeholder("iteration")}, {"iteration"}
    for each in takes:
        name = each.name
        while name in names:
            name += "_"
        names.add(name)
        made[each] = graph.placeholder(name)
    return made


def _action_graph(begin: fx.Node, axis: str, unit: _ActionPart, head: Sequence[fx.Node]) -> fx.Graph:
    graph, env = fx.Graph(), dict[fx.Node, fx.Node]()
    env |= body_inputs(graph, begin, unit.takes)
    graph.call_function(loop_ops.action, (env[begin], unit.name, axis))
    needed = {used for node in unit.nodes for used in node.all_input_nodes}
    for node in reversed(head):
        if node in needed:
            needed.update(node.all_input_nodes)
    for node in (*(node for node in head if node in needed), *unit.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in unit.gives))
    return graph


# ---- a driver read back ---------------------------------------------------------------------------------------------


@dataclass
class ActionCall:
    """A call of an action's module: its iteration, and its other arguments."""

    node: fx.Node
    module: fx.GraphModule
    word: ActionStep
    given: list[Any]


@dataclass
class DriverCalls:
    """The calls of actions of some iterations, in their order."""

    axis: str
    calls: list[ActionCall]

    def models(self) -> dict[str, ActionCall]:
        """The first call of each action; its calls in other iterations must be alike."""
        by_node = {call.node: call for call in self.calls}
        first: dict[str, ActionCall] = {}
        for call in self.calls:
            model = first.setdefault(call.word.unit, call)
            here, there = ([self.source(one, each, by_node) for each in one.given] for one in (call, model))
            if here != there:
                at = next(i for i, (a, b) in enumerate(zip(here, there, strict=True)) if a != b)
                raise _driver_error(
                    f"{call.word} is given another value than {model.word}",
                    call.node,
                    expected=f"argument {at + 1} as in {model.node.format_node()}",
                    got=str(call.given[at]),
                )
        last = {call.word.unit: call for call in self.calls}
        for call in self.calls:
            for got in call.node.users:
                if call is not last[call.word.unit] and any(user not in by_node for user in got.users):
                    raise _driver_error(
                        f"{got.name} of iteration {call.word.iteration} is used behind the iterations",
                        call.node,
                        expected=f"what the last call of {call.word.unit} gives, {last[call.word.unit].node.name}",
                    )
        return first

    def source(self, call: ActionCall, value: Any, by_node: Mapping[fx.Node, ActionCall]) -> Any:
        """The source of an argument: an action of the same iteration and the place among its results, or itself."""
        maker = value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else value
        if not isinstance(maker, fx.Node) or maker not in by_node:
            return value
        made = by_node[maker]
        if made.word.iteration != call.word.iteration or maker is value:
            raise _driver_error(
                f"{call.word} is given what {made.word} makes",
                call.node,
                expected=f"values of iteration {call.word.iteration}",
                got=value.format_node() or value.name,
            )
        return made.word.unit, value.args[1]

    @property
    def order(self) -> ActionOrder:
        """The order of the calls."""
        return ActionOrder(tuple(call.word for call in self.calls))


def read_drivers(module: fx.GraphModule) -> list[fx.Node | DriverCalls]:
    """The nodes of a module's graph, with the calls of actions grouped; what stands between calls, and does not need
    them, stands before."""
    found: list[fx.Node | DriverCalls] = []
    nodes = list(module.graph.nodes)
    taken: set[fx.Node] = set()
    for at, node in enumerate(nodes):
        if node in taken:
            continue
        first = _called(module, node)
        if first is None:
            found.append(node)
            continue
        driven, between, members = _group(module, nodes[at:], first)
        found += [*between, driven]
        taken |= {*between, *members}
    return found


def _group(
    module: fx.GraphModule, nodes: Sequence[fx.Node], first: tuple[str, ActionCall]
) -> tuple[DriverCalls, list[fx.Node], set[fx.Node]]:
    """The calls grouped with the first one, those between them, and all their results that are used."""
    driven, between, members = DriverCalls(first[0], []), list[fx.Node](), set[fx.Node]()
    pending: list[fx.Node] = []
    modules: dict[str, Any] = {}
    for node in nodes:
        found = _called(module, node)
        if found is not None:
            axis, call = found
            if axis != driven.axis or modules.setdefault(call.word.unit, call.module) is not call.module:
                break
            driven.calls.append(call)
            members.add(node)
            between += pending
            pending = []
        elif node.target is operator.getitem and node.args[0] in members:
            members.add(node)
        elif members.isdisjoint(node.all_input_nodes):
            pending.append(node)
        else:
            break
    return driven, between, members


def _called(module: fx.GraphModule, node: fx.Node) -> tuple[str, ActionCall] | None:
    """The action that a node calls, with the axis of its iterations; None for any other node."""
    if node.op != "call_module":
        return None
    called = attribute(module, str(node.target))
    nodes: Sequence[fx.Node] = [*called.graph.nodes] if isinstance(called, fx.GraphModule) else []
    said = next((each for each in nodes if each.target is loop_ops.action and len(each.args) == 3), None)
    if said is None:
        return None
    inputs = [each for each in called.graph.nodes if each.op == "placeholder"]
    args = [*node.args, *(node.kwargs[str(each.target)] for each in inputs[len(node.args) :])]
    if not args or type(args[0]) is not int or len(args) != len(inputs):
        raise _driver_error(
            f"{said.args[1]} is called without the number of an iteration", node, expected="self.F0(0, ...)"
        )
    return str(said.args[2]), ActionCall(node, called, ActionStep(str(said.args[1]), args[0]), args[1:])


def _driver_error(what: str, node: fx.Node, expected: str, got: str | None = None) -> Error:
    return Error(what, where=node.format_node() or node.name, expected=expected, got=got)


def nested(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Graph]]:
    """The graph with each of its outermost loops as one call, and the graphs of these calls by attribute name, in which
    inner loops are loops still."""
    made, env, found = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Graph]()
    nodes = list(graph.nodes)
    at = 0
    while at < len(nodes):
        node = nodes[at]
        if loop_role(node) != "opens":
            env[node] = made.node_copy(node, env.__getitem__)
            at += 1
            continue
        end = loop_end(nodes, at)
        if action_order(node):
            write_driver(nodes[at : end + 1], made, env, found)
            at = end + 1
            continue
        name = f"each_{node.args[0]}_{len(found)}"
        found[name], left = _loop_body(nodes[at : end + 1])
        around: Sequence[fx.Node] = node.args[2]
        unit = made.get_attr(name)
        args = (unit, *node.args[:2], *(env[each] for each in around))
        call = made.create_node("call_function", loop_ops.repeat, args, name=node.name)
        for number, each in enumerate(left):
            env[each] = made.create_node("call_function", operator.getitem, (call, number), name=each.name)
            env[each].meta = dict(each.meta)
        at = end + 1
    return made, found


def _loop_body(nodes: Sequence[fx.Node]) -> tuple[fx.Graph, list[fx.Node]]:
    """The body of a loop, and its results: the values used behind it."""
    begin, inside, graph = nodes[0], set(nodes), fx.Graph()
    env = body_inputs(graph, begin, begin.args[2])  # type: ignore[arg-type]
    for node in nodes[1:-1]:
        env[node] = graph.node_copy(node, env.__getitem__)
    left = [node for node in nodes if any(user not in inside for user in node.users)]
    graph.output(tuple(env[node] for node in left))
    return graph, left


def inlined(into: fx.Graph, module: fx.GraphModule, env: dict[fx.Node, Any], path: str = "") -> Any:
    """Inline a module's graph, and the graphs of the modules that it calls, into one; returns its result.

    ``env`` stands for its inputs (those of the outermost module become inputs of the graph), ``path`` is the module's
    in the outermost one, with a dot behind it.
    """
    for node in read_drivers(module):
        if isinstance(node, DriverCalls):
            _inline_driver(into, node, env, path)
            continue
        if node in env:
            continue
        late = next((used for used in node.all_input_nodes if used not in env), None)
        if late is not None:
            raise _not_a_call(path, node, f"{late.name}, which is not there yet")
        if node.op == "call_function" and not callable(node.target):
            raise _not_a_call(path, node, repr(node.target))
        args: Any = fx.map_arg(node.args, env.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
        if node.target is loop_ops.repeat:
            by_name = isinstance(args[0], fx.Node) and args[0].op == "get_attr"
            unit = attribute(module, str(args[0].target).removeprefix(path)) if by_name else None
            if not isinstance(unit, fx.GraphModule):
                raise _not_a_call(path, node, f"iterations of {node.args[0]}, which is no module of calls")
            into.erase_node(args[0])
            env[node] = _inline_loop(into, unit, args[1:], path)
            continue
        if node.op == "output":
            return args[0]
        if node.target is operator.getitem and args and isinstance(args[0], (tuple, list)):
            if not (len(args) == 2 and isinstance(args[1], int) and -len(args[0]) <= args[1] < len(args[0])):
                raise _not_a_call(path, node, f"{args[1:]} of {len(args[0])} values")
            env[node] = args[0][args[1]]
        elif node.op == "call_module" and isinstance(called := attribute(module, str(node.target)), fx.GraphModule):
            inputs = [each for each in called.graph.nodes if each.op == "placeholder"]
            operands = [*args, *(kwargs[str(each.target)] for each in inputs[len(args) :])]
            env[node] = inlined(into, called, dict(zip(inputs, operands, strict=True)), f"{path}{node.target}.")
        elif node.op in ("placeholder", "get_attr", "call_function"):
            env[node] = into.node_copy(node, env.__getitem__)
            env[node].meta = {key: each for key, each in node.meta.items() if key != "val"}
            if node.op == "get_attr":
                env[node].target = path + str(node.target)
        else:
            raise Error(
                "a program calls what is no function",
                where=node.format_node(),
                expected="calls of functions, as of torch.ops.aten, and of modules that are a GraphModule",
                got=node.op,
                remedy="trace it: torch.fx.experimental.proxy_tensor.make_fx gives calls of functions",
            )
    return ()


def _inline_loop(into: fx.Graph, unit: fx.GraphModule, args: Sequence[Any], path: str) -> Sequence[fx.Node]:
    """The iterations of a module that is called once for each."""
    axis, count, *around = args
    inputs = [each for each in unit.graph.nodes if each.op == "placeholder"]
    begin = into.call_function(loop_ops.begin, (axis, count, around))
    results = inlined(into, unit, dict(zip(inputs, [begin, *around], strict=True)), path)
    _done(into, begin, around)
    return results  # type: ignore[no-any-return]


def _inline_driver(into: fx.Graph, driven: DriverCalls, env: dict[fx.Node, Any], path: str) -> None:
    """Loops in schedule actions, of the calls of a driver; what they give is known from then on."""
    models, by_node = driven.models(), {call.node: call for call in driven.calls}
    count = max(call.word.iteration for call in driven.calls) + 1
    begin = into.call_function(loop_ops.begin, (driven.axis, count, [], str(driven.order)))
    made: dict[str, Sequence[Any]] = {}
    for name, call in models.items():
        args = []
        for source in (driven.source(call, each, by_node) for each in call.given):
            if isinstance(source, tuple):
                args.append(_result(made, source, call.node, path))
            else:
                args.append(fx.map_arg(source, env.__getitem__))
        inputs = [each for each in call.module.graph.nodes if each.op == "placeholder"]
        into.call_function(loop_ops.action, (begin, name))
        known = dict(zip(inputs, [begin, *args], strict=True))
        results = inlined(into, call.module, known, f"{path}{call.node.target}.")
        made[name] = results if isinstance(results, (tuple, list)) else (results,)
    for call in driven.calls:
        for got in call.node.users:
            if got.target is operator.getitem:
                env[got] = _result(made, (call.word.unit, got.args[1]), got, path)
    nodes = list(into.nodes)
    _hoist_numbers(begin, nodes[nodes.index(begin) :])
    _done(into, begin, declare_uses(into, begin))


def _result(made: dict[str, Sequence[Any]], source: tuple[str, Any], node: fx.Node, path: str) -> Any:
    unit, place = source
    there = made.get(unit, ())
    if not (isinstance(place, int) and -len(there) <= place < len(there)):
        raise _not_a_call(path, node, f"result {place} of {unit}, which gives {len(there)} before it is called")
    return there[place]


def _hoist_numbers(begin: fx.Node, inside: Sequence[fx.Node]) -> None:
    """Hoist the induction variables of actions: each stands once, behind the begin; drop the markers of actions."""
    head, last = {begin: begin}, begin
    known: dict[Any, fx.Node] = {}
    own = set(inside)
    for node in inside:
        if node.target is loop_ops.action and len(node.args) == 3:
            if node.users:
                user = next(iter(node.users))
                raise _not_a_call(f"{begin.args[0]}: ", user, f"{node.name}, which says of which unit a call is")
            node.graph.erase_node(node)
        elif loop_role(node) == "number" and _made_of(node.all_input_nodes, head, own):
            key = (node.target, node.args)
            if key in known:
                node.replace_all_uses_with(known[key])
                node.graph.erase_node(node)
                continue
            last.append(node)
            known[key] = last = head[node] = node


def _made_of(used: Sequence[fx.Node], head: Collection[fx.Node], inside: Collection[fx.Node]) -> bool:
    """Whether operands are induction variables of the loop, at least one, and values from before it."""
    return any(each in head for each in used) and all(each in head or each not in inside for each in used)


def _done(into: fx.Graph, begin: fx.Node, around: Sequence[fx.Node]) -> None:
    """Write the end of a loop."""
    collected = [
        each for each in around if any(loop_role(user) == "collects" and user.args[0] is each for user in each.users)
    ]
    into.call_function(loop_ops.end, (begin, [each for each in around if each not in collected], collected))


def _not_a_call(path: str, node: fx.Node, got: str) -> Error:
    return Error(
        "a program has a call that cannot be made",
        where=f"{path}{node.name}",
        expected="a function, of what stands before it",
        got=got,
    )


def attribute(module: fx.GraphModule, name: str) -> Any:
    """The attribute of a module at a dotted path."""
    return operator.attrgetter(name)(module)
