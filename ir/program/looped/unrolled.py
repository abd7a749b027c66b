"""A program with turns as programs without: one for each turn, as if turns were ranks.

    turn = time.turns('mb', 4, ...)                  of turn 2, where mb is an axis of ranks:
        at = time.at(turn, 0, 16)
        part = time.piece(x, 0, at, 16)              (what turn 2 has of x is all that there is)
        grad = aten.mm(part, w)                      grad = aten.mm(x, w)
        sum = time.add(total, grad)                  sum = c10d.all_reduce(grad, 'sum', 'mb4.dp2/mb@1')
    done = time.done(turn, ...)                      wait = c10d.wait_tensor(sum)

What a rank collects over its turns is what so many ranks would reduce or gather. So what is proven of ranks is proven
of turns: that each is there once, with its own rows, and is added once. What is no such program is refused here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from shardfx.ir.graph import Graph, Output
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import memory_ops, pack
from shardfx.ir.ops.local_ops import row_of
from shardfx.ir.ops.time import turns
from shardfx.ir.program.rank_program import RankProgram
from shardfx.ir.shards import held_shape

from .collected import NotTurns, Put, Walk
from .own_rows import own_place, own_rows


def as_ranks(mesh: Mesh) -> Mesh:
    """The mesh on which each turn is a rank of its own."""
    return Mesh(links={axis.name: axis.link for axis in mesh.axes}, **{axis.name: axis.size for axis in mesh.axes})


def unrolled(program: RankProgram, graph: Graph, rank: int) -> RankProgram:
    """What one rank of the mesh without turns does, of the program of the rank that it is a turn of.

    Args:
        graph: the planned one, on the mesh :func:`as_ranks`.
        rank: of this mesh.

    Raises:
        NotTurns: turns are left out or done twice, take other rows than their own, or something leaves them that they
            do not collect.
    """
    return _Unrolling(program, graph, rank).run()


class _Unrolling(Walk):
    def run(self) -> RankProgram:
        for node in self.program.graph.nodes:
            self.inside[node] = tuple(self.open)
            if node.op == "placeholder":
                self.env[node] = self.fx.node_copy(node)
                self.taken[node] = frozenset()
            elif node.op == "output":
                self._output(node)
            elif node.op == "get_attr":
                self.env[node] = self.fx.node_copy(node)
            else:
                self._call(node)
        if self.open:
            raise NotTurns("turns begin here and do not end", self.open[-1])
        of = {(given.kind, given.name): given for given in self.planned.inputs}
        to = {(output.kind, output.name): output for output in self.planned.outputs}
        return replace(
            self.program,
            rank=self.rank,
            mesh=self.planned.mesh,
            graph=self.fx,
            inputs=tuple(of[given.kind, given.name] for given in self.program.inputs),
            outputs=tuple(to[output.kind, output.name] for output in self.program.outputs),
        )

    def _call(self, node: fx.Node) -> None:
        row = row_of(node.target)
        part = row.turns if row is not None else ""
        if part == "unit":
            return  # what it says of the order was checked with the form of the program
        if part == "opens":
            self._opens(node)
        elif part == "closes":
            if not self.open or node.args[0] is not self.open[-1]:
                raise NotTurns("turns end here that did not begin last", node)
            self.open.pop()
        elif part == "number":
            self.env[node] = row.function(*(self._number(arg, node) for arg in node.args))  # type: ignore[union-attr]
        elif part == "collects":
            self.collects(node)
        elif node.target is turns.piece:
            self._piece(node)
        elif node.target is memory_ops.filled or (node.target is memory_ops.part and node.args[0] not in self.env):
            self.memory.add(node)
        elif node.target is memory_ops.join and node.args[0] in self.memory:
            self._copied(node, pack.flatten, node.args[1:])
        else:
            self._copied(node)

    def _opens(self, node: fx.Node) -> None:
        axis, count = node.args[:2]
        mesh = self.program.mesh
        if axis not in self.time or mesh[str(axis)].size != count:
            raise NotTurns(f"{count} turns of {axis!r}, where the mesh is {mesh!r}", node)
        if any(other.args[0] == axis for other in self.open):
            raise NotTurns(f"turns of {axis!r} within turns of {axis!r}", node)
        self.open.append(node)
        self.env[node] = self.coords[str(axis)]

    def _copied(self, node: fx.Node, target: Any = None, args: Any = None) -> None:
        args = node.args if args is None else args
        fx.map_arg((args, node.kwargs), lambda used: self._usable(used, node))
        given, named = fx.map_arg((args, node.kwargs), self.env.__getitem__)
        row = row_of(node.target)
        if row is not None and row.group is not None:
            given = (*given[: row.group], self._group(node, str(given[row.group])), *given[row.group + 1 :])
        self.env[node] = self._make(node, target or node.target, given, named)

    # ---- what comes in ------------------------------------------------------------------------------------------

    def _piece(self, node: fx.Node) -> None:
        """A turn's own rows of an input."""
        args: Any = node.args
        source, dim, start, length = args
        if not isinstance(source, fx.Node) or source not in self.taken or not self._reaches(source):
            raise NotTurns(f"{node.name} is a turn's part of what is no input", node)
        start, length = self._number((start, length), node)
        left = [loop for loop in self.open if loop.args[0] in self._turned(source) - self.taken[source]]
        origin = source
        while origin.op != "placeholder":
            origin = origin.args[0]  # type: ignore[assignment]
        spec, shape = self.sources[origin].value.spec, self.sources[origin].value.shape
        assert spec is not None
        over = next((loop for loop in left if dim < len(spec.dims) and loop.args[0] in spec.dims[dim].axes), None)
        if over is None:
            raise NotTurns(f"{node.name} takes a part of dim {dim}, which these turns do not cut", node)
        axis = str(over.args[0])
        expected = own_rows(spec, shape, self.program.mesh, self.coords, axis, dim)
        if (start, length) != expected:
            what = f"turn {self.coords[axis]} of {axis} takes {length} rows of {origin.name} from {start} on"
            raise NotTurns(f"{what}, where its own are {expected[1]} from {expected[0]} on", node)
        self.env[node] = self.env[source]
        self.taken[node] = self.taken[source] | {axis}

    def _output(self, node: fx.Node) -> None:
        given: Any = node.args[0]
        results = []
        for output, result in zip(self.program.outputs, given, strict=False):
            made = self.env.get(result) if isinstance(result, fx.Node) else result
            spec = output.value.spec
            if isinstance(made, Put):
                made = self._own_part(output, made)
            elif isinstance(result, fx.Node) and result not in self.taken:
                self._usable(result, node)
            assert spec is not None
            results.append(made)
        self.fx.output(tuple(results))

    def _own_part(self, output: Output, made: Put) -> Any:
        """What this turn has put, where it is the output's own place for it."""
        spec, shape = output.value.spec, output.value.shape
        assert spec is not None
        place, held = (
            own_place(spec, shape, self.program.mesh, self.coords),
            held_shape(spec, shape, self.program.mesh, self.program.rank),
        )
        if made.place != place or tuple(made.shape) != held:
            what = f"a turn's part of {output.kind} {output.name} is put at {made.place}, not {place}"
            raise NotTurns(what, made.node)
        if made.dtype != output.value.type.dtype:
            what = f"{output.kind} {output.name} is put into memory of {made.dtype}, not {output.value.type.dtype}"
            raise NotTurns(what, made.node)
        return made.x
