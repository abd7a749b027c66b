"""context-parallel: how attention is computed where its sequence is sharded.

Propagation leaves the query rows of an attention sharded, and gathers its keys and values. Where a :class:`Context`
names the module, this pass gives its attention, forward and backward, another strategy of the same op. Nothing around
it changes: what is sharded by rows there becomes sharded by heads in front of it, and by rows again behind it.

    before   %7, %8 = shardfx.attention(%4, %5, %6)     s{cp}: %4 [2, 32, 4096{cp}, 128], %5 and %6 gathered
    after    %7, %8 = shardfx.attention(%4, %5, %6)     h{cp}: all of [2, 32{cp}, 4096, 128]          all-to-all

gather (Llama 3, https://arxiv.org/abs/2407.21783), all-to-all (DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509),
2d (heads over the last axis, rows over the others: USP, https://arxiv.org/abs/2405.07719).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from shardfx.ir.dim_sharding import REPLICATED, DimSharding, without
from shardfx.ir.errors import Error, did_you_mean
from shardfx.ir.graph import Graph, Node, Phase, Strategy, Value
from shardfx.ir.mesh import Mesh
from shardfx.ir.names import pattern
from shardfx.ir.ops.fused_attention import attention, attention_backward
from shardfx.ir.rules.strategy import factor_shardings

from .base import SHARDED, Pass, PassContext

CONTEXT = "context: "
HOW = ("auto", "gather", "all-to-all", "2d")


@dataclass(frozen=True)
class Context:
    """Context parallelism of the attention in a module: ``specs={"**.self_attn": sx.Context("cp")}``.

    The sequence itself is sharded by a placement of the inputs, such as ``"kwargs.input_ids": "-, cp"``.

    Args:
        axis: the mesh axis over which the sequence is sharded; several, major first, as ``"ring heads"``.
        how: the strategy. ``"gather"``: keys and values of all rows on each rank. ``"all-to-all"``: heads sharded
            within attention, rows outside. ``"2d"``: heads over the last of several axes, rows over the others, whose
            keys are gathered. ``"auto"``: the one of the fewest predicted seconds among those whose memory does not
            grow with the axis; gather where there is none.

    Example::

        hints = sx.Hints(..., specs={"kwargs.input_ids": "-, cp", "**.self_attn": sx.Context("cp", how="all-to-all")})
    """

    axis: str
    how: str = "auto"

    def __post_init__(self) -> None:
        where = f"Context({self.axis!r}, how={self.how!r})"
        if not isinstance(self.axis, str) or not self.axes or len(set(self.axes)) < len(self.axes):
            expected = 'the name of a mesh axis, or names of several, as "ring heads"'
            raise Error("the axis of a Context is no name", where=where, expected=expected, got=repr(self.axis))
        if self.how not in HOW:
            remedy = did_you_mean(str(self.how), HOW, "see help(sx.Context)")
            what = "a Context of an unknown strategy"
            raise Error(what, where=where, expected=f"how one of {', '.join(HOW)}", got=repr(self.how), remedy=remedy)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes, major first."""
        return tuple(self.axis.replace(",", " ").split())

    @property
    def text(self) -> str:
        """As a saved plan has it."""
        return f"{CONTEXT}{self.axis}; {self.how}"

    @staticmethod
    def of_text(text: str) -> Context | None:
        """Read :attr:`text`; None if it is that of something else."""
        return Context(*text.removeprefix(CONTEXT).split("; ")) if text.startswith(CONTEXT) else None


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
            named = [node for node in calls if _is_within(node.where.module, text)]
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
        users = graph.users() if chosen else {}
        for node, (text, hint) in chosen.items():
            _Attention(node, text, hint, graph.mesh, context, users).place()
        return bool(chosen)


def _is_within(module: str, text: str) -> bool:
    """Whether a pattern names a module, or one that it is in."""
    matches, parts = pattern(text).fullmatch, module.split(".")
    return any(matches(".".join(parts[:count])) for count in range(1, len(parts) + 1))


def _without_attention(text: str, hint: Context, calls: Sequence[Node]) -> Error:
    modules = list(dict.fromkeys(node.where.module for node in calls))
    return Error(
        f"hint {text!r} names no attention",
        where="Hints(specs=...)",
        expected=f"a module that computes scaled_dot_product_attention: {', '.join(modules[:4]) or 'none here does'}",
        got=f"{text!r}: {hint}",
        remedy=did_you_mean(text, modules, "print(pm.captured) shows each attention with its module", count=3),
    )


