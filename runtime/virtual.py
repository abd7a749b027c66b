"""Virtual ranks: all programs in this process, in lock-step, deterministic.

Each rank's program becomes a Python generator that yields at every collective; the scheduler runs the ranks up to
their next one, checks that the members of a group ask for the same thing, does it, and goes on. A group whose
members disagree, or that never comes together, is reported by rank, node and source line instead of hanging.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardfx.ir.errors import Error
from shardfx.ir.mesh import Mesh

from .counting import record

c10d = torch.ops._c10d_functional
Tensor = torch.Tensor


@dataclass(frozen=True)
class Request:
    """What a rank asks of its group: the collective and its arguments behind the tensor."""

    op: Any
    args: tuple[Any, ...]
    group: str
    node: str
    where: str

    def same(self, other: Request) -> bool:
        return self.op is other.op and (self.op is c10d.all_to_all_single.default or self.args == other.args)

    def __str__(self) -> str:
        return f"{op_name(self.op)}{self.args} on {self.group} at node {self.node!r} ({self.where})"


def op_name(op: Any) -> str:
    return str(op).removeprefix("_c10d_functional.").removesuffix(".default")


Call = Generator[tuple[Request, Tensor], Tensor, Sequence[Tensor]]
COLLECTIVES = {
    c10d.all_reduce.default,
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_to_all_single.default,
}


def as_generator(module: fx.GraphModule) -> Callable[..., Call]:
    """The module's graph as a generator function that yields at collectives."""
    scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
    lines, inputs, last = [], [], {}
    for node in module.graph.nodes:
        for used in node.all_input_nodes:
            last[used] = node
    dying: dict[fx.Node, list[str]] = {}
    for used, user in last.items():
        dying.setdefault(user, []).append(used.name)

    def text(arg: Any) -> str:
        if isinstance(arg, fx.Node):
            return arg.name
        if isinstance(arg, (list, tuple)):
            body = ", ".join(text(a) for a in arg)
            return f"[{body}]" if isinstance(arg, list) else f"({body},)"
        if isinstance(arg, (int, float, bool, str, type(None))):
            return repr(arg)
        name = f"_c{len(scope)}"
        scope[name] = arg
        return name

    for node in module.graph.nodes:
        if node.op == "placeholder":
            inputs.append(node.name)
        elif node.op == "output":
            lines.append(f"    return {text(node.args[0])}")
        elif node.op == "call_function" and node.target is c10d.wait_tensor.default:
            lines.append(f"    {node.name} = {text(node.args[0])}")
        elif node.op == "call_function" and node.target in COLLECTIVES:
            made = node.meta.get("shardfx")
            request = Request(
                node.target,
                tuple(map(_frozen, node.args[1:-1])),
                str(node.args[-1]),
                node.name,
                str(made and made.where),
            )
            scope[f"_r_{node.name}"] = request
            lines.append(f"    {node.name} = yield _r_{node.name}, {text(node.args[0])}")
        elif node.op == "call_function":
            scope[f"_f_{node.name}"] = getattr(node.target, "_op", node.target)
            parts = [text(a) for a in node.args] + [f"{k}={text(a)}" for k, a in node.kwargs.items()]
            lines.append(f"    {node.name} = _f_{node.name}({', '.join(parts)})")
        elif node.op == "get_attr":
            scope[f"_a_{node.name}"] = getattr(module, str(node.target))
            lines.append(f"    {node.name} = _a_{node.name}")
        else:
            raise Error(
                f"a rank's program has a {node.op} node, which virtual ranks do not run", got=node.format_node()
            )
        gone = [n for n in dying.get(node, ()) if n not in inputs]
        if gone and node.op != "output":
            lines.append(f"    {' = '.join(gone)} = None")
    source = "\n".join([f"def program({', '.join(inputs)}):", *lines, "    yield"])
    exec(compile(source, "<shardfx program>", "exec"), scope)
    return scope["program"]  # type: ignore[no-any-return]


def _frozen(arg: Any) -> Any:
    return tuple(arg) if isinstance(arg, (list, tuple)) else arg


