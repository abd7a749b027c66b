"""Damage to the memory of one rank's program: what is read too early, written twice, or written elsewhere."""

from __future__ import annotations

from torch import fx

from shardfx.ir.ops import memory_ops
from shardfx.ir.program.aliasing import Aliasing
from tests.damage import WAIT, Site, shards


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
