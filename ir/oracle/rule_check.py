"""Rules checked by hand: all that a rule allows of one call of its op is executed, on many values."""

from __future__ import annotations

import math
from typing import Any

import torch

from shardfx.ir.graph import Strategy
from shardfx.ir.rules.binding import Tensor
from shardfx.ir.rules.book import RuleEntry
from shardfx.ir.rules.strategy import strategy
from shardfx.ir.rules.template import Template

from .draws import draws
from .instance import Instance, instance
from .plan_check import fails_without_numbers
from .soundness import Failure, Refutation, RuleTrial, far_out, first_difference, trials, undisturbed

SECONDS = 120.0
"""For all that a rule allows on one call."""


def wrong_trials(entry: RuleEntry, of: Instance, most: int = 3) -> list[Refutation]:
    """The first trials of a rule that give another result than the op on one device, on some values or in some memory
    layout."""
    with undisturbed():
        rule = entry.make(of.node)
        if rule is None:
            return []
        found: list[Refutation] = []
        values = [of, *draws(of)]
        for trial in trials(rule, of.results, of.tensors):
            made = strategy(rule, trial.cuts, trial.mesh, trial.partial)
            why = _wrong(entry, made, [*values, *far_out(entry, of, made)], trial)
            if why:
                found.append(Refutation(repr(of), str(trial), why))
            if len(found) >= most:
                break
        return found


def _wrong(entry: RuleEntry, made: Strategy, values: list[Instance], trial: RuleTrial) -> str:
    node = values[0].node
    before, node.strategy = node.strategy, made
    try:
        failure = fails_without_numbers(node, entry, trial.mesh)
    finally:
        node.strategy = before
    try:
        return failure or first_difference(entry, made, values, trial.mesh, strict=True)
    except Failure as error:
        return f"it fails on shards: {error}"


def example(entry: RuleEntry, op: Any) -> Instance | None:
    """A call of an op by its rule's template, with defaults for all that is no tensor; None where that is no call.

    Factors become sizes of their own: ``n d, n -> n d`` is a call with tensors of shapes (4, 6) and (4,).
    """
    if not isinstance(entry.make, Template) or entry.make.more[0]:
        return None
    letters = dict.fromkeys(f for tensor in entry.make.operands for word in tensor.words for f in word.factors)
    sizes = dict(zip(letters, (4, 6, 8, 10, 12, 14), strict=False))
    tensors = iter(entry.make.operands)
    args = []
    for argument in op._schema.arguments:
        given = next(tensors, None) if "Tensor" in str(argument.type) else None
        if given is not None:
            shape = _shape(given, sizes)
            if shape is None or "List" in str(argument.type):
                return None
            args.append(torch.randn(shape, dtype=torch.float64))
        elif not argument.has_default_value():
            return None
        elif argument.kwarg_only:
            break
        else:
            args.append(argument.default_value)
    with undisturbed():
        try:
            return instance(op, args)
        except Exception:  # the op takes other arguments than these
            return None


def _shape(tensor: Tensor, sizes: dict[str, int]) -> tuple[int, ...] | None:
    shape = []
    for factors, many, at in tensor.words:
        if at or many not in ("", "..") or any(f not in sizes for f in factors):
            return None
        shape.append(math.prod(sizes[factor] for factor in factors))
    return tuple(shape)