class Groups:
    """The members of every group, by the name that the programs use."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[str, tuple[int, ...]] = {}

    def members(self, name: str, rank: int) -> tuple[int, ...]:
        if name not in self._known:
            shape, _, rest = name.partition("/")
            axes = tuple(rest.partition("@")[0].split("."))
            known = shape == self._mesh.signature and all(a in self._mesh.names for a in axes)
            group = self._mesh.group(rank, axes) if known else ()
            if not known or self._mesh.group_name(rank, axes) != name:
                raise Error(
                    f"rank {rank} uses a group that it is not in",
                    expected=f"a group of mesh {self._mesh}",
                    got=name,
                    remedy="take group names from Mesh.group_name(rank, axes)",
                )
            self._known[name] = group
        if rank not in self._known[name]:
            raise Error(
                f"rank {rank} uses a group that it is not in",
                expected=f"ranks {self._known[name]}",
                got=name,
                remedy="take group names from Mesh.group_name(rank, axes)",
            )
        return self._known[name]


def run(
    programs: Sequence[Callable[..., Call]], inputs: Sequence[Sequence[Tensor]], mesh: Mesh
) -> list[Sequence[Tensor]]:
    """Run one program per rank to its end; gives what each returns.

    Raises:
        Error: members of a group ask for different collectives, or wait for one that never comes.
    """
    groups = Groups(mesh)
    calls = [program(*given) for program, given in zip(programs, inputs, strict=True)]
    results: list[Sequence[Tensor]] = [()] * len(calls)
    waiting: dict[int, tuple[Request, Tensor]] = {}

    def advance(rank: int, reply: Tensor | None) -> None:
        try:
            waiting[rank] = calls[rank].send(reply)  # type: ignore[arg-type]
        except StopIteration as stop:
            results[rank] = stop.value

    for rank in range(len(calls)):
        advance(rank, None)
    while waiting:
        progressed = False
        for rank in sorted(waiting):
            if rank not in waiting:
                continue
            request, _ = waiting[rank]
            members = groups.members(request.group, rank)
            if any(m not in waiting or waiting[m][0].group != request.group for m in members):
                continue
            requests = [waiting[m][0] for m in members]
            tensors = [waiting[m][1] for m in members]
            _check(members, requests, tensors)
            record(op_name(request.op), request.group, tensors[0], len(members))
            for member in members:
                del waiting[member]
            for member, reply in zip(members, perform(request, requests, tensors), strict=True):
                advance(member, reply)
            progressed = True
        if waiting and not progressed:
            raise _deadlock(waiting, groups)
    return results


def _check(members: Sequence[int], requests: Sequence[Request], tensors: Sequence[Tensor]) -> None:
    first = requests[0]
    for member, request, tensor in zip(members[1:], requests[1:], tensors[1:], strict=True):
        exchange = first.op is c10d.all_to_all_single.default
        alike = tensor.dtype == tensors[0].dtype and (exchange or tensor.shape == tensors[0].shape)
        if not request.same(first) or not alike:
            raise Error(
                "collectives do not match between ranks",
                where=f"ranks {members[0]} and {member}",
                expected=f"{first}, {tuple(tensors[0].shape)} {tensors[0].dtype}",
                got=f"{request}, {tuple(tensor.shape)} {tensor.dtype}",
                remedy="every rank of a group must run the same collectives in the same order",
            )


def _deadlock(waiting: Mapping[int, tuple[Request, Tensor]], groups: Groups) -> Error:
    lines = []
    for rank in sorted(waiting)[:4]:
        request = waiting[rank][0]
        missing = [
            m for m in groups.members(request.group, rank) if m not in waiting or waiting[m][0].group != request.group
        ]
        lines.append(f"rank {rank} waits in {request} for ranks {missing}")
    return Error(
        "deadlock: no group of ranks comes together",
        where="; ".join(lines),
        expected="every rank of a group in the same collective",
        got=f"{len(waiting)} ranks waiting",
        remedy="every rank of a group must run the same collectives in the same order",
    )


def perform(request: Request, requests: Sequence[Request], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Do a collective on the tensors of a group's members, in the group's order."""
    n = len(tensors)
    if request.op is c10d.all_reduce.default:
        total = reduce(tensors, request.args[0])
        return [total] + [total.clone() for _ in range(n - 1)]
    if request.op is c10d.all_gather_into_tensor.default:
        joined = torch.cat([t if t.dim() else t.reshape(1) for t in tensors])
        return [joined] + [joined.clone() for _ in range(n - 1)]
    if request.op is c10d.reduce_scatter_tensor.default:
        return [piece.clone() for piece in reduce(tensors, request.args[0]).chunk(n)]
    sent = [t.split(list(r.args[1])) for t, r in zip(tensors, requests, strict=True)]
    return [torch.cat([sent[source][k] for source in range(n)]) for k in range(n)]


def reduce(tensors: Sequence[Tensor], kind: str) -> Tensor:
    """Reduce in the order of the ranks: deterministic."""
    total = tensors[0].clone()
    for other in tensors[1:]:
        if kind in ("sum", "avg"):
            total += other
        elif kind == "max":
            total = torch.maximum(total, other)
        elif kind == "min":
            total = torch.minimum(total, other)
        elif kind == "product":
            total *= other
        else:
            raise Error(f"unknown reduction {kind!r}", expected="sum, avg, max, min or product", got=kind)
    return total / len(tensors) if kind == "avg" else total
