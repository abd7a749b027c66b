"""Damage to the memory of one rank's program, and to what it offloads: read too early, written twice, or elsewhere."""

from __future__ import annotations

import torch
from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.ops.pools import transfer
from shardfx.ir.program.aliasing import Aliasing
from tests.damage import WAIT, Mutation, Site, argument, becomes, of, shards


def waits_of_all(site: Site) -> list[fx.Node]:
    """Waits whose result is used."""
    return [n for n in site.calls(WAIT) if n.users]


def read_before_the_wait(site: Site, node: fx.Node) -> None:
    """The first that reads takes what was only started."""
    first = next(n for n in site.graph.nodes if n in node.users)
    first.replace_input_with(node, node.args[0])  # type: ignore[arg-type]


def memories_with_twin(site: Site) -> list[fx.Node]:
    """Memory of which there is as much elsewhere."""
    return [n for n in site.calls(memory_ops.empty) if _same_memory(site, n) is not None]


def _same_memory(site: Site, node: fx.Node) -> fx.Node | None:
    """Earlier memory whose content is read later yet."""
    share = Aliasing(site.graph.nodes)
    others = [n for n in site.calls(memory_ops.empty) if n.args == node.args and n is not node]
    earlier = [n for n in others if n < node and not share.last_use(n, node)]
    return earlier[0] if earlier else None


def shared_memory(site: Site, node: fx.Node) -> None:
    twin = _same_memory(site, node)
    assert twin is not None
    node.replace_all_uses_with(twin)
    site.graph.erase_node(node)


def slots_of_gradients(site: Site) -> list[fx.Node]:
    """Gradients that come of a bucket."""
    return [n for n in shards(site) if n in site.end.args[0] and _slot(n) is not None]  # type: ignore[operator]


def _slot(node: fx.Node) -> fx.Node | None:
    wait = node.args[0].args[0]  # type: ignore[union-attr]
    joined = wait.args[0].args[0]  # type: ignore[union-attr]
    return joined.args[1][node.args[1]] if joined.target is memory_ops.join else None  # type: ignore[union-attr,index]


def read_from_slot(site: Site, node: fx.Node) -> None:
    slot = _slot(node)
    site.end.args = (tuple(slot if each is node else each for each in site.end.args[0]),)  # type: ignore[union-attr]


def gathered_over_an_input(site: Site, node: fx.Node) -> None:
    given = next(n for n in site.graph.nodes if n.op == "placeholder")
    node.kwargs = {**node.kwargs, "out": given}


def joined(node: fx.Node) -> bool:
    """Whether what is written is read as a part of what it is written into."""
    return any(user.target is memory_ops.join for user in node.users)


def joined_otherwise(site: Site, node: fx.Node) -> None:
    memory, values, count = node.args
    node.args = (memory, [values[1], values[0], *values[2:]], count)  # type: ignore[index,misc]


def stepped(site: Site) -> list[fx.Node]:
    """Calls that write over a state of which there is another one."""
    return [n for n in site.graph.nodes if n.op == "call_function" and _another_state(site, n) is not None]


def _another_state(site: Site, node: fx.Node) -> fx.Node | None:
    into = node.kwargs.get("out")
    if not isinstance(into, fx.Node) or not into.name.endswith("_exp_avg"):
        return None
    return next((n for n in site.graph.nodes if n.op == "placeholder" and n.name == f"{into.name}_sq"), None)


def over_another_state(site: Site, node: fx.Node) -> None:
    node.kwargs = {**node.kwargs, "out": _another_state(site, node)}


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


IN_PLACE = (
    Mutation("a slot written twice", of(memory_ops.part, when=lambda n: n.args[2] > 0), argument(2, lambda _: 0)),
    Mutation("a read before the wait", waits_of_all, read_before_the_wait),
    Mutation("a slot of the pool for two", memories_with_twin, shared_memory),
    Mutation("a gradient read from its slot", slots_of_gradients, read_from_slot),
    Mutation("gathered over an input", of(memory_ops.all_gather_into), gathered_over_an_input),
    Mutation("joined in another order", of(memory_ops.join, when=lambda n: len(n.args[1]) > 1), joined_otherwise),
    Mutation("stepped over another state", stepped, over_another_state),
    Mutation("not written where it is joined", of(memory_ops.write, when=joined), becomes(1)),
)
"""Damage to destinations."""

POOLS = (
    Mutation("read where it was offloaded", used_arrivals, read_where_it_lies),
    Mutation("read before its copy is there", used_arrivals, not_waited_for),
    Mutation("another value fetched", fetched_with_twin, another_fetched),
    Mutation("another value fetched on one rank", fetched_with_twin, another_fetched, True),
    Mutation("a state put where another one lies", puts_with_twin, swapped_places),
    Mutation("a state fetched behind its new content", of(transfer.put), read_behind_its_new_content),
    Mutation("a state put back as it was", of(transfer.put), not_fetched),
    Mutation("returned beside where it belongs", of(transfer.put), becomes(1)),
    Mutation("rows of other samples", by_ids_that_travel, of_other_rows),
    Mutation("rows of other samples on one rank", by_ids_that_travel, of_other_rows, True),
    Mutation("rows looked up before their ids are there", by_ids_that_travel, of_rows_too_early),
)
"""Damage to what is offloaded and fetched."""
