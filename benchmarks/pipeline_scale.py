"""Llama-3-70B's shapes on 64 ranks in stages, planned without weights: from the module to one rank's program, proven.

    python -m benchmarks.pipeline_scale [--layers 80 --microbatches 256 --memory 34GB --no-verify]

The published layout: 8 stages times 8 ranks of tensor parallelism with tokens sharded between blocks, two segments of
layers on each rank (interleaved), 256 micro-batches, and recomputed layers chosen stage by stage: as many in the first
stages as their micro-batches in flight ask for, none in the last. Aim: under 30 s from module to program. With
``--memory`` the layers of each stage are chosen so that all ranks fit, whose programs are then all replayed.
"""

from __future__ import annotations

import argparse
import time

import shardfx as sx

from .plan_scale import SPECS, llama, loss, most_memory

MESH = {"pp": 8, "tp": 8}
CHUNKS = 2
BETWEEN = {f"model.layers.*.{norm}": "-, tp, -" for norm in ("input_layernorm", "post_attention_layernorm")}
"""Tokens are sharded over tp between attention and feed forward."""


def recomputed(layers: int) -> tuple[str, ...]:
    """The recomputed layers: fewer in later stages."""
    stages = MESH["pp"] * CHUNKS
    size = layers // stages
    often = [max(size - stage * (size + 1) // stages, 0) for stage in range(stages)]
    return tuple(f"model.layers.{stage * size + i}" for stage in range(stages) for i in range(often[stage]))


def planned(layers: int, microbatches: int, schedule: str, memory: str | None = None) -> sx.ParallelModule:
    """The plan of one sample of 4,096 tokens a micro-batch."""
    model, x = llama(layers, microbatches)
    specs = {
        **{name: spec for name, spec in SPECS.items() if not name.startswith(("args", "targets"))},
        **BETWEEN,
        "model.norm": "-, tp, -",
    }
    hints = sx.Hints(
        args=(x,),
        loss=loss,
        targets=(x,),
        specs={"args.0": "mb, -", "targets.0": "mb, -", **specs},
        recompute=recomputed(layers),
        memory=memory,
        pipeline=sx.Pipeline(schedule=schedule, stages_per_rank=CHUNKS),
    )
    return sx.parallelize(model, sx.Mesh(**MESH, mb=sx.Loop(microbatches)), hints)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--microbatches", type=int, default=256)
    parser.add_argument("--schedule", default="interleaved")
    parser.add_argument("--memory", help="budget of a rank, by which stages are split")
    parser.add_argument("--no-verify", action="store_true")
    given = parser.parse_args()
    started, busy = time.perf_counter(), time.process_time()
    pm = planned(given.layers, given.microbatches, given.schedule, given.memory)
    ready = time.perf_counter()
    program = pm.rank_program(0)
    done, busy = time.perf_counter(), time.process_time() - busy
    again = recomputed(given.layers)
    print(f"layers                 {given.layers}, {len(again)} of them recomputed, {len(pm.planned.nodes)} IR nodes")
    print(f"model to plan          {ready - started:6.1f} s")
    print(f"rank 0's program       {done - ready:6.1f} s, {len(program.graph.nodes)} fx nodes")
    print(f"model to program       {done - started:6.1f} s, {busy:.1f} s of them on a processor")
    for note in pm.planned.notes if given.memory else ():
        print(note)
    print(f"most memory            {most_memory():6.2f} GB")
    if not given.no_verify:
        started, busy = time.perf_counter(), time.process_time()
        verdict = pm.verify()
        spent, busy = time.perf_counter() - started, time.process_time() - busy
        print(f"{verdict.status:<22} {spent:6.1f} s, {busy:.1f} s of them on a processor, {most_memory():.2f} GB")
        if not verdict:
            raise SystemExit(str(verdict))


if __name__ == "__main__":
    main()
