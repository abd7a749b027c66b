"""Rule discovery: the rule of an op without one, found by running it on small random tensors.

    book = default_rules().with_fallback(Discovery().entry)
    book.entry(torch.ops.mylib.row_softmax.default).make(node)      # a b! -> a b!

All one-axis shardings and partial sums that give the right result are searched (:mod:`.sharding_search`), on a small
instance of the node (:mod:`.shrink`); the compatible ones form the rule, which is then checked as every other rule is
(:mod:`.soundness`), on other values. A discovered rule is independent of sizes.

No rule is discovered for an op that fails on small tensors, draws random numbers, is not deterministic, mutates its
arguments, takes too long, or crashes: all of this runs in a subprocess
(:mod:`.run_isolated`).
"""

from __future__ import annotations

import itertools
import string
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_flatten_with_path

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import Contiguous, RuleEntry
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import Dim, Linear, ShardingRule
from shardfx.ir.rules.template import keeps_precision

from .draws import draws
from .instance import Instance, Place, as_results, bind, describe, replaced
from .recombine import same
from .run_isolated import Lost, isolated
from .sharding_search import Oracle, ValidSharding
from .shrink import small_instance
from .soundness import refute, trials, undisturbed

SECONDS = 10
"""CPU seconds for the search of one op on one class of shapes: independent of the load of the machine."""
LONGEST_CALL = 1.0
LONGEST_SEARCH = 90.0
"""Limits in wall-clock seconds: of one call, and of the subprocess in which an op is tried."""
REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass
class Discovery:
    """Discovers rules of ops, and caches them."""

    _entries: dict[Any, RuleEntry | None] = field(default_factory=dict)
    _found: dict[str, Findings] = field(default_factory=dict)

    def entry(self, op: Any) -> RuleEntry | None:
        """The entry of an op without a rule, which is discovered on demand; None if it is no op of torch, or one that
        cannot be discovered."""
        if op not in self._entries:
            self._entries[op] = _entry(op, self.findings) if _can_be_told(op) else None
        return self._entries[op]

    def findings(self, node: Node) -> Findings:
        """The findings for a node, cached by its op and shapes."""
        key = f"{describe(node)} -> {[v is not None for v in node.results]}"
        if key not in self._found:
            try:
                self._found[key] = isolated(lambda: discovered(node), LONGEST_SEARCH, cpu_seconds=SECONDS)
            except Lost:
                self._found[key] = Findings()
        return self._found[key]


def discovered(node: Node) -> Findings:
    """The findings for a node, on a small instance of it."""
    with undisturbed():
        of = small_instance(node)
        return search([of, *draws(of, seed=7)]) if of is not None and _steady(of) else Findings()


def search(values: Sequence[Instance]) -> Findings:
    """All shardings of a small instance, the first of ``values``, that hold on all of them."""
    node = values[0].node
    oracle = Oracle(values[0], trusted=_checks(node.op))
    shardings = together(oracle.shardings().values(), [v.shape for v in (*node.operands, *node.outs)])
    found = Findings()
    for sharding in shardings:
        more = replace(found, shardings=(*found.shardings, sharding))
        found = more if _holds(more, values) else found
    for group in oracle.linear():
        more = replace(found, linear=(*found.linear, group))
        found = more if _holds(more, values) else found
    return found


def _holds(found: Findings, values: Sequence[Instance]) -> bool:
    """Whether no trial of the findings is refuted."""
    node = values[0].node
    rule, entry = as_rule(found, node), _entry(node.op, lambda _: found)
    return not any(
        refute(entry, rule, of, trial, seed)
        for seed, of in enumerate(values)
        for trial in trials(rule, of.results, of.tensors)
    )


