"""Assignment of nodes to stages.

A node of a block is in the block's stage; others are where the data flow takes them: forward as soon as what they need
is there, what stands in front of all blocks with the first that uses it, backward the other way round. What depends on
the batch alone (masks, positions) or on parameters alone (casts, gathers) is done in each stage that uses it; so is
what depends on rates and counts of steps. An update is where its gradient and its weight are; states go with it.
"""

from __future__ import annotations

from collections.abc import Callable

from shardfx.ir.errors import Error
from shardfx.ir.graph import Graph, InputKind, Node, Output, Phase, Value
from shardfx.ir.ops.traits import is_heavy
from shardfx.ir.validate.definitions import EVERYWHERE

At = tuple[int, ...]
OF_WEIGHTS = (InputKind.PARAMETER, InputKind.STATE, InputKind.BUFFER)


class Assignment:
    """The stages of the nodes and inputs of a graph.

    Args:
        own: the stage of the block that a node is in.
        last: the last stage.
        told: somebody says where modules are: what contradicts the data flow is an error.

    Raises:
        Error: a node needs what a later stage makes.
    """

    def __init__(self, graph: Graph, own: Callable[[Node], int | None], last: int, *, told: bool) -> None:
        self.graph, self._own, self._last, self._told = graph, own, last, told
        self.at: dict[Node, At] = {}
        self.inputs: dict[Value, At] = {}
        self._users = graph.users()
        self._copied = self._find_copied()
        once = [node for node in graph.nodes if node not in self._copied]
        self._forward([node for node in once if node.phase is Phase.FORWARD])
        self._backward([node for node in once if node.phase is Phase.BACKWARD])
        self._spread([node for node in graph.nodes if node.phase is not Phase.UPDATE])
        made: dict[Value, set[int]] = {}
        for node in once:
            if node.phase is Phase.UPDATE:
                self.at[node] = tuple(sorted(self._meeting(node, made))) or (0,)
        self._spread(graph.nodes)
        results = {output.value for output in graph.outputs}
        for each in graph.inputs:  # weights that nothing uses
            if each.kind in OF_WEIGHTS and not self.inputs[each.value] and each.value not in results:
                self.inputs[each.value] = self._of_module(each.name.rpartition(".")[0])

    def of(self, value: Value) -> At:
        """The stages in which a value is available."""
        return self.at[value.node] if value.node is not None else self.inputs[value]

    def wanted(self, output: Output) -> At:
        """The stages in which an output leaves the program: none is all of them."""
        if output.kind in EVERYWHERE:
            return ()
        inp = next((each for each in self.graph.inputs if each.name == output.name), None)
        return self.inputs[inp.value] if inp is not None and inp.kind in OF_WEIGHTS else ()

    def _find_copied(self) -> set[Node]:
        """Find the nodes that are duplicated in each stage that uses them."""
        kinds: dict[Value, frozenset[bool]] = {}
        for inp in self.graph.inputs:  # a single number of the optimizer (a rate, a count) is in each stage
            number = inp.kind.is_of_optimizer and inp.value.type.numel == 1
            kinds[inp.value] = frozenset() if number else frozenset([inp.kind in OF_WEIGHTS])
        found = set()
        for node in self.graph.nodes:
            kind = frozenset[bool]().union(*(kinds[value] for value in node.operands))
            if len(kind) <= 1 and not is_heavy(node) and all(v.node is None or v.node in found for v in node.operands):
                found.add(node)
            kinds.update(dict.fromkeys(node.outs, kind))
        return found

    def _forward(self, nodes: list[Node]) -> None:
        front = []
        for node in nodes:
            own, before = self._own(node), max((at[0] for at in self._made(node)), default=None)
            if own is None and before is None:
                front.append(node)
                continue
            if self._told and own is not None and before is not None and own < before:
                raise self._circle(node, own, before)
            self.at[node] = (max(own or 0, before or 0),)
        for node in reversed(front):  # what stands in front of all blocks
            users = [self.at[u][0] for v in node.outs for u in self._users[v] if u in self.at]
            self.at[node] = (min(users, default=0),)

    def _made(self, node: Node, phase: Phase | None = None) -> list[At]:
        """The stages of the nodes that compute a node's operands."""
        makers = [v.node for v in node.operands if v.node in self.at]
        return [self.at[maker] for maker in makers if maker is not None and phase in (None, maker.phase)]

    def _circle(self, node: Node, own: int, before: int) -> Error:
        maker = next(v.node for v in node.operands if v.node in self.at and self.at[v.node][0] == before)
        assert maker is not None
        return Error(
            "stages need one another in a circle",
            where=f"{node.where}: {node!r}",
            expected=f"what stage {own} needs from it or from stages before it",
            got=f"{maker!r} of stage {before} ({maker.where})",
            remedy="give both modules to one stage, or this one to a later stage",
        )

    def _backward(self, nodes: list[Node]) -> None:
        for node in nodes:
            behind = [at[0] for at in self._made(node, Phase.BACKWARD)]
            own = self._own(node)
            if own is not None:  # what was saved in stages before it does not delay it: it was sent
                self.at[node] = (min([own, *behind]),)
            else:
                ahead = [at[0] for at in self._made(node, Phase.FORWARD)]
                self.at[node] = (min(behind) if behind else max(ahead, default=self._last),)

    def _spread(self, nodes: list[Node]) -> None:
        """Assign duplicated nodes, and inputs, to the stages of their users."""
        results = {output.value for output in self.graph.outputs}
        for node in reversed(nodes):
            if node in self._copied:
                leaves = any(value in results for value in node.outs)
                self.at[node] = self._union(node.outs) or (self._of_module(node.where.module) if leaves else ())
        for each in self.graph.inputs:
            self.inputs[each.value] = self._union([each.value])

    def _union(self, values: list[Value]) -> At:
        users = [user for value in values for user in self._users[value]]
        return tuple(sorted({stage for user in users for stage in self.at.get(user, ())}))

    def _of_module(self, module: str) -> At:
        """The stage of an unused value: its module's, or the first one."""
        return next((self.at[n] for n in self.graph.nodes if n.where.module == module and self.at.get(n)), (0,))

    def _meeting(self, node: Node, made: dict[Value, set[int]]) -> set[int]:
        """The stages that have all operands of an update, scalars (a norm) apart, which are sent there; if there are
        none, the first stage with any of them."""
        tensors = [value for value in node.operands if value.type.numel > 1] or node.operands
        sets = [found for value in tensors if (found := self._there(value, made))]
        common = set.intersection(*sets) if sets else set()
        return common or ({min(set.union(*sets))} if sets else set())

    def _there(self, value: Value, made: dict[Value, set[int]]) -> set[int]:
        """The stages in which a value is available or can be computed; none if it follows its users."""
        if value.node not in self._copied:
            return set(self.inputs[value] if value.node is None else self.at.get(value.node, ()))
        if value not in made:
            made[value] = set(self.at.get(value.node, ())) or self._meeting(value.node, made)
        return made[value]
