"""A module that somebody changed as one graph: what it calls of other modules stands in its place.

Modules of turns become loops again (:mod:`.turn_modules`), those of units the units of a loop
(:mod:`shardfx.ir.program.units.driver`).
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from typing import Any

from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.ops.time import turns
from shardfx.ir.program.units.driver import Driven, read_drivers

from .within_turns import part_in_turns


def inlined(into: fx.Graph, module: fx.GraphModule, env: dict[fx.Node, Any], path: str = "") -> Any:
    """Copy a module's graph, and the graphs of the modules that it calls, into one; gives what it returns.

    Args:
        env: what stands for its inputs; where it is the outermost module, they become inputs of the one graph.
        path: of the module in the outermost one, with a dot behind it.

    Raises:
        Error: it calls what is no function; units of turns are not called alike in all turns.
    """
    for node in read_drivers(module):
        if isinstance(node, Driven):
            _units(into, node, env, path)
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
        if node.target is turns.repeat:
            held = isinstance(args[0], fx.Node) and args[0].op == "get_attr"
            unit = attribute(module, str(args[0].target).removeprefix(path)) if held else None
            if not isinstance(unit, fx.GraphModule):
                raise _not_a_call(path, node, f"turns of {node.args[0]}, which is no module of calls")
            into.erase_node(args[0])
            env[node] = _turns(into, unit, args[1:], path)
            continue
        if node.op == "output":
            return args[0]
        if node.target is operator.getitem and args and isinstance(args[0], (tuple, list)):
            if not (len(args) == 2 and isinstance(args[1], int) and -len(args[0]) <= args[1] < len(args[0])):
                raise _not_a_call(path, node, f"{args[1:]} of {len(args[0])} values")
            env[node] = args[0][args[1]]
        elif node.op == "call_module" and isinstance(called := attribute(module, str(node.target)), fx.GraphModule):
            inputs = [each for each in called.graph.nodes if each.op == "placeholder"]
            given = [*args, *(kwargs[str(each.target)] for each in inputs[len(args) :])]
            env[node] = inlined(into, called, dict(zip(inputs, given, strict=True)), f"{path}{node.target}.")
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


def _turns(into: fx.Graph, unit: fx.GraphModule, args: Sequence[Any], path: str) -> Sequence[fx.Node]:
    """The turns of a module that is called once for each."""
    axis, count, *around = args
    inputs = [each for each in unit.graph.nodes if each.op == "placeholder"]
    begin = into.call_function(turns.turns, (axis, count, around))
    results = inlined(into, unit, dict(zip(inputs, [begin, *around], strict=True)), path)
    _done(into, begin, around)
    return results  # type: ignore[no-any-return]


def _units(into: fx.Graph, driven: Driven, env: dict[fx.Node, Any], path: str) -> None:
    """Turns in units, of the calls of a driver; what they give is known from then on."""
    models = driven.models()
    count = max(call.word.turn for call in driven.calls) + 1
    begin = into.call_function(turns.turns, (driven.axis, count, [], str(driven.order)))
    made: dict[str, Sequence[Any]] = {}
    for name, call in models.items():
        given = []
        for source in (driven.source(call, each) for each in call.given):
            if isinstance(source, tuple):
                given.append(_result(made, source, call.node, path))
            else:
                given.append(fx.map_arg(source, env.__getitem__))
        inputs = [each for each in call.module.graph.nodes if each.op == "placeholder"]
        into.call_function(turns.unit, (begin, name))
        known = dict(zip(inputs, [begin, *given], strict=True))
        results = inlined(into, call.module, known, f"{path}{call.node.target}.")
        made[name] = results if isinstance(results, (tuple, list)) else (results,)
    for call in driven.calls:
        for got in call.node.users:
            if got.target is operator.getitem:
                env[got] = _result(made, (call.word.unit, got.args[1]), got, path)
    inside = list(into.nodes)
    inside = inside[inside.index(begin) :]
    _to_head(begin, inside)
    own = set(inside)
    around = list(dict.fromkeys(used for node in inside for used in node.all_input_nodes if used not in own))
    begin.args = (*begin.args[:2], around, *begin.args[3:])
    _done(into, begin, around)


def _result(made: dict[str, Sequence[Any]], source: tuple[str, Any], node: fx.Node, path: str) -> Any:
    unit, place = source
    there = made.get(unit, ())
    if not (isinstance(place, int) and -len(there) <= place < len(there)):
        raise _not_a_call(path, node, f"result {place} of {unit}, which gives {len(there)} before it is called")
    return there[place]


def _to_head(begin: fx.Node, inside: Sequence[fx.Node]) -> None:
    """Units have each said what they are, and taken numbers of their turn: these stand once, behind the begin."""
    head, last = {begin: begin}, begin
    known: dict[Any, fx.Node] = {}
    own = set(inside)
    for node in inside:
        if node.target is turns.unit and len(node.args) == 3:
            if node.users:
                user = next(iter(node.users))
                raise _not_a_call(f"{begin.args[0]}: ", user, f"{node.name}, which says of which unit a call is")
            node.graph.erase_node(node)
        elif part_in_turns(node) == "number" and _of_head(node, head, own):
            key = (node.target, node.args)
            if key in known:
                node.replace_all_uses_with(known[key])
                node.graph.erase_node(node)
                continue
            last.append(node)
            known[key] = last = head[node] = node


def _of_head(number: fx.Node, head: Collection[fx.Node], inside: Collection[fx.Node]) -> bool:
    """Whether a number of the turn is made of others of it, and of what was there before."""
    used = number.all_input_nodes
    return any(each in head for each in used) and all(each in head or each not in inside for each in used)


def _done(into: fx.Graph, begin: fx.Node, around: Sequence[fx.Node]) -> None:
    """The end of turns."""
    collected = [each for each in around if any(_collects(user, each) for user in each.users)]
    into.call_function(turns.done, (begin, [each for each in around if each not in collected], collected))


def _collects(user: fx.Node, memory: fx.Node) -> bool:
    return part_in_turns(user) == "collects" and user.args[0] is memory


def _not_a_call(path: str, node: fx.Node, got: str) -> Error:
    return Error(
        "a program has a call that cannot be made",
        where=f"{path}{node.name}",
        expected="a function, of what stands before it",
        got=got,
    )


def attribute(module: fx.GraphModule, name: str) -> Any:
    """What a module has under a dotted name."""
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part)
    return found
