"""context-parallel: how attention is computed where its sequence is sharded.

Propagation leaves the query rows of an attention sharded, and gathers its keys and values. Where a :class:`Context`
names the module, this pass gives its attention, forward and backward, another strategy of the same op. Nothing around
it changes: what is sharded by rows there becomes sharded by heads in front of it, and by rows again behind it.

    before   %7, %8 = shardfx.attention(%4, %5, %6)     s{cp}: %4 [2, 32, 4096{cp}, 128], %5 and %6 gathered
    after    %7, %8 = shardfx.attention(%4, %5, %6)     h{cp}: all of [2, 32{cp}, 4096, 128]          all-to-all

- gather: keys and values of all rows (Llama 3, https://arxiv.org/abs/2407.21783)
- all-to-all: DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509); more ranks than key heads have copies of them
- ring: keys and values of one rank after another (:mod:`.ring_attention`, https://arxiv.org/abs/2310.01889)
- 2d: heads over the last axis, rows over the others, as a ring (USP, https://arxiv.org/abs/2405.07719)
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from shardfx.ir.cost.flops import flops_of
from shardfx.ir.dim_sharding import REPLICATED, DimSharding, Part, Window, compound, smallest, without
from shardfx.ir.errors import Error, ShardfxWarning, did_you_mean
from shardfx.ir.graph import Graph, Node, Phase, Strategy, Value, factors_text
from shardfx.ir.mesh import Mesh
from shardfx.ir.ops import comm
from shardfx.ir.ops.context.attention_steps import attention_step
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.reasons import ByValue, ShardingDecision
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rulebook.arithmetic.attention import windows_of
from shardfx.ir.rulebook.dims import argument
from shardfx.ir.rules.strategy import as_placed, factor_shardings
from shardfx.ir.spec import Spec, TensorType

from .base import COMM_EXPLICIT, SHARDED, Pass, PassContext, is_within
from .memory.recompute import Recomputation
from .ring_attention import RingSteps, stripes_of

aten = torch.ops.aten

CONTEXT = "context: "
GATHERED = {
    "window": "gathered, where an attention has no window of at most half the sequence",
    "ring": "gathered, where an attention has a dense mask, dropout, or no causal mask and rows that are not divided",
}
"""Why keys are gathered where another strategy is asked for."""
STRIPED = ("gather", "ring", "2d")
"""Strategies by which rows may be in stripes."""
FEWEST_ROWS = 128
"""The rows of a stripe on one rank, where their number is not asked for."""
FETCHED = {attention: comm.all_gather, attention_step: comm.halo}
"""The communication that brings keys of other ranks."""
UNSTRIPED = "without stripes, which need a causal mask, no layer with a sliding window, and a length that they divide"
"""Why rows are not in the stripes that are asked for."""
HOW = ("auto", "gather", "all-to-all", "ring", "window", "2d")


@dataclass(frozen=True)
class Context:
    """Context parallelism of the attention in a module: ``specs={"**.self_attn": sx.Context("cp")}``.

    The sequence itself is sharded by a placement of the inputs, such as ``"kwargs.input_ids": "-, cp"``.

    Args:
        axis: the mesh axis over which the sequence is sharded; several, major first, as ``"rows heads"``.
        how: the strategy. ``"gather"``: keys and values of all rows on each rank, gathered again for the backward.
            ``"all-to-all"``: heads sharded within attention, rows outside; where ranks are more than key heads, each
            has a copy of one. ``"ring"``: the keys and values of one rank after another. ``"2d"``: heads over the last
            of several axes, rows over the others, as a ring. ``"window"``: rows, and a halo of the keys that they see
            in a sliding window of at most half the sequence. ``"auto"``: the one of the fewest predicted seconds that
            does not gather the keys of all rows; gather where nothing else works.
        stripes: load balancing of ``"gather"``, ``"ring"`` and ``"2d"`` with a causal mask: the sequence is cut into so
            many chunks, each split over the ranks (Striped Attention, https://arxiv.org/abs/2311.09431). The busiest
            rank then has ``1 + 1 / stripes`` times the mean of the work; with 1, a contiguous part each, twice. 0
            chooses 16, 8, 4 or 2, so that a chunk has 128 tokens or more on each rank, else 1. Models that have layers
            with sliding windows have 1. Under ``torchrun`` each rank then passes the global batch, not a part of it.

    Example::

        hints = sx.Hints(..., specs={"kwargs.input_ids": "-, cp", "**.self_attn": sx.Context("cp", how="all-to-all")})
    """

    axis: str
    how: str = "auto"
    stripes: int = 0

    def __post_init__(self) -> None:
        where = f"Context({self.axis!r}, how={self.how!r})"
        if not isinstance(self.axis, str) or not self.axes or len(set(self.axes)) < len(self.axes):
            expected = 'the name of a mesh axis, or names of several, as "rows heads"'
            raise Error("the axis of a Context is no name", where=where, expected=expected, got=repr(self.axis))
        if self.how not in HOW:
            remedy = did_you_mean(str(self.how), HOW, "see help(sx.Context)")
            what = "a Context of an unknown strategy"
            raise Error(what, where=where, expected=f"how one of {', '.join(HOW)}", got=repr(self.how), remedy=remedy)
        if type(self.stripes) is not int or self.stripes < 0 or (self.stripes > 1 and self.how not in STRIPED):
            expected = f"stripes of {', '.join(STRIPED)}, 1 or more; 0 chooses"
            raise Error("a Context has no such stripes", where=where, expected=expected, got=repr(self.stripes))

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, major first."""
        return tuple(self.axis.replace(",", " ").split())

    @property
    def text(self) -> str:
        """As a saved plan has it."""
        return f"{CONTEXT}{self.axis}; {self.how}" + (f"; {self.stripes}" if self.stripes else "")

    @staticmethod
    def of_text(text: str) -> Context | None:
        """Read :attr:`text`; None if it is that of something else."""
        axis, how, *stripes = text.removeprefix(CONTEXT).split("; ") if text.startswith(CONTEXT) else ("", "")
        return Context(axis, how, *map(int, stripes)) if axis else None


@dataclass(frozen=True)
class ContextParallel(Pass):
    """Give the attention of some modules a strategy of context parallelism."""

    name: ClassVar[str] = "context-parallel"
    requires: ClassVar[frozenset[str]] = frozenset({SHARDED})

    def run(self, graph: Graph, context: PassContext) -> bool:
        hints = {text: each for text, each in context.specs.items() if isinstance(each, Context)}
        calls = [node for node in graph.nodes if node.op is attention and node.phase is Phase.FORWARD] if hints else []
        chosen: dict[Node, tuple[str, Context]] = {}
        for text, hint in hints.items():
            named = [node for node in calls if is_within(node.where.module, text)]
            if not named:
                raise _without_attention(text, hint, calls)
            for node in named:
                other = chosen.setdefault(node, (text, hint))
                if other[1] != hint:
                    raise Error(
                        f"two hints disagree on the attention of {node.where.module}",
                        where=f"hints {other[0]!r} and {text!r}",
                        expected="one Context for each attention",
                        got=f"{other[1]} and {hint}",
                        remedy="make the patterns narrower",
                    )
        users, rewriter = graph.users() if chosen else {}, Rewriter(graph, context.rules)
        found = [
            _Attention(node, text, hint, context, users)
            for node, (text, hint) in chosen.items()
            if not _is_short(node, hint, graph.mesh)
        ]
        for each in found:
            each.choose(rewriter)
        rewriter.apply()
        for each in found:
            each.place()
            graph.reasons.later(each.explain)
        rewriter = Rewriter(graph, context.rules)
        for each in found:
            if each.ring:
                each.in_steps(rewriter)
        rewriter.apply()
        for text, hint in hints.items():
            made = dict.fromkeys(each.text for each in found if chosen[each.node][0] == text)
            said = ", ".join(made) or "none, for rows are fewer than its ranks"
            graph.notes.append(f"context parallelism of {text!r} over {hint.axis}: {said}")
            if hint.how in GATHERED and "gather" in made:
                warnings.warn(f"{graph.notes[-1]}; {GATHERED[hint.how]}", ShardfxWarning, stacklevel=2)
            if hint.stripes > 1 and not any("stripes" in each for each in made):
                warnings.warn(f"{graph.notes[-1]}; {UNSTRIPED}", ShardfxWarning, stacklevel=2)
        graph.rename()
        return bool(found)


@dataclass(frozen=True)
class RematerializeKeys(Pass):
    """Gather keys and values again for the backward, so that no layer keeps those of all rows.

    In the attention that a :class:`Context` names.
    """

    name: ClassVar[str] = "rematerialize-keys"
    requires: ClassVar[frozenset[str]] = frozenset({COMM_EXPLICIT})

    def run(self, graph: Graph, context: PassContext) -> bool:
        named = [text for text, each in context.specs.items() if isinstance(each, Context)]
        calls = (node for node in graph.nodes if node.op in FETCHED and node.phase is Phase.FORWARD)
        calls = (node for node in calls if any(is_within(node.where.module, text) for text in named))
        keys = ((value, FETCHED[node.op]) for node in calls for value in node.operands[1:3])
        gathered = {value for value, op in keys if value.node is not None and value.node.op is op}
        return Recomputation(graph, gathered.__contains__).run()


def in_stripes(graph: Graph, shape: Sequence[int], spec: Spec, specs: Mapping[str, Any]) -> Spec:
    """The sharding of an input's sequence in stripes, where a :class:`Context` asks for causal attention by rows."""
    for text, hint in specs.items():
        if not isinstance(hint, Context) or hint.how not in STRIPED:
            continue
        calls = [node for node in graph.nodes if node.op is attention]
        mine = [node for node in calls if is_within(node.where.module, text)]
        if not any(argument(node, "causal") and not argument(node, "window") for node in mine):
            continue
        if any(windows_of(node) is not None for node in calls):  # whose halo is of rows that lie together
            continue
        for dim, (size, sharding) in enumerate(zip(shape, spec.dims, strict=True)):
            if sharding.parts or not {*hint.axes} <= {*sharding.axes}:
                continue
            ranks = graph.mesh.extent(sharding.axes)
            asked = [hint.stripes] if hint.stripes else [n for n in (16, 8, 4, 2) if size >= n * ranks * FEWEST_ROWS]
            stripes = next((n for n in asked if size % (n * ranks) == 0), 1)
            parts = [Part(stripes), Part(size // stripes, sharding.axes)]
            spec = spec.with_dim(dim, compound(parts, graph.mesh) if stripes > 1 else sharding)
    return spec


def _is_short(node: Node, hint: Context, mesh: Mesh) -> bool:
    """Whether the queries are fewer rows than ranks, so that propagation left them whole."""
    q = node.operands[0]
    known = q.spec is not None and set(hint.axes) <= {*mesh.names} - {*q.spec.dims[2].axes}
    return known and smallest(q.shape[2], hint.axes, mesh) == 0


def _without_attention(text: str, hint: Context, calls: Sequence[Node]) -> Error:
    modules = list(dict.fromkeys(node.where.module for node in calls))
    remedy = did_you_mean(text, modules, "name one of these", count=3)
    if not modules:
        remedy = 'call it, in place of a softmax of products; a Hugging Face model takes attn_implementation="sdpa"'
    return Error(
        f"hint {text!r} names no attention",
        where="Hints(specs=...)",
        expected=f"a module that computes scaled_dot_product_attention: {', '.join(modules[:4]) or 'none here does'}",
        got=f"{text!r}: {hint}",
        remedy=remedy,
    )


class _Attention:
    """An attention and its backward, whose strategy is to be chosen."""

    def __init__(
        self, node: Node, text: str, hint: Context, context: PassContext, users: Mapping[Value, Sequence[Node]]
    ) -> None:
        self.node, self.by, self.hint, self.users, self.machine = node, text, hint, users, context.machine
        self.planner, self.cache = context.planner, context.cache
        self.mesh, self.where = context.planner.mesh, f"hint {text!r}: {hint}; {node.where}"
        behind = (user for value in node.outs for user in users[value])
        self.nodes = list(dict.fromkeys([node, *(user for user in behind if user.op is attention_backward)]))
        self.shardings = {each: factor_shardings(self.cache.rule(each), each, self.mesh) for each in self.nodes}
        self.heads: tuple[str, ...] = ()
        self.ring = False
        unknown = [axis for axis in hint.axes if axis not in self.mesh.names]
        if unknown:
            remedy = did_you_mean(unknown[0], self.mesh.names)
            raise self._error(f"mesh axis {unknown[0]!r} is unknown", f"axes of {self.mesh!r}", unknown[0], remedy)
        if node.pin is not None:
            raise Error(
                f"two hints disagree on the attention of {node.where.module}",
                where=f"hints {node.pin.by!r} of strategies and {text!r} of specs",
                expected="a strategy or a Context of each attention",
                got=f"{factors_text(node.pin.shardings)} and {hint}",
                remedy="leave one of them out",
            )
        q = node.operands[0]
        assert q.spec is not None
        self.rows = q.spec.dims[2]
        if not set(hint.axes) <= set(self.rows.axes):
            raise self._error(
                f"{hint.axis!r} shards no sequence here",
                "an axis that shards the rows of the queries [batch, heads, rows, head]",
                f"queries {q.spec.text(q.shape)}",
                f'shard the inputs of the model over it, such as specs={{"kwargs.input_ids": "-, {hint.axis}"}}',
            )
        last = self.rows.axes[-len(hint.axes) :] == hint.axes
        self.by_heads = hint.axes if last else ()
        if tuple(axis for axis in self.rows.axes if axis in hint.axes) != hint.axes or (
            not last and hint.how in ("all-to-all", "2d")
        ):
            axes = " ".join(self.rows.axes)
            raise self._error(
                "the axes of a Context are in another order than those of the sequence, or not the last of them",
                f"the last of {axes!r}, in this order",
                repr(hint.axis),
                f'sx.Context("{axes}", how={hint.how!r})',
            )

    def choose(self, rewriter: Rewriter) -> None:
        """Choose the axes that shard heads, and repeat key heads where there are fewer than their ranks."""
        axes, how = self.hint.axes, self.hint.how
        if how == "2d" and len(axes) < 2:
            expected = "two mesh axes or more: heads over the last, rows over the others"
            remedy = 'name two: sx.Context("rows heads", how="2d"), with the sequence sharded as "-, rows heads"'
            raise self._error("a 2d strategy of one axis", expected, f"the axis {self.hint.axis!r}", remedy)
        if how == "auto":
            options = [self.by_heads[start:] for start in range(len(self.by_heads) + 1)]
            options = [each for each in options if self._times(each) and not self._gathers(each)]
            self.heads = min(options, key=self._seconds, default=())
        elif how not in ("gather", "window", "ring"):
            self.heads = axes if how == "all-to-all" else axes[-1:]
        self.ring = how not in ("gather", "window") and self._is_ring(self.heads)
        times = self._times(self.heads)
        if not times:
            heads, ranks = self._heads, self.mesh.extent(self._head_axes(self.heads))
            fits = max(n for n in range(1, ranks + 1) if heads % n == 0)
            what, got = "heads cannot be shared out equally", f"{ranks} shards of them"
            remedy = f"at most {fits} ranks; how='gather'; or two axes and how='2d', the last of at most {fits}"
            remedy = f"how='ring'; {remedy}" if fits > 1 else "how='ring', or how='gather'"
            raise self._error(what, f"a divisor of {heads} heads of queries", got, remedy)
        if times > 1:
            self._repeat(times, rewriter)

    def place(self) -> None:
        """Write the strategies onto the nodes."""
        for node in self.nodes:
            self._write(node, self.cache.strategy(self.cache.rule(node), self._sharded(node, self.heads)))

    def in_steps(self, rewriter: Rewriter) -> None:
        """Convert the nodes into the steps of a ring."""
        shardings = {node: self._sharded(node, self.heads) for node in self.nodes}
        by = f"a ring over {' '.join(self._rows_left(self.heads).axes)}, by the hint {self.by!r}"
        RingSteps(rewriter, self.cache, self.mesh, self._rows_left(self.heads), shardings, by).convert(*self.nodes)

    def explain(self, decisions: ByValue) -> None:
        """Write the hint as the reason of the heads' shardings."""
        heads = {*self.heads}
        for value in (value for node in self.nodes for value in node.outs):
            dims = enumerate(value.spec.dims if value.spec is not None else ())
            mine = [ShardingDecision(value, d, each, hint=self.by) for d, each in dims if heads & {*each.axes}]
            if mine:
                decisions[value] = [
                    each for each in decisions.get(value, []) if not heads & {*each.sharding.axes}
                ] + mine

    @property
    def text(self) -> str:
        """What was chosen, in the words of :class:`Context`."""
        if not self.heads and windows_of(self.node) is not None and not self.ring:
            return "window"
        if self.heads == self.hint.axes:
            return "all-to-all"
        name = "2d" if self.heads else "ring" if self.ring else "gather"
        stripes = stripes_of(self.node, self._rows_left(self.heads), self.mesh)
        return f"{name}, {stripes} stripes" if stripes > 1 else name

    @property
    def _heads(self) -> int:
        return self.nodes[0].operands[0].shape[1]

    def _head_axes(self, heads: Sequence[str]) -> tuple[str, ...]:
        known = self.shardings[self.nodes[0]]
        return (*(axis for factor in ("h", "r") for axis in known.get(factor, REPLICATED).axes), *heads)

    def _times(self, heads: Sequence[str]) -> int:
        """How often each key head is repeated for ranks that are more; 0 where heads cannot be shared out equally."""
        groups, ranks = self.nodes[0].operands[1].shape[1], self.mesh.extent(self._head_axes(heads))
        times = ranks // math.gcd(groups, ranks) if heads else 1
        return 0 if times > 1 and self._heads % (groups * times) else times

    def _rows_left(self, heads: Sequence[str]) -> DimSharding:
        """The sharding of rows, beside that of heads."""
        return self._sharded(self.nodes[0], heads).get("s", REPLICATED)

    def _is_ring(self, heads: Sequence[str]) -> bool:
        """Whether keys come in steps: there are rows left, and no window whose halo is less."""
        rows = self._rows_left(heads)
        few = windows_of(self.nodes[0]) is not None and self.hint.how != "ring"
        return bool({*rows.axes} & {*self.hint.axes}) and not few and stripes_of(self.nodes[0], rows, self.mesh) > 0

    def _gathers(self, heads: Sequence[str]) -> bool:
        """Whether the keys of all rows are gathered."""
        rows = {*self._rows_left(heads).axes} & {*self.hint.axes}
        return bool(rows) and not self._is_ring(heads) and windows_of(self.nodes[0]) is None

    def _sharded(self, node: Node, heads: Sequence[str]) -> dict[str, DimSharding]:
        """The shardings of a node's factors, with these axes on the heads and the others on the rows."""
        made, rows = dict(self.shardings[node]), self.rows
        if not heads and {*self.hint.axes} <= {*made.get("s", REPLICATED).axes}:
            return made
        for axis in self.hint.axes:
            made = {factor: without(each, axis, self.mesh) for factor, each in made.items()}
        for axis in heads:
            rows = without(rows, axis, self.mesh)
        made |= {"s": rows} | ({"h": DimSharding(self._head_axes(heads)), "r": REPLICATED} if heads else {})
        return {factor: each for factor, each in made.items() if each.axes}

    def _seconds(self, heads: Sequence[str]) -> float:
        """The predicted time of all calls, with these axes on the heads: of their communication, and of their FLOPs on
        the busiest rank. Of causal rows the last rank sees all keys, and the first one only its own."""
        rows, keys, ring = self._rows_left(heads), self.nodes[0].operands[1:3], self._is_ring(heads)
        causal = argument(self.nodes[0], "causal") and not argument(self.nodes[0], "window")
        ranks, stripes = self.mesh.extent(rows.axes), max(stripes_of(self.nodes[0], rows, self.mesh), 1)
        total, times = 0.0, self._times(heads)
        for node in self.nodes:
            made = self.cache.strategy(self.cache.rule(node), self._sharded(node, heads))
            flops = flops_of(node) / self.mesh.extent([axis for _, axes in made.shardings for axis in axes])
            rate = self.machine.rate(node.operands[0].type.dtype)
            total += flops * (1 + (1 - 1 / ranks) / stripes if causal else 1) / rate
            for value, need in zip(node.operands, made.operands, strict=True):
                if value.spec is not None and value.node not in self.nodes:
                    if ring and value in keys:
                        total += times * self._ring_seconds(value, need.with_dim(2, rows), node is not self.nodes[0])
                        need = need.with_dim(2, rows)
                    total += (times if value in keys else 1) * self.planner.seconds(value.type, value.spec, need)
            for value, gives in zip(node.outs, made.results, strict=True):
                copied = node is not self.nodes[0] and value.index in (1, 2)
                if ring and copied:
                    gives = Spec(gives.dims, tuple(each for each in gives.partial if each[0] not in rows.axes))
                    gives = gives.with_dim(2, rows)
                for user in self.users[value]:
                    if user.strategy is not None and user not in self.nodes:
                        need = user.strategy.operands[user.operands.index(value)]
                        total += (times if copied else 1) * self.planner.seconds(value.type, gives, need)
        return total

    def _ring_seconds(self, value: Value, spec: Spec, backward: bool) -> float:
        """The predicted time in which keys come from all ranks of a ring; in the backward their gradients go back."""
        rows, size = spec.dims[2], value.shape[2]
        ranks = self.mesh.extent(rows.axes)
        each = size // ranks
        moved = spec.with_dim(2, DimSharding(rows.axes, rows=Window(ranks, each, 1, -each, -1, wraps=True)))
        plain = spec.with_dim(2, DimSharding(rows.axes))
        return (ranks - 1) * (1 + backward) * self.planner.seconds(value.type, plain, moved)

    def _repeat(self, times: int, rewriter: Rewriter) -> None:
        """Repeat each key head, and sum the gradients of its copies."""
        forward, *backward = self.nodes
        keys = forward.operands[1:3]
        copies = []
        for value in keys:
            batch, groups, *rest = value.shape
            added = rewriter.call(aten.unsqueeze.default, value, 2, like=forward)
            expanded = rewriter.call(aten.expand.default, added.outs[0], [batch, groups, times, *rest], like=forward)
            copy = rewriter.call(aten.reshape.default, expanded.outs[0], [batch, groups * times, *rest], like=forward)
            for each in (added, expanded, copy):
                each.why = f"{times} copies of each key head, for heads over {' '.join(self.hint.axes)}"
                rewriter.before(forward, each)
            copies.append(copy.outs[0])
        for place, (value, copy_of) in enumerate(zip(keys, copies, strict=True)):
            rewriter.replace(value, copy_of, [forward], [place + 1])
        self.nodes = [forward, *(self._repeated_backward(node, copies, times, rewriter) for node in backward)]

    def _repeated_backward(self, node: Node, copies: Sequence[Value], times: int, rewriter: Rewriter) -> Node:
        grad_q, grad_k, grad_v, *rest = node.results
        types = [grad_q, *copies, *rest]
        made = Rewriter.make(
            node.op,
            (*node.args[:2], *copies, *node.args[4:]),
            [None if each is None or of is None else each.type for each, of in zip(types, node.results, strict=True)],
            like=node,
            kwargs=node.kwargs,
        )
        self.shardings[made] = self.shardings[node]
        self._write(made, self.cache.strategy(self.cache.rule(made), self._sharded(made, self.heads)))
        rewriter.before(node, made)
        for old, new in zip(node.results, made.results, strict=True):
            if old is None or new is None:
                continue
            if old in (grad_k, grad_v):
                batch, groups, *dims = old.shape
                like = self.nodes[0].operands[1 if old is grad_k else 2].spec
                split = Rewriter.make(
                    *(aten.reshape.default, (new, [batch, groups, times, *dims])),
                    TensorType((batch, groups, times, *dims), old.type.dtype),
                    like=node,
                )
                self._write(split, as_placed(self.cache.rule(split), split, self.mesh, {new: like}.get))
                summed = rewriter.call(aten.sum.dim_IntList, rewriter.before(node, split).outs[0], [2], like=node)
                new = rewriter.before(node, summed).outs[0]
            rewriter.replace(old, new)
        rewriter.erase(node)
        return made

    def _write(self, node: Node, made: Strategy) -> None:
        node.strategy = made
        for value, spec in zip(node.outs, made.results, strict=True):
            value.spec = spec

    def _error(self, what: str, expected: str, got: str, remedy: str | None = None) -> Error:
        return Error(what, where=self.where, expected=expected, got=got, remedy=remedy)
