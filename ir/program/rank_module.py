"""A rank's program as a ``GraphModule`` that can be copied, pickled, transformed and compiled.

Loop bodies are submodules, written, and read back after changes.

    iterations = loop.begin('mb', 4, [w, x, total])
        ...                                     ->   iterations = loop.repeat('mb', 4, {'': self.each_mb_0},
        sum = loop.add(total, grad)                                           {'': [w, x, total]}, '')
    done = loop.end(iterations, [w, x], [total])     sum = iterations[0]

A loop in schedule actions has a body for each of them, which run in the order of the schedule; ``('F0', 0)`` is result
0 of ``F0`` in the same iteration:

    iterations = loop.begin('mb', 2, [w, x], 'F0.0 F0.1 B0.0 B0.1')
        unit = loop.action(iterations, 'F0')
            relu = aten.relu(...)               ->   loop.repeat('mb', 2, {'F0': self.F0, 'B0': self.B0},
        unit_1 = loop.action(iterations, 'B0')                   {'F0': [x], 'B0': [w, ('F0', 0)]},
            ...                                                  'F0.0 F0.1 B0.0 B0.1')
    done = loop.end(iterations, [w, x], [])
"""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import fx, nn

from shardfx.ir.errors import Error
from shardfx.ir.graph import Node, Where, op_name
from shardfx.ir.ops.loop import loop_ops

from .loops.loop_regions import action_nodes, action_order, close_loop, loop_end, loop_role

ORIGINS = "shardfx_calls"
"""In the ``meta`` of a segment of a program: the planned nodes of its calls, member by member."""


ATTRIBUTE_OPS = ("get_attr", "call_module")
"""The nodes that name what their module holds."""


@dataclass(frozen=True)
class NodeOrigin:
    """The origin of a call: the planned value and op, and the user's line. Plain data, in ``meta["shardfx"]``."""

    value: str
    op: str
    where: Where
    phase: str
    attrs: tuple[tuple[str, Any], ...] = ()

    @staticmethod
    def of(node: Node) -> NodeOrigin:
        """The origin of calls that lower a planned node."""
        return NodeOrigin(node.name, op_name(node.op), node.where, node.phase.value, tuple(node.attrs.items()))


@dataclass(frozen=True)
class Annotate:
    """Code generation with each line's comment behind it."""

    comments: Mapping[str, str]

    def __call__(self, body: list[str]) -> list[str]:
        statements: list[str] = []
        for text in body:
            if not text.strip():
                continue
            if text.startswith(";") and statements:
                statements[-1] = statements[-1].rstrip("\n") + text
            else:
                statements.append(text)
        lines = []
        for text in statements:
            match = re.match(r"(\w+) = ", text)
            comment = self.comments.get(match.group(1), "") if match else ""
            lines.append(f"{text.rstrip()}  # {comment}\n" if comment else f"{text.rstrip()}\n")
        return lines


class RankModule(fx.GraphModule):
    """The ``GraphModule`` of one rank's program."""

    _is_impure: ClassVar[bool] = True
    """To torch.fx: a call of one stays, also where nobody takes what it gives; actions add up in place."""

    @staticmethod
    def of(graph: fx.Graph, comments: Mapping[str, str], constants: Mapping[str, Any], rank: int) -> RankModule:
        """A module of ``graph``, which becomes its own, with a module for each body of a loop: the nodes then remember
        their :class:`NodeOrigin`."""
        modules: dict[str, Any] = {}
        if any(map(loop_role, graph.nodes)):
            graph, bodies = nested(graph)
            modules = {name: RankModule.of(body, comments, {}, rank) for name, body in bodies.items()}
        origins: dict[Node, NodeOrigin] = {}
        for node in graph.nodes:
            node.meta.pop(ORIGINS, None)
            made = node.meta.get("shardfx")
            if isinstance(made, Node):
                origin = origins.get(made)
                if origin is None:
                    origin = origins[made] = NodeOrigin.of(made)
                node.meta = {**node.meta, "shardfx": origin, **dict(origin.attrs)}
            elif made is not None:
                node.meta.update(made.attrs)
        annotate = Annotate(dict(comments))
        graph.on_generate_code(lambda _: annotate)
        root = nn.Module()
        for name, value in {**constants, **modules}.items():
            _put(root, name, value)
        module = RankModule(root, graph, class_name=f"Rank{rank}")
        module.meta["rank"] = rank
        return module

    def __reduce__(self) -> tuple[Any, ...]:
        calls = [
            (
                *(n.op, n.name, _target_text(n.target), _without_nodes(n.args), _without_nodes(n.kwargs)),
                {key: n.meta[key] for key in ("shardfx", "val") if key in n.meta},
            )
            for n in self.graph.nodes
        ]
        names = [str(n.target) for n in self.graph.nodes if n.op in ATTRIBUTE_OPS]
        constants = {name: operator.attrgetter(name)(self) for name in names}
        transform = getattr(self.graph._codegen, "_body_transformer", None)
        comments = transform.comments if isinstance(transform, Annotate) else {}
        return _restore, (int(self.meta.get("rank", 0)), calls, dict(comments), constants, self.training)


