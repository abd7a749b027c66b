"""Damage to sums that ranks share: which ranks add, and what of the sum each of them has."""

from __future__ import annotations

from torch import fx

from shardfx.ir.ops import pack
from tests.damage import ALL_REDUCE, Site, aten

SQUARES = (aten.sum.default, aten.sum.dim_IntList)


def axes_of(node: fx.Node) -> list[str]:
    """The axes over which a collective goes."""
    return str(node.args[-1]).partition("/")[2].partition("@")[0].split(".")


def sums(site: Site) -> list[fx.Node]:
    return [node for node in site.calls(ALL_REDUCE) if node.args[1] == "sum"]


def of_several_axes(site: Site) -> list[fx.Node]:
    """Sums over several axes."""
    return [node for node in sums(site) if len(axes_of(node)) > 1]


def without_an_axis(site: Site, node: fx.Node) -> None:
    """The shares of one axis are not added."""
    node.update_arg(len(node.args) - 1, site.mesh.group_name(site.rank, axes_of(node)[:-1]))


def of_fewer_axes(site: Site) -> list[fx.Node]:
    """Sums over some of the mesh's axes."""
    return [node for node in sums(site) if len(axes_of(node)) < len(site.mesh.names)]


def with_an_axis(site: Site, node: fx.Node) -> None:
    """What is the same along an axis is added along it."""
    more = next(name for name in site.mesh.names if name not in axes_of(node))
    node.update_arg(len(node.args) - 1, site.mesh.group_name(site.rank, [*axes_of(node), more]))


def norms_of_slices(site: Site) -> list[fx.Node]:
    """Sums of squares of what a rank takes of what several have."""
    return [node for node in site.calls(*SQUARES) if _taken(node) is not None]


def norm_of_the_whole(site: Site, node: fx.Node) -> None:
    """Each rank adds the squares of all that it took its part of."""
    taken = _taken(node)
    assert taken is not None
    with site.graph.inserting_before(node):
        squares = site.graph.call_function(aten.pow.Tensor_Scalar, (_whole(taken), 2))
    node.update_arg(0, squares)


def _whole(taken: fx.Node) -> fx.Node:
    """What was taken of, axis by axis."""
    while taken.target is pack.take:
        (taken,) = taken.all_input_nodes
    return taken


def _taken(node: fx.Node) -> fx.Node | None:
    taken = node.args[0].args[0] if _is_square(node.args[0]) else None  # type: ignore[union-attr]
    return taken if isinstance(taken, fx.Node) and taken.target is pack.take else None


def sums_of_squares(site: Site) -> list[fx.Node]:
    """Sums of squares of which there is another one."""
    found = [node for node in site.calls(aten.sum.default) if _is_square(node.args[0])]
    return found if len(found) > 1 else []


def one_counted_twice(site: Site, node: fx.Node) -> None:
    """A sum of squares stands for another one as well."""
    other = next(each for each in sums_of_squares(site)[::-1] if each is not node)
    at = list(site.graph.nodes)
    first, second = sorted((node, other), key=at.index)
    second.replace_all_uses_with(first)


def _is_square(node: object) -> bool:
    return isinstance(node, fx.Node) and node.target is aten.pow.Tensor_Scalar
