"""Damage to which shard of a value a rank takes or gives: the right name, and another part of it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import Phase
from shardfx.ir.ops import pack
from tests.damage import Site, equal_outputs


def slices(site: Site) -> list[fx.Node]:
    """Slices that are not the same on all ranks."""
    return [node for node in site.calls(pack.take) if 0 < node.args[4] < _view(node)[_dim(node)]]  # type: ignore[operator]


def first_slice(site: Site, node: fx.Node) -> None:
    """All ranks take the first."""
    node.update_arg(3, 0)


def slices_of_slices(site: Site) -> list[fx.Node]:
    """Of a dim that is sharded over two axes of one size, a slice for each."""
    found: list[Any] = slices(site)
    return [n for n in found if n.args[0] in found and _ways(n) == _ways(n.args[0]) and _dim(n) == _dim(n.args[0])]


def other_order_of_axes(site: Site, node: fx.Node) -> None:
    """The shard of ``tp dp`` for that of ``dp tp``."""
    outer: Any = node.args[0]
    first, second = (each.args[3] // each.args[4] for each in (outer, node))  # type: ignore[operator]
    outer.update_arg(3, second * outer.args[4])
    node.update_arg(3, first * node.args[4])  # type: ignore[operator]


def slices_of_compounds(site: Site) -> list[fx.Node]:
    """Of a dim that is seen as sub-dims, of which the second is sharded."""
    return [node for node in slices(site) if _dim(node) == 1 and len(_view(node)) > len(node.args[5])]  # type: ignore[arg-type]


def plain_for_compound(site: Site, node: fx.Node) -> None:
    """One segment of the dim for a segment of each sub-dim."""
    x, (outer, inner, *rest), _, start, length, shape = node.args  # type: ignore[misc]
    node.args = (x, [outer * inner, *rest], 0, start * outer, length * outer, shape)  # type: ignore[operator]


def gradients(site: Site) -> list[fx.Node]:
    return [site.end] if site.gradients else []


def parameter_for_its_gradient(site: Site, node: fx.Node) -> None:
    results = list(node.args[0])  # type: ignore[arg-type]
    at, name = site.gradients[-1]
    results[at] = next(each for each in site.graph.nodes if each.op == "placeholder" and each.name == name)
    node.args = (tuple(results),)


def one_for_two(site: Site, node: fx.Node) -> None:
    results = list(node.args[0])  # type: ignore[arg-type]
    a, b = next(equal_outputs(site))
    results[a] = results[b]
    node.args = (tuple(results),)


def single(site: Site) -> list[fx.Node]:
    """The calls of torch's ops that give one tensor, which is used."""
    calls = [
        n for n in site.graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target.namespace == "aten"
    ]
    return [n for n in calls if n.users and not any(user.target is operator.getitem for user in n.users)]


def unpacked(site: Site) -> list[fx.Node]:
    """What is taken of a buffer of several values."""
    takes = [n for n in site.graph.nodes if n.target is operator.getitem and n.users]
    return [n for n in takes if n.args[0].target is pack.unflatten]


def widened(site: Site, node: fx.Node) -> None:
    """The node's result, with a dim more, and without it again."""
    wider = site.after(node, torch.ops.aten.unsqueeze.default, node, 0)
    site.after(wider, torch.ops.aten.squeeze.dim, wider, 0)


def _view(node: fx.Node) -> Any:
    return node.args[1]


def _dim(node: fx.Node) -> Any:
    return node.args[2]


def _ways(node: fx.Node) -> Any:
    return _view(node)[_dim(node)] / node.args[4]  # type: ignore[operator]


def stepped_rows(site: Site) -> list[fx.Node]:
    """A rank's rows of a parameter or its gradient, which its states are of."""
    found = ((node, [user.meta.get("shardfx") for user in node.users]) for node in slices(site))
    return [node for node, users in found if all(made is not None and made.phase is Phase.UPDATE for made in users)]


def recomputed(site: Site) -> list[fx.Node]:
    """Calls that the backward recomputes, and that have another of the same op and shape to take an operand of."""
    return [node for node in site.graph.nodes if _is_again(node) and _stale(site, node) is not None]


def stale(site: Site, node: fx.Node) -> None:
    """What is recomputed is made of what belongs to another one."""
    node.update_arg(*_stale(site, node))  # type: ignore[misc]


def _is_again(node: fx.Node) -> bool:
    made = node.meta.get("shardfx")
    return node.op == "call_function" and made is not None and made.made_by == "recompute" and node.target is made.op


def _stale(site: Site, node: fx.Node) -> tuple[int, fx.Node] | None:
    """An operand's place, and the operand that an earlier one of the same planned types has there."""
    for other in filter(_is_again, site.graph.nodes):
        if other is node:
            return None
        mine, theirs = node.meta["shardfx"], other.meta["shardfx"]
        if other.target is not node.target or [v.type for v in mine.operands] != [v.type for v in theirs.operands]:
            continue
        for at, (a, b) in enumerate(zip(node.args, other.args, strict=False)):
            if isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b:
                return at, b
    return None