@dataclass(frozen=True)
class _Ref:
    name: str


def _without_nodes(arg: Any) -> Any:
    def plain(each: Any) -> Any:
        return _Ref(each.name) if isinstance(each, fx.Node) else each

    return fx.node.map_aggregate(arg, plain)


def _target_text(target: Any) -> str:
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"torch.ops:{target}"
    return f"{target.__module__}:{target.__qualname__}"


def _target(op: str, text: str) -> Any:
    if op != "call_function":
        return text
    module, _, path = text.partition(":")
    found: Any = torch.ops if module == "torch.ops" else importlib.import_module(module)
    return operator.attrgetter(path)(found)


def _restore(
    rank: int, calls: list[tuple[Any, ...]], comments: dict[str, str], constants: dict[str, Any], training: bool
) -> RankModule:
    graph, env = fx.Graph(), dict[str, fx.Node]()

    def node_of(arg: Any) -> Any:
        return env[arg.name] if isinstance(arg, _Ref) else arg

    for op, name, target, args, kwargs, meta in calls:
        positional, named = fx.node.map_aggregate(args, node_of), fx.node.map_aggregate(kwargs, node_of)
        env[name] = graph.create_node(op, _target(op, target), positional, named, name)
        env[name].meta.update(meta)
    module = RankModule.of(graph, comments, constants, rank)
    return module.train(training)


def _put(root: nn.Module, path: str, value: Any) -> None:
    *parents, leaf = path.split(".")
    for part in parents:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        root.register_buffer(leaf, value)
    else:
        setattr(root, leaf, value)


# ---- loops as modules -----------------------------------------------------------------------------------------------


@dataclass
class _LoopBody:
    """The body of a loop, or of one of its schedule actions: its calls, its inputs, and its results that others use."""

    nodes: list[fx.Node]
    takes: list[fx.Node] = field(default_factory=list)
    gives: list[fx.Node] = field(default_factory=list)


def nested(graph: fx.Graph) -> tuple[fx.Graph, dict[str, fx.Graph]]:
    """The graph with each of its outermost loops as one call, and the graphs of their bodies by attribute name, in
    which inner loops are loops still."""
    made, env, found = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, fx.Graph]()
    nodes = list(graph.nodes)
    at = 0
    while at < len(nodes):
        if loop_role(nodes[at]) != "opens":
            env[nodes[at]] = made.node_copy(nodes[at], env.__getitem__)
            at += 1
            continue
        end = loop_end(nodes, at)
        _write_loop(nodes[at : end + 1], made, env, found)
        at = end + 1
    return made, found


def _write_loop(
    nodes: Sequence[fx.Node], made: fx.Graph, env: dict[fx.Node, fx.Node], found: dict[str, fx.Graph]
) -> None:
    """Write a loop, of ``nodes`` from its begin to its end, as one call; its bodies are added to ``found``."""
    begin, (axis, count) = nodes[0], nodes[0].args[:2]
    bodies, own = _loop_bodies(nodes), set(nodes)
    modules, place = dict[str, fx.Node](), dict[fx.Node, tuple[str, int]]()
    for name, body in bodies.items():
        attr = name or f"each_{axis}_{len(found)}"
        while attr in found:
            attr += "_"
        found[attr], modules[name] = _body_graph(nodes, body), made.get_attr(attr)
        place |= {each: (name, number) for number, each in enumerate(body.gives)}
    takes = {name: [place.get(each) or env[each] for each in body.takes] for name, body in bodies.items()}
    args = (axis, count, modules, takes, action_order(begin))
    call = made.create_node("call_function", loop_ops.repeat, args, name=begin.name)
    for number, each in enumerate(place):
        if not own.issuperset(each.users):
            env[each] = made.create_node("call_function", operator.getitem, (call, number), name=each.name)
            env[each].meta = dict(each.meta)


def _loop_bodies(nodes: Sequence[fx.Node]) -> dict[str, _LoopBody]:
    """The bodies of a loop by schedule action, or its only one."""
    parts = action_nodes(nodes[1:-1], nodes[0])
    if action_order(nodes[0]):
        del parts[""]  # induction variables
    found = {name: _LoopBody(part) for name, part in parts.items()}
    of = {node: name for name, part in parts.items() for node in part}
    own = set(nodes)
    for name, body in found.items():
        used = [each for node in body.nodes for each in node.all_input_nodes if of.get(each) != name]
        for each in used:  # and what induction variables are made of, which stand in each action that uses them
            used += each.all_input_nodes if each in own and each not in of and each is not nodes[0] else []
        outer = dict.fromkeys(each for each in used if each is not nodes[0])
        body.takes = [each for each in outer if each not in own or each in of]
        body.gives = [node for node in body.nodes if any(of.get(user) != name for user in node.users)]
    return found


