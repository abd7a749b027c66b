"""The rule of an op that has none, found by running the op on small random tensors.

    book = default_rules().with_fallback(Discovery(JsonCache(default_folder())).entry)
    book.entry(torch.ops.mylib.row_softmax.default).make(node)      # a b! -> a b!

All one-axis shardings and partial sums that give the right result are searched (:mod:`.sharding_search`), on a small
instance of the node (:mod:`.shrink`); those that go together are the rule (:mod:`.findings`), which is then checked as
every other rule is (:mod:`.soundness`), on other values. Findings are cached on disk, and checked again when they are
read: an op may have been changed since.

An op that cannot be told on small tensors has no rule: one that fails on them, draws random numbers, gives different
results for the same arguments, changes its arguments, takes too long, or crashes: all of this runs in a process of its
own (:mod:`.run_isolated`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._decomp import decomposition_table

from shardfx.ir.graph import Node
from shardfx.ir.rules.book import Contiguous, RuleEntry
from shardfx.ir.rules.local import Emit
from shardfx.ir.rules.sharding_rule import ShardingRule

from .draws import draws
from .findings import Findings, JsonCache, as_rule, from_json, to_json, together
from .instance import Instance, TooSlow, bind, describe, replace_at, variants
from .recombine import same
from .run_isolated import Lost, isolated
from .sharding_search import Oracle
from .shrink import small_instance
from .soundness import refute, trials, undisturbed

SECONDS = 10.0
"""Of computing, for the search of one op on one class of shapes: a busy machine finds what an idle one finds."""
SECONDS_PER_CALL = 0.1
LONGEST_CALL = 1.0
"""The same by the clock on the wall: an op may also wait."""
LONGEST_SEARCH = 90.0
"""And for the process in which an op is tried, in which a kernel may crash that does not check what it is given."""
REFUSED = (torch.Tag.nondeterministic_seeded, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


@dataclass
class Discovery:
    """Finds rules, each once: in memory by node, on disk by the class of its shapes."""

    store: JsonCache | None = None
    _entries: dict[Any, RuleEntry | None] = field(default_factory=dict)
    _found: dict[str, Findings] = field(default_factory=dict)

    def entry(self, op: Any) -> RuleEntry | None:
        """The entry of an op without a rule: its rule is discovered when it is asked for; None for what is no op of
        torch, or none that can be told."""
        if op not in self._entries:
            self._entries[op] = self._entry(op) if _can_be_told(op) else None
        return self._entries[op]

    def _entry(self, op: Any) -> RuleEntry:
        return RuleEntry(
            (op,),
            self.rule,
            local=self.local,
            expand=op in decomposition_table,
            contiguous=Contiguous.ALL,
            discovered=True,
        )

    def rule(self, node: Node) -> ShardingRule | None:
        """The rule of a node, or None if nothing may be sharded, as far as can be told."""
        found = self.findings(node)
        return as_rule(found, node) if found else None

    def findings(self, node: Node) -> Findings:
        """What was found of a node: now, before in this process, or on disk."""
        key = f"{describe(node)} -> {[v is not None for v in node.results]}"
        if key not in self._found:
            try:
                self._found[key] = isolated(lambda: self._discover(node), LONGEST_SEARCH)
            except Lost:
                self._found[key] = Findings()
        return self._found[key]

    def local(self, emit: Emit) -> Any:
        """One rank's call: arguments that are sizes follow the shardings; a mean is weighted by the rank's share."""
        args, share = emit.args, 1.0
        for sharding in self.findings(emit.node).shardings:
            ends = [(t, place[0]) for t, place in enumerate(sharding.operands) if place is not None]
            if not ends:
                continue
            t, d = ends[0]
            local, size = emit.operand_shape(t)[d], emit.node.operands[t].shape[d]
            for at in sharding.sized:
                args = replace_at(args, at, _at(args, at) * local // size)
            share *= local / size if sharding.results == ("mean",) else 1.0
        made = emit.call(emit.node.op, *args, **emit.kwargs)
        return made if share == 1 else emit.call(torch.ops.aten.mul.Tensor, made, share)

    def _discover(self, node: Node) -> Findings:
        with undisturbed():
            of = small_instance(node)
            if of is None or not _steady(of):
                return Findings()
            key = {
                "op": str(node.op),
                "schema": str(node.op._schema),
                "shapes": repr(of),
                "torch": torch.__version__,
            }
            known = self._cached(key, of)
            if known is not None:
                return known
            try:
                found = search(of)
            except TooSlow:
                return Findings()
            if found and self.store is not None:
                self.store.put(key, to_json(found))
            return found

    def _cached(self, key: Mapping[str, str], of: Instance) -> Findings | None:
        """What was found before, where it is right for the op as it is now."""
        try:
            found = from_json(self.store.get(key)) if self.store is not None else None
            return found if found is not None and _refuted(found, of) is None else None
        except Exception:  # whatever a changed file may say
            return None


def search(of: Instance) -> Findings:
    """All shardings of a small instance, checked.

    Raises:
        TooSlow: it takes longer than SECONDS.
    """
    oracle = Oracle(of.until(time.process_time() + SECONDS), trusted=_checks(of.node.op))
    shapes = [tuple(v.shape) for v in of.node.operands]
    shardings = together(oracle.shardings().values(), shapes, [v.shape for v in of.node.outs])
    found = Findings(shardings, tuple(oracle.linear()))
    while found and (smaller := _refuted(found, oracle.of)) is not None:
        found = smaller
    return found


def _refuted(found: Findings, of: Instance) -> Findings | None:
    """The findings without one that is refuted; None if all hold."""
    rule = as_rule(found, of.node)
    own = Discovery()
    own._found[f"{describe(of.node)} -> {[v is not None for v in of.node.results]}"] = found
    entry = RuleEntry((of.node.op,), own.rule, local=own.local, contiguous=Contiguous.ALL)
    for seed, each in enumerate((of, *variants(of, torch.Generator().manual_seed(7)), *draws(of))):
        for trial in trials(rule, each.results, each.tensors):
            if not refute(entry, rule, each, trial, torch.Generator().manual_seed(seed)):
                continue
            if trial.shardings:
                last = [f for f in rule.sizes if f in rule.factors and f in trial.shardings][-1]
                return found.without(sharding=_number(found, rule, last))
            return found.without(group=next(iter(trial.partial.values()))[1])
    return None


def _number(found: Findings, rule: ShardingRule, factor: str) -> int:
    """The number of the sharding that a factor is of."""
    is_operand, tensor, dim, _ = rule.factors[factor][0]
    for i, sharding in enumerate(found.shardings):
        places: Any = sharding.operands if is_operand else sharding.results
        if isinstance(places[tensor], tuple) and places[tensor][0] == dim:
            return i
    raise AssertionError(factor)


def _steady(of: Instance) -> bool:
    """Whether the op gives the same for the same, at once, without changing its arguments or drawing numbers."""
    args, kwargs = bind(of.node, kept := [t.clone() for t in of.tensors])
    state = torch.get_rng_state()
    began, computed = time.monotonic(), time.process_time()
    try:
        with torch.no_grad():
            given = of.node.op(*args, **kwargs)
    except Exception:  # whatever the op says
        return False
    slow = time.process_time() - computed > SECONDS_PER_CALL or time.monotonic() - began > LONGEST_CALL
    results = [r for r in (given if isinstance(given, (tuple, list)) else [given]) if isinstance(r, torch.Tensor)]
    expected = [r for r in of.results if r is not None]
    return (
        not slow
        and torch.equal(state, torch.get_rng_state())
        and len(results) == len(expected)
        and all(same(a, b) for a, b in zip(results, expected, strict=True))
        and all(torch.equal(a, b) for a, b in zip(kept, of.tensors, strict=True))
    )


def _can_be_told(op: Any) -> bool:
    if not isinstance(op, torch._ops.OpOverload) or op._schema.is_mutable:
        return False
    return not any(tag in op.tags for tag in REFUSED)


def _checks(op: Any) -> bool:
    """Whether an op surely checks its arguments: one that is written in Python, from ops that do."""
    from torch._library.custom_ops import OPDEFS

    return op._schema.name in OPDEFS


def _at(args: Any, place: tuple[int, ...]) -> Any:
    for i in place:
        args = args[i]
    return args
