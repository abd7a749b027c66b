"""Weights stay in the stages that hold them already; what another stage needs of one is sent there.

    %3 = aten.t(%emb)      at{1}              %2 = aten.alias(%emb)                     at{0}
                                      ->      %3 = comm.send(%2, origin=0, places=[1])  at{1}
                                              %4 = aten.t(%3)                           at{1}

Programs for other forms of call (evaluation, results) run on what training stores, whatever they do with it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardfx.ir.graph import Graph
from shardfx.ir.rewriter import Rewriter
from shardfx.ir.rules.book import RuleBook

from .assignment import OF_WEIGHTS, Assignment, At

aten = torch.ops.aten


def keep_homes(graph: Graph, assigned: Assignment, held: Mapping[str, At], rules: RuleBook) -> None:
    """Let each weight be where it is ``held``, by name, and nowhere else; those that are not named stay as they are."""
    users = graph.users()
    rewriter = Rewriter(graph, rules)
    for given in graph.inputs:
        homes = held.get(given.name, ()) if given.kind in OF_WEIGHTS else ()
        if not homes:
            continue
        away = [node for node in users[given.value] if not set(assigned.at[node]) <= set(homes)]
        assigned.inputs[given.value] = homes
        if away:
            made = rewriter.before(away[0], rewriter.call(aten.alias.default, given.value, like=away[0]))
            made.why = f"{given.name} is held by {'stages' if len(homes) > 1 else 'stage'} {', '.join(map(str, homes))}"
            assigned.at[made] = homes[:1]
            rewriter.replace(given.value, made.outs[0], users=away)
    rewriter.apply()
