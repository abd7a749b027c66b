"""A rank's program as a ``GraphModule`` that can be copied, pickled, transformed and compiled."""

from __future__ import annotations

import importlib
import operator
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx, nn

from shardfx.ir.graph import Node, Where, op_name

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
        """A module of ``graph``, which becomes its own: the nodes then remember their :class:`NodeOrigin`."""
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
        for name, value in constants.items():
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