def _entry(op: Any, findings: Callable[[Node], Findings]) -> RuleEntry:
    """The rule entry of an op, from the findings for its nodes."""

    def make(node: Node) -> ShardingRule | None:
        found = findings(node)
        return as_rule(found, node) if found else None

    def local(emit: Emit) -> Any:
        """Arguments that are sizes follow the shardings; a mean is weighted by the rank's share."""
        args, share = emit.args, 1.0
        for sharding in findings(emit.node).shardings:
            t, d, _ = sharding.ends[0]
            length, size = emit.operand_shape(t)[d], emit.node.operands[t].shape[d]
            leaves = dict(tree_flatten_with_path(args)[0])
            args = replaced(args, {at: leaves[at] * length // size for at in sharding.sized})
            share *= length / size if sharding.places[-1] == "mean" else 1.0
        made = emit.call(op, *args, **emit.kwargs)
        return made if share == 1 else emit.call(torch.ops.aten.mul.Tensor, made, share)

    expand = op in decomposition_table
    return RuleEntry((op,), make, local=local, expand=expand, contiguous=Contiguous.ALL, discovered=True)


def _steady(of: Instance) -> bool:
    """Whether an op is deterministic, fast, and free of side effects: it mutates no argument and draws no numbers."""
    args, kwargs = bind(of.node, kept := [t.clone() for t in of.tensors])
    state = torch.get_rng_state()
    began = time.monotonic()
    try:
        with torch.no_grad():
            results = as_results(of.node.op(*args, **kwargs))
    except Exception:  # whatever the op says
        return False
    return (
        time.monotonic() - began < LONGEST_CALL
        and torch.equal(state, torch.get_rng_state())
        and len(results) == len(of.results)
        and all(map(same, results, of.results))
        and all(map(torch.equal, kept, of.tensors))
    )


def _can_be_told(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    return not any(tag in op.tags for tag in REFUSED)


def _checks(op: Any) -> bool:
    """Whether an op surely checks its arguments: one that is written in Python, from ops that do."""
    from torch._library.custom_ops import OPDEFS

    return op._schema.name in OPDEFS


# ---- what was found ------------------------------------------------------------------------------------------------

EQUAL = "equal"
WORDS = ("sum", "max", "min", "mean")
"""How an unsharded result that differs between ranks is reduced, in order of preference: one word for all results.
A mean is the sum of the ranks' results weighted by their shares."""
End = tuple[int, int] | str | None
"""The placement of a tensor: its sharded dim and the block size (elements in a row that are distributed together);
else EQUAL or one of WORDS for a result, None for an operand."""


@dataclass(frozen=True)
class FoundSharding:
    """One sharding: the placement of each operand, then of each result; and the paths of size arguments that follow the
    sharding.

    ``FoundSharding(((0, 1), None, (0, 1)))``: of x[n, d] and w[d] dim 0 of x is sharded, and dim 0 of the result with
    it.
    """

    places: tuple[End, ...]
    sized: tuple[Place, ...] = ()

    @property
    def ends(self) -> list[tuple[int, int, int]]:
        """The sharded tensors: index, dim and block size of each."""
        return [(i, *place) for i, place in enumerate(self.places) if isinstance(place, tuple)]


@dataclass(frozen=True)
class Findings:
    """The compatible shardings of an op, and the sets of operands that may be partial sums."""

    shardings: tuple[FoundSharding, ...] = ()
    linear: tuple[Linear, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shardings or self.linear)


def together(shardings: Iterable[ValidSharding], shapes: Sequence[Sequence[int]]) -> list[FoundSharding]:
    """Select the valid shardings that fit in one rule: each dim is sharded one way, all results reduced one way.

    Those of more operands, and those with fewer results to reduce, come first. ``shapes`` are those of operands,
    then of results.
    """

    def joined(sharding: ValidSharding) -> int:
        return sum(any(isinstance(o, int) for o in outcome) for outcome in sharding.results)

    taken: set[tuple[int, int]] = set()
    words: frozenset[Any] = frozenset(WORDS)
    found = []
    for sharding in sorted(shardings, key=lambda c: (-sum(d is not None for d in c.operands), -joined(c), -c.size)):
        ends: list[int | str | None] = list(sharding.operands)
        said = words
        for r, outcome in enumerate(sharding.results, len(ends)):
            free = min((o for o in outcome if isinstance(o, int) and (r, o) not in taken), default=None)
            ends.append(free if free is not None else EQUAL if EQUAL in outcome else "")
            said = said & outcome if ends[-1] == "" else said
        dims = {(i, d) for i, d in enumerate(ends) if isinstance(d, int)}
        if said and not taken & dims:
            taken |= dims
            words = said
            places = [(d, shapes[i][d] // sharding.size) if isinstance(d, int) else d for i, d in enumerate(ends)]
            found.append((places, sharding.sized))
    word = next(word for word in WORDS if word in words)
    return [FoundSharding(tuple(word if p == "" else p for p in places), sized) for places, sized in found]


def as_rule(found: Findings, node: Node) -> ShardingRule:
    """The sharding rule of a node from findings; a sharding that does not divide the node's sizes is left out."""
    names = (f"{letter}{i or ''}" for i in itertools.count() for letter in string.ascii_lowercase)
    sizes: dict[str, int] = {}
    full: set[str] = set()
    values = [*node.operands, *node.outs]
    dims: dict[tuple[int, int], Dim] = {}
    words: set[str] = set()
    unread: dict[str, frozenset[int]] = {}
    operands = len(node.operands)

    def unsharded(size: int) -> Dim:
        name = next(names)
        sizes[name] = size
        full.add(name)
        return (name,)

    for sharding in found.shardings:
        counts = {divmod(values[i].shape[d], block) for i, d, block in sharding.ends}
        (count, rest), *others = counts
        if rest or others:
            continue
        factor = next(names)
        sizes[factor] = count
        for i, d, block in sharding.ends:
            dims[i, d] = (factor, *(unsharded(block) if block > 1 else ()))
        equal = [value.index for value, place in zip(values, sharding.places, strict=True) if place == EQUAL]
        unread |= {factor: frozenset(equal)} if equal else {}
        words.update(place for place in sharding.places if isinstance(place, str) and place != EQUAL)
    made = [
        tuple(dims.get((i, d)) or (unsharded(size) if size != 1 else ()) for d, size in enumerate(value.shape))
        for i, value in enumerate(values)
    ]
    number = {value: i for i, value in enumerate(node.outs, operands)}
    results = tuple(None if value is None else made[number[value]] for value in node.results)
    (word,) = words or {"sum"}
    reduce = "sum" if word == "mean" else word
    linear = tuple(each for each in found.linear if _is_precise(each, node))
    return ShardingRule(tuple(made[:operands]), results, sizes, frozenset(full), linear, reduce, unread=unread)


def _is_precise(group: Linear, node: Node) -> bool:
    """Whether partial sums of a group are not rounded before they are reduced."""
    results = [v.type.dtype for v in node.outs if group.results is None or v.index in group.results]
    operands = [node.operands[i].type.dtype for i in group.operands]
    return all(keeps_precision(source, target) for source, target in itertools.product(operands, results))
