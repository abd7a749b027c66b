"""Families: ranks whose programs are one program, up to the numbers that differ by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import fx

from shardfx.ir.graph import Node, Value
from shardfx.runtime.verify.proof.interpreter import HasGraph, Written

from .varying import Diverged, Together, Varying, leaves


@dataclass(frozen=True, eq=False)
class Family:
    """Ranks that share one program, up to the numbers that differ by rank."""

    together: Together
    program: HasGraph

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the family, in the order of the mesh."""
        return self.together.ranks

    @cached_property
    def varying(self) -> list[fx.Node]:
        """The calls with constants that differ by rank."""
        return [node for node in self.program.graph.nodes if any(map(varies, leaves(node.args, node.kwargs)))]

    @contextmanager
    def only(self, rank: int) -> Iterator[HasGraph]:
        """The program, in the meantime with the numbers of one rank."""
        numbers = [(node, node.args, node.kwargs) for node in self.varying]
        for node, call in self.at(rank).own.items():
            node.args, node.kwargs = call.args, call.kwargs
        try:
            yield self.program
        finally:
            for node, args, kwargs in numbers:
                node.args, node.kwargs = args, kwargs

    def at(self, rank: int) -> Written:
        """The program of one of the ranks: the family's graph, with its own calls where constants differ."""
        own = dict[fx.Node, fx.Node]()
        for node in self.varying:
            args, kwargs = fx.node.map_aggregate((node.args, node.kwargs), partial(self.together.at, rank=rank))
            own[node] = fx.Node(node.graph, node.name, node.op, node.target, args, kwargs)
            own[node].meta = node.meta
            for used in node.all_input_nodes:
                del used.users[own[node]]
        return Written(self.program.graph, own)


def same_numbers(family: Family, nodes: Sequence[Node], codes: Mapping[Value, Family]) -> bool:
    """Whether the constants of a program that differ by rank are those of its ops' ``codes``, and all of them.

    The program is then one text with each rank's own numbers, and these are proven. An op may be recomputed.
    """
    known: dict[Any, Any] = {}
    found: dict[Value, list[Any]] = {}
    for node in family.varying:
        made = node.meta.get("shardfx")
        if not isinstance(made, Node) or not made.outs:
            return False
        if (each := _numbers(family, node, family.ranks, known)) is not None:
            found.setdefault(made.outs[0], []).append(each)
    of_code: dict[int, list[Any]] = {}
    for planned in nodes:
        code = codes[planned.outs[0]]
        if id(code) not in of_code:
            each_call = (_numbers(code, call, family.ranks, known) for call in code.varying)
            of_code[id(code)] = [each for each in each_call if each is not None]
        wanted, there = of_code[id(code)], found.pop(planned.outs[0], [])
        if not wanted and not there:
            continue
        if not wanted or not there or there != wanted * (len(there) // len(wanted)):
            return False
    return not found


def _numbers(family: Family, call: fx.Node, ranks: Sequence[int], known: dict[Any, Any]) -> Any:
    """The target and the constants of a call on some ranks of its family; None where they are the same on all."""
    together, constants = family.together, []
    for arg in leaves(call.args, call.kwargs):
        key = id(together), together.mark(arg) if isinstance(arg, Varying) else arg
        if varies(arg) and key not in known:
            each = together.on_each(arg)
            assert each is not None
            found = tuple(each[together.place[rank]] for rank in ranks)
            known[key] = found if len(set(found)) > 1 else found[0]
        constants.append(known[key] if varies(arg) else arg)
    return (call.target, constants) if any(isinstance(each, tuple) for each in constants) else None


def varies(arg: Any) -> bool:
    """Whether a constant differs by rank."""
    return isinstance(arg, Varying) or (isinstance(arg, str) and "⟨" in arg)


def families(write: Callable[[Any], HasGraph], parts: Iterable[Sequence[int]]) -> Iterator[Family]:
    """The families of some ranks, each written once; ``parts`` are ranks that may be in one, as far as is known.

    Raises:
        Exception: whatever ``write`` raises for one rank alone.
    """
    waiting = [tuple(part) for part in parts][::-1]
    while waiting:
        ranks = waiting.pop()
        together = Together(ranks)
        try:
            program = write(together.rank())
        except Diverged as split:
            waiting += [tuple(part) for part in split.parts]
            continue
        except Exception:
            if len(ranks) == 1:
                raise
            waiting += [ranks[1:], ranks[:1]]  # the error is to be that of a rank
            continue
        yield Family(together, program)
