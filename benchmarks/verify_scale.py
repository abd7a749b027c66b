"""Time of ``pm.verify()`` at scale: Llama-3-70B's shapes on dp=64 x tp=8, without weights.

    python -m benchmarks.verify_scale [--layers 80] [--dp 64] [--tp 8]

Prints the verdict, its seconds by the clock and of the processor, and the peak memory of the process.
Aim: 80 layers on 512 ranks within 15 s and 1 GB.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable

import shardfx as sx

from .plan_scale import planned


def timed(what: str, verify: Callable[[], object]) -> None:
    started, used = time.perf_counter(), time.process_time()
    verdict = verify()
    print(verdict)
    print(f"{what:<22} {time.perf_counter() - started:6.1f} s, {time.process_time() - used:6.1f} s of processor")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--dp", type=int, default=64)
    parser.add_argument("--tp", type=int, default=8)
    args = parser.parse_args()
    mesh = sx.Mesh(dp=args.dp, tp=args.tp)
    started = time.perf_counter()
    pm = planned(args.layers, mesh, batch=args.dp)  # one sample for each data-parallel rank
    print(f"{args.layers} layers on {mesh.size} ranks, {len(pm.planned.nodes)} IR nodes")
    print(f"{'plan':<22} {time.perf_counter() - started:6.1f} s", flush=True)
    timed("verify()", pm.verify)
    print(f"{'most memory':<22} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:6.2f} GB")


if __name__ == "__main__":
    main()
