"""Damage to what one rank's program offloads and fetches: read where it lies, too early, too late, or another one."""

from __future__ import annotations

import torch
from torch import fx

from shardfx.ir.ops.pools import transfer
from tests.damage import Site


def used_arrivals(site: Site) -> list[fx.Node]:
    """Where something that was fetched is there, and is computed with."""
    return [n for n in site.calls(transfer.arrived) if n.args[0].target is transfer.to_device and n.users]  # type: ignore[union-attr]


def read_where_it_lies(site: Site, node: fx.Node) -> None:
    """Whoever reads takes what lies beside the device."""
    node.replace_all_uses_with(node.args[0].args[0])  # type: ignore[union-attr,arg-type]


def not_waited_for(site: Site, node: fx.Node) -> None:
    """Whoever reads takes what was only started."""
    node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]


def _twin(site: Site, node: fx.Node) -> fx.Node | None:
    """Another stored value of the same shape, that lies in the same pool."""
    mine = node.args[0]
    assert isinstance(mine, fx.Node)
    others = [call.args[0] for call in site.calls(transfer.to_device, transfer.put)]
    shape = site.shapes.get(mine.name)
    return next(
        (
            each
            for each in others
            if isinstance(each, fx.Node) and each is not mine and shape and site.shapes.get(each.name) == shape
        ),
        None,
    )


def fetched_with_twin(site: Site) -> list[fx.Node]:
    """Fetches of what has a twin."""
    return [n for n in site.calls(transfer.to_device) if _twin(site, n) is not None]


def another_fetched(site: Site, node: fx.Node) -> None:
    node.update_arg(0, _twin(site, node))


def puts_with_twin(site: Site) -> list[fx.Node]:
    """What is put where something lies that has a twin."""
    return [n for n in site.calls(transfer.put) if _twin(site, n) is not None]


def swapped_places(site: Site, node: fx.Node) -> None:
    node.update_arg(0, _twin(site, node))


def read_behind_its_new_content(site: Site, node: fx.Node) -> None:
    """The state is fetched, for its update, behind that."""
    fetch = next(n for n in site.calls(transfer.to_device) if n.args[0] is node.args[0])
    late = site.after(node, transfer.to_device, *fetch.args, users=False)
    site.end.args = (tuple(late if each in node.users else each for each in site.end.args[0]),)  # type: ignore[union-attr]


def not_fetched(site: Site, node: fx.Node) -> None:
    """What was fetched goes back, and not what was made of it."""
    fetch = next(n for n in site.calls(transfer.arrived) if n.args[0].args[0] is node.args[0])  # type: ignore[union-attr]
    node.update_arg(1, fetch)


def ids_of(node: fx.Node) -> fx.Node:
    """By which rows are looked up, or into which their gradients go."""
    found = node.args[1]
    assert isinstance(found, fx.Node)
    return found


def of_other_rows(site: Site, node: fx.Node) -> None:
    """The rows of other samples."""
    with site.graph.inserting_before(node):
        node.update_arg(1, site.graph.call_function(torch.ops.aten.roll.default, (ids_of(node), [1], [0])))


def of_rows_too_early(site: Site, node: fx.Node) -> None:
    """By ids whose copy in the host's memory was only started."""
    node.update_arg(1, ids_of(node).args[0])


def by_ids_that_travel(site: Site) -> list[fx.Node]:
    """Lookups by what was sent to the host."""
    lookups = site.calls(torch.ops.aten.embedding.default, torch.ops.aten.embedding_dense_backward.default)
    return [node for node in lookups if ids_of(node).target is transfer.arrived]