class _Attention:
    """An attention and its backward, whose strategy is to be chosen."""

    def __init__(
        self,
        node: Node,
        text: str,
        hint: Context,
        mesh: Mesh,
        context: PassContext,
        users: Mapping[Value, Sequence[Node]],
    ) -> None:
        self.hint, self.mesh, self.planner, self.cache = hint, mesh, context.planner, context.cache
        self.where = f"hint {text!r}: {hint}; {node.where}"
        behind = (user for value in node.outs for user in users[value])
        self.nodes = list(dict.fromkeys([node, *(user for user in behind if user.op is attention_backward)]))
        self.users = users
        unknown = [axis for axis in hint.axes if axis not in mesh.names]
        if unknown:
            remedy = did_you_mean(unknown[0], mesh.names)
            raise self._error(f"mesh axis {unknown[0]!r} is unknown", f"axes of {mesh!r}", unknown[0], remedy)
        q = node.operands[0]
        assert q.spec is not None
        self.rows = q.spec.dims[2]
        if not set(hint.axes) <= set(self.rows.axes):
            raise self._error(
                f"{hint.axis!r} shards no sequence here",
                "an axis that shards the rows of the queries [batch, heads, rows, head]",
                f"queries {q.spec.text(q.shape)}",
                f'shard the inputs of the model over it: specs={{"args.0": "-, {hint.axis}"}}',
            )

    def place(self) -> None:
        """Write the strategy onto the nodes."""
        known = {"auto": self._auto, "gather": lambda: (), "all-to-all": lambda: self.hint.axes, "2d": self._last}
        heads = known[self.hint.how]()
        self._check(heads)
        for node in self.nodes:
            node.strategy = self._strategy(node, heads)
            for value, spec in zip(node.outs, node.strategy.results, strict=True):
                value.spec = spec

    def _last(self) -> tuple[str, ...]:
        if len(self.hint.axes) < 2:
            expected = "two mesh axes or more: heads over the last, rows over the others"
            remedy = 'name two: sx.Context("rows heads", how="2d"), with the sequence sharded as "-, rows heads"'
            raise self._error("a 2d strategy of one axis", expected, f"the axis {self.hint.axis!r}", remedy)
        return self.hint.axes[-1:]

    def _auto(self) -> tuple[str, ...]:
        """The axes that shard heads, by predicted seconds; all rows are gathered only if nothing else works."""
        axes = self.hint.axes
        options = [axes[start:] for start in range(len(axes)) if self._reason(axes[start:]) is None]
        return min(options, key=self._seconds, default=())

    def _check(self, heads: Sequence[str]) -> None:
        reason = self._reason(heads)
        if reason is not None:
            what, expected, got = reason
            fits = max((n for n in range(1, got + 1) if expected % n == 0), default=1)
            remedy = (
                f"an axis of at most {fits} ranks; how='gather'; or two axes and how='2d', with at most {fits} last"
            )
            raise self._error(what, f"a divisor of {expected} heads of keys", f"{got} shards of heads", remedy)

    def _reason(self, heads: Sequence[str]) -> tuple[str, int, int] | None:
        """Why heads cannot be sharded over these axes too, with the number of heads and of their shards."""
        rule = self.cache.rule(self.nodes[0])
        axes = (*self._shardings(self.nodes[0], ()).get("h", REPLICATED).axes, *heads)
        groups, ranks = rule.sizes["h"], self.mesh.extent(axes)
        if not heads or groups % ranks == 0:
            return None
        return "there are fewer heads of keys than shards, or they do not divide", groups, ranks

    def _shardings(self, node: Node, heads: Sequence[str]) -> dict[str, DimSharding]:
        """The shardings of a node's factors, with these axes on the heads and the others on the rows."""
        made = factor_shardings(self.cache.rule(node), node, self.mesh)
        rows = made.get("s", REPLICATED)
        for axis in self.hint.axes:
            made = {factor: without(each, axis, self.mesh) for factor, each in made.items()}
        kept = self.rows
        for axis in heads:
            kept = without(kept, axis, self.mesh)
        made["s"] = kept if heads else (rows if set(self.hint.axes) <= set(rows.axes) else self.rows)
        if heads:
            made["h"] = DimSharding((*made.get("h", REPLICATED).axes, *heads))
        return {factor: each for factor, each in made.items() if each.axes}

    def _strategy(self, node: Node, heads: Sequence[str]) -> Strategy:
        return self.cache.strategy(self.cache.rule(node), self._shardings(node, heads))

    def _seconds(self, heads: Sequence[str]) -> float:
        """The predicted time of the communication of all calls, with these axes on the heads."""
        total = 0.0
        for node in self.nodes:
            made = self._strategy(node, heads)
            for value, need in zip(node.operands, made.operands, strict=True):
                if value.spec is not None and value.node not in self.nodes:
                    total += self.planner.seconds(value.type, value.spec, need)
            for value, gives in zip(node.outs, made.results, strict=True):
                for user in self.users[value]:
                    if user.strategy is not None and user not in self.nodes:
                        need = user.strategy.operands[user.operands.index(value)]
                        total += self.planner.seconds(value.type, gives, need)
        return total

    def _error(self, what: str, expected: str, got: str, remedy: str | None = None) -> Error:
        return Error(what, where=self.where, expected=expected, got=got, remedy=remedy)
