"""The eager form of a rank's program: the same ops in the same order, with nothing copied that need not be.

    flatten = layout.flatten([mm_1, sum_1], 1)         b0 = bucket0.take()            # memory that stays
    started = all_reduce(flatten, 'sum', 'dp2/dp@0')   mm_out(t_1, x, out=b0.views[0])
    waited = wait_tensor(started)                      copy_(b0.views[1], sum_1)
    parts = layout.unflatten(waited, [...], 1)         all_reduce_(b0.flat, 'sum', 'dp2/dp@0'); wait_tensor(b0.flat)

A functional collective makes its result anew, and fresh memory costs page faults: reducing 64 MB between two
processes takes three times as long so as in place (``python -m benchmarks.collectives``). So gradients that travel
together are computed into a :class:`Bucket`, a value that nothing else needs is reduced where it lies, and what is
gathered comes into memory of a :class:`Pool`. ``rank_module`` keeps the functional form, which ``torch.compile``
wants.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import fx

from shardfx.ir.graph import OutputKind
from shardfx.ir.ops import pack
from shardfx.ir.program.rank_program import Program
from shardfx.ir.program.source import argument_text, raised_at

from .buckets import Bucket, Pool, dense, gathered, joined, mm_pieces, put, scatter, scattered, spread

Tensor = torch.Tensor


aten, c10d = torch.ops.aten, torch.ops._c10d_functional
_number = count()


@dataclass
class Eager:
    """Writes and holds the function; calling it runs the program."""

    program: Program
    device: torch.device
    buckets: list[Bucket] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._nodes = list(self.program.module.graph.nodes)
        self._at = {node: i for i, node in enumerate(self._nodes)}
        self._scope: dict[str, Any] = {"inf": float("inf"), "nan": float("nan")}
        self._pool = self._scope["_pool"] = Pool()
        self._fresh_is_dear = self.device.type == "cpu"  # on others torch itself keeps memory
        self._share = _Sharing(self._nodes)
        self._plan_buckets()
        self.source = self._write()
        name = self._file = f"<shardfx program {next(_number)}>"
        linecache.cache[name] = (len(self.source), None, self.source.splitlines(True), name)
        exec(compile(self.source, name, "exec"), self._scope)
        self._run: Callable[..., Sequence[Tensor]] = self._scope["program"]

    def __call__(self, *inputs: Tensor) -> Sequence[Tensor]:
        self._pool.next_step()
        return self._run(*inputs)

    def node_of(self, error: BaseException) -> fx.Node | None:
        """The node that raised; None if it was none of the program's."""
        line = raised_at(error, self._file)
        return None if line is None else self._owners[line - 1]

    # ---- what is done another way ---------------------------------------------------------------------------

    def _plan_buckets(self) -> None:
        """Find flatten -> reduction -> wait, and where each of the flattened tensors comes from."""
        self._bucket_of: dict[fx.Node, int] = {}
        self._writes: dict[fx.Node, list[tuple[int, int]]] = {}
        for node in self._nodes:
            if node.target is not pack.flatten or len(node.users) != 1:
                continue
            user = next(iter(node.users))
            if user.target not in (c10d.all_reduce.default, c10d.reduce_scatter_tensor.default):
                continue
            tensors, pieces = node.args
            made = node.meta["shardfx"]
            shapes = [tuple(shape) for shape in self._shapes(user)]
            if len(set(tensors)) != len(tensors) or any(t.op == "placeholder" for t in tensors):
                continue
            if pieces > 1:
                shapes = [(shape[0] * pieces, *shape[1:]) for shape in shapes]
            number = len(self.buckets)
            self.buckets.append(Bucket(shapes, pieces, made.outs[0].type.dtype, self.device))
            self._scope[f"_bucket{number}"] = self.buckets[number]
            self._bucket_of[node] = number
            for i, tensor in enumerate(tensors):
                self._writes.setdefault(tensor, []).append((number, i))

    @staticmethod
    def _shapes(started: fx.Node) -> Sequence[Sequence[int]]:
        """The shapes that a fused collective's result is taken apart into."""
        (wait,) = started.users
        (unflatten,) = wait.users
        return unflatten.args[1]  # type: ignore[return-value]

    def _in_place(self, node: fx.Node) -> bool:
        """Whether an all-reduce may write over its operand: fresh memory that nothing looks at later."""
        return self._share.owned(node.args[0]) and self._share.last_use(node.args[0]) is node

    # ---- writing --------------------------------------------------------------------------------------------

    def _write(self) -> str:
        dying = self._dying()
        inputs = [node.name for node in self._nodes if node.op == "placeholder"]
        lines: list[str] = []
        taken: set[int] = set()
        self._owners: list[fx.Node | None] = [None]  # of each line of the source
        for node in self._nodes:
            self._owners += [self._nodes[self._at[node] - 1]] * (1 + len(lines) - len(self._owners))
            if node.op == "placeholder":
                continue
            if node.op == "output":
                lines.append(f"return ({', '.join(self._results(node))},)")
                self._owners.append(node)
                continue
            for number, _ in self._writes.get(node, ()):
                if number not in taken:
                    taken.add(number)
                    lines.append(f"_flat{number}, _views{number} = _bucket{number}.take()")
            lines += self._statement(node)
            gone = [name for name in dying.get(node, ()) if name not in inputs]
            if gone:
                lines.append(f"{' = '.join(gone)} = None")
        return "\n    ".join([f"def program({', '.join(inputs)}):", *lines]) + "\n"

    def _results(self, output: fx.Node) -> list[str]:
        """What is returned: a gradient becomes its receiver's own, so that one which shares memory is copied."""
        texts, seen = [], set()
        for value, result in zip(self.program.outputs, output.args[0], strict=True):  # type: ignore[arg-type]
            part = result.target is operator.getitem and result.args[0].target is pack.unflatten
            key = result if part else self._share.root(result)
            alone = (
                self._share.owned(result) and key not in seen and not (not part and self._share.root(result) in seen)
            )
            seen |= {key, self._share.root(result)} if part else {key}
            texts.append(result.name if alone or value.kind is not OutputKind.GRADIENT else f"{result.name}.clone()")
        return texts

    def _statement(self, node: fx.Node) -> list[str]:
        target = node.target
        if node.op == "get_attr":
            return [f"{node.name} = {self._name(getattr(self.program.module, str(target)))}"]
        if target is operator.getitem:
            lines = [f"{node.name} = {self._text(node.args[0])}[{node.args[1]}]"]
        elif target is pack.flatten and node in self._bucket_of:
            return [f"{node.name} = _flat{self._bucket_of[node]}"]
        elif target is pack.flatten and node.args[1] == 1:
            lines = [self._call(node, joined)]
        elif target is c10d.all_reduce.default and (node.args[0] in self._bucket_of or self._in_place(node)):
            x = self._text(node.args[0])
            x = x if node.args[0] in self._bucket_of else f"{self._name(dense)}({x})"
            rest = ", ".join(map(self._text, node.args[1:]))
            lines = [f"{node.name} = {self._name(c10d.all_reduce_.default)}({x}, {rest})"]
        elif target is c10d.all_gather_into_tensor.default and self._fresh_is_dear:
            lines = [self._call(node, gathered, "_pool")]
        elif target is pack.unflatten and node.args[2] != 1 and self._fresh_is_dear:
            lines = [self._call(node, spread, "_pool")]
        elif target is c10d.reduce_scatter_tensor.default and self._fresh_is_dear:
            lines = [self._call(node, scatter)]
        elif target is c10d.wait_tensor.default and self._fresh_is_dear and _is_scatter(node.args[0]):
            lines = [self._call(node, scattered)]
        elif target is aten.mm.default and len(node.users) == 1 and self._single_write(node):
            ((number, i),) = self._writes[node]
            a, b = map(self._text, node.args)
            out, pieces = self._name(aten.mm.out), self.buckets[number].pieces
            if pieces == 1:
                return [f"{out}({a}, {b}, out=_views{number}[{i}])"]
            return [f"{self._name(mm_pieces)}({a}, {b}, _views{number}[{i}])"]
        else:
            lines = [self._call(node, target)]
        for number, i in self._writes.get(node, ()):
            lines.append(f"{self._name(put)}(_views{number}[{i}], {node.name})")
        return lines

    def _single_write(self, node: fx.Node) -> bool:
        """Whether a node's only use is to go into a bucket, so that it may be computed there."""
        return len(self._writes.get(node, ())) == 1

    def _call(self, node: fx.Node, function: Any, *first: str) -> str:
        parts = [*first] + [self._text(a) for a in node.args] + [f"{k}={self._text(a)}" for k, a in node.kwargs.items()]
        return f"{node.name} = {self._name(function)}({', '.join(parts)})"

    def _dying(self) -> dict[fx.Node, list[str]]:
        """After which node each value is let go. What goes into a bucket is let go when it is written there."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._nodes:
            for used in node.all_input_nodes:
                if not (node in self._bucket_of and used in self._writes):
                    last[used] = node
            if node in self._writes:
                last.setdefault(node, node)
        dying: dict[fx.Node, list[str]] = {}
        for used, user in last.items():
            if user.op != "output" and not (
                used is user and used.target is aten.mm.default and self._single_write(used)
            ):
                dying.setdefault(user, []).append(used.name)
        return dying

    def _text(self, arg: Any) -> str:
        return argument_text(arg, self._name)

    def _name(self, thing: Any) -> str:
        """A global name for an object. Ops are bound to what their Python wrapper calls."""
        if isinstance(thing, torch._ops.OpOverload):
            name, thing = f"_{thing._opname}_{thing._overloadname}".removesuffix("_default"), thing._op
        else:
            name = f"_{getattr(thing, '__name__', 'constant')}"
        while self._scope.setdefault(name, thing) is not thing:
            name += "_"
        return name


def _is_scatter(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is c10d.reduce_scatter_tensor.default


class _Sharing:
    """Which values of a program may share memory, and when such memory is used last."""

    def __init__(self, nodes: Iterable[fx.Node]) -> None:
        self._root: dict[fx.Node, fx.Node] = {}
        self._owned: dict[fx.Node, bool] = {}
        self._last: dict[fx.Node, fx.Node] = {}
        for node in nodes:
            roots = {self._root[used] for used in _shared_inputs(node)}
            root = next(iter(roots), node)
            for known in [known for known, old in self._root.items() if old in roots] if len(roots) > 1 else ():
                self._root[known] = root
            self._owned[root] = all(self._owned[r] for r in roots) if roots else node.op == "call_function"
            self._root[node] = root
            for used in node.all_input_nodes:
                self._last[self._root[used]] = node

    def root(self, value: Any) -> fx.Node:
        """One node for all values that may share this one's memory."""
        return self._root[value]

    def owned(self, value: Any) -> bool:
        """Whether the memory was made by this program, and is not an input's."""
        return self._owned[self._root[value]]

    def last_use(self, value: Any) -> fx.Node:
        return self._last[self._root[value]]


def _shared_inputs(node: fx.Node) -> list[fx.Node]:
    """The operands whose memory the result may share."""
    target = node.target
    if node.op != "call_function" or target is pack.flatten:
        return []
    if isinstance(target, torch._ops.OpOverload) and target is not c10d.wait_tensor.default:
        shares = any(result.alias_info is not None for result in target._schema.returns)
        return list(node.all_input_nodes) if shares else []
    if target is operator.getitem:
        (source,) = node.all_input_nodes
        fresh = isinstance(source.target, torch._ops.OpOverload) and not _shared_inputs(source)
        return [] if fresh else [source]
    return list(node.all_input_nodes)