def _body_graph(nodes: Sequence[fx.Node], body: _LoopBody) -> fx.Graph:
    """The graph of a body: its inputs are the number of the iteration, and what it takes, each by its name."""
    graph, names = fx.Graph(), {"iteration"}
    env = {nodes[0]: graph.placeholder("iteration")}
    for each in body.takes:
        name = each.name
        while name in names:
            name += "_"
        names.add(name)
        env[each] = graph.placeholder(name)
    needed = {used for node in body.nodes for used in node.all_input_nodes} - env.keys() - {*body.nodes}
    for node in reversed(nodes):
        if node in needed:
            needed.update(used for used in node.all_input_nodes if used not in env)
    for node in (*(node for node in nodes if node in needed), *body.nodes):
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[node] for node in body.gives))
    return graph


# ---- read back ------------------------------------------------------------------------------------------------------


def inlined(into: fx.Graph, module: fx.GraphModule, env: dict[fx.Node, Any], path: str = "") -> Any:
    """Inline a module's graph, and the graphs of the modules that it calls, into one; returns its result.

    ``env`` stands for its inputs (those of the outermost module become inputs of the graph), ``path`` is the module's
    in the outermost one, with a dot behind it.
    """
    for node in module.graph.nodes:
        if node in env:
            continue
        late = next((used for used in node.all_input_nodes if used not in env), None)
        if late is not None:
            raise _not_a_call(path, node, f"{late.name}, which is not there yet")
        if node.op == "call_function" and not callable(node.target):
            raise _not_a_call(path, node, repr(node.target))
        args: Any = fx.map_arg(node.args, env.__getitem__)
        kwargs: Any = fx.map_arg(node.kwargs, env.__getitem__)
        called = attribute(module, str(node.target)) if node.op in ("get_attr", "call_module") else None
        if node.target is loop_ops.repeat:
            env[node] = _inline_loop(into, node, args, path)
        elif node.op == "output":
            return args[0]
        elif node.target is operator.getitem and args and isinstance(args[0], (tuple, list)):
            if not (len(args) == 2 and isinstance(args[1], int) and -len(args[0]) <= args[1] < len(args[0])):
                raise _not_a_call(path, node, f"{args[1:]} of {len(args[0])} values")
            env[node] = args[0][args[1]]
        elif node.op == "get_attr" and isinstance(called, fx.GraphModule):
            env[node] = _NamedBody(f"{path}{node.target}.", called)
        elif node.op == "call_module" and isinstance(called, fx.GraphModule):
            inputs = _inputs(called)
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


@dataclass
class _NamedBody:
    """A module that a loop calls, and its path in the outermost module, with a dot behind it."""

    path: str
    module: fx.GraphModule


def _inline_loop(into: fx.Graph, node: fx.Node, args: Sequence[Any], path: str) -> list[Any]:
    """Inline a loop; returns the results of all its bodies, as ``loop.repeat`` does."""
    if len(args) != 5 or not isinstance(args[2], Mapping) or not isinstance(args[3], Mapping) or node.kwargs:
        raise _not_a_call(path, node, f"arguments {args}, where the bodies of a loop are expected, and their operands")
    axis, count, bodies, takes, order = args
    begin = into.call_function(loop_ops.begin, (axis, count, [], *([order] if order else [])))
    made: dict[str, list[Any]] = {}
    for name, body in bodies.items():
        if not isinstance(body, _NamedBody):
            raise _not_a_call(path, node, f"iterations of {body}, which is no module of calls")
        inputs, operands = _inputs(body.module), [begin]
        for each in takes.get(name, ()):
            if isinstance(each, tuple) and each[1] not in range(len(made.get(each[0], ()))):
                raise _not_a_call(path, node, f"result {each[1]} of {each[0]}, which is not there yet")
            operands.append(made[each[0]][each[1]] if isinstance(each, tuple) else each)
        if len(inputs) != len(operands):
            raise _not_a_call(path, node, f"{len(operands) - 1} operands of {name!r}, which takes {len(inputs) - 1}")
        if order:
            into.call_function(loop_ops.action, (begin, name))
        results = inlined(into, body.module, dict(zip(inputs, operands, strict=True)), body.path)
        made[name] = [*results] if isinstance(results, (tuple, list)) else [results]
    if order:
        nodes = list(into.nodes)
        _hoist_numbers(begin, nodes[nodes.index(begin) :])
    close_loop(into, begin)
    return [each for results in made.values() for each in results]


def _inputs(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "placeholder"]


def _hoist_numbers(begin: fx.Node, inside: Sequence[fx.Node]) -> None:
    """Hoist the induction variables of actions, made of others or of values from outside: each stands once, behind the
    begin."""
    head, own, last = {begin}, set(inside), begin
    known: dict[Any, fx.Node] = {}
    for node in inside:
        used = {*node.all_input_nodes}
        if loop_role(node) != "number" or not used & head or used & own - head:
            continue
        key = (node.target, node.args)
        if key in known:
            node.replace_all_uses_with(known[key])
            node.graph.erase_node(node)
        else:
            last.append(node)
            known[key] = last = node
            head.add(node)


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
