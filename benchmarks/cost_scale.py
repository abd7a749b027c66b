"""Time of cost estimates at depth: replay, costs and report of Llama-3-70B's shapes on dp=8 x tp=8, without weights.

    python -m benchmarks.cost_scale [--layers 80]

Prints the CPU seconds of each step, and the report's own figures. Aim: replay and report in seconds.
"""

from __future__ import annotations

import argparse
import time

import shardfx as sx
from shardfx.ir.cost.amounts import total
from shardfx.ir.cost.node_cost import NodeCosts
from shardfx.ir.cost.replay import replay
from shardfx.ir.program.lower import lower
from shardfx.module.programs import TRAIN

from .plan_scale import planned


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers", type=int, default=80)
    layers = parser.parse_args().layers
    pm = planned(layers, sx.Mesh(dp=8, tp=8), batch=8)
    graph, book, machine = pm.planned, pm._compiled.context.rules, sx.Machine.load("h100-dgx")
    clock = [time.process_time()]

    def lap() -> float:
        clock.append(time.process_time())
        return clock[-1] - clock[-2]

    program = lower(graph, 0, book, TRAIN)
    print(f"layers          {layers}, {len(graph.nodes)} IR nodes, {len(program.graph.nodes)} fx nodes")
    print(f"lowering        {lap():6.2f} s")
    footprint = replay(program)
    peak = footprint.peak.nbytes
    print(f"replay          {lap():6.2f} s   {peak / 1e9:.1f} GB at the peak, {footprint.cost.flops / 1e15:.2f} PFLOP")
    prices = NodeCosts(graph.mesh, book)
    cost = total(prices.of(node) for node in graph.nodes)
    seconds = cost.seconds(machine, graph.mesh)
    print(f"prices          {lap():6.2f} s   of {len(prices)} distinct nodes: {seconds:.2f} s a step on {machine.name}")
    text = str(pm.report(machine))
    print(f"report          {lap():6.2f} s   {len(text.splitlines())} lines")


if __name__ == "__main__":
    main()
